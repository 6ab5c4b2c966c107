"""Draw the generated boards with the data of a real Prometheus and Jaeger.

python -m dashboards.render --prometheus URL --jaeger URL --out DIR
python -m dashboards.render … --from now-15m --to now --board pd-overview --theme dark
python -m dashboards.render … --board pd-slow --var stage=transfer --var worker=decode-0
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from dashboards.build import GENERATED
from dashboards.render.drawing import MOST_COLOURS, THEMES, Drawing, draw, failures, variables_of
from dashboards.render.page import RenderError, find_programs, prepare
from dashboards.render.times import milliseconds
from dashboards.render.traces import slowest_trace
from dashboards.sdk import Json
from dashboards.variables import TRACE


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0: every panel was drawn; 1: some were not, or lack data; 2: none can be."""
    options = _parser().parse_args(arguments)
    try:
        return _drawn(options)
    except RenderError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _drawn(options: argparse.Namespace) -> int:
    boards = _boards()
    now = datetime.now(UTC)
    from_ms, to_ms = (milliseconds(text, now) for text in (options.since, options.to))
    if from_ms >= to_ms:
        raise RenderError(f"--from {options.since} is not before --to {options.to}")
    chosen = _known(options.board or list(boards), boards)
    variables = _variables(options.var, [boards[uid] for uid in chosen])
    programs = find_programs()
    if (
        options.jaeger
        and TRACE not in variables
        and any(TRACE in variables_of(boards[uid]) for uid in chosen)
    ):
        variables[TRACE] = [slowest_trace(options.jaeger, from_ms, to_ms)]
    started_s = time.monotonic()
    prepare(programs, _say)
    prepared_s = time.monotonic()
    drawing = Drawing(
        boards=boards,
        chosen=chosen,
        themes=options.theme or THEMES,
        prometheus=options.prometheus,
        jaeger=options.jaeger,
        from_ms=from_ms,
        to_ms=to_ms,
        out=options.out,
        variables=variables,
        colours=options.colours,
    )
    pages = draw(drawing, programs)
    wrong = list(failures(pages))
    report = {
        "from_ms": from_ms,
        "to_ms": to_ms,
        "prepared_s": round(prepared_s - started_s, 1),
        "drawn_s": round(time.monotonic() - prepared_s, 1),
        "failures": wrong,
        "pages": pages,
    }
    (options.out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    for line in wrong:
        print(line, file=sys.stderr)
    _say(f"{len(pages)} pictures and report.json in {options.out}, {len(wrong)} failures")
    return 1 if wrong else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dashboards.render",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--prometheus", metavar="URL", required=True)
    parser.add_argument("--jaeger", metavar="URL", help="without it the panels of traces fail")
    parser.add_argument("--from", dest="since", metavar="TIME", default="now-30m")
    parser.add_argument("--to", metavar="TIME", default="now")
    parser.add_argument("--out", metavar="DIR", type=Path, required=True)
    parser.add_argument("--board", metavar="UID", action="append", help="may be given again")
    parser.add_argument("--theme", choices=THEMES, action="append")
    parser.add_argument(
        "--var", metavar="NAME=VALUE", action="append", default=[], help="may be given again"
    )
    parser.add_argument(
        "--colours", metavar="N", type=_colours, help="smaller pictures, of so many colours at most"
    )
    return parser


def _colours(text: str) -> int:
    if not (text.isdecimal() and 2 <= int(text) <= MOST_COLOURS):
        raise argparse.ArgumentTypeError(f"2 to {MOST_COLOURS}, not {text!r}")
    return int(text)


def _boards() -> dict[str, Json]:
    """As committed, in the order of the links between them."""
    paths = sorted((GENERATED / "boards").glob("*.json"))
    return {board["uid"]: board for board in (json.loads(path.read_text()) for path in paths)}


def _known(uids: Sequence[str], boards: Mapping[str, Json]) -> list[str]:
    if unknown := [uid for uid in uids if uid not in boards]:
        raise RenderError(f"no board {', '.join(unknown)}; there are {', '.join(boards)}")
    return list(dict.fromkeys(uids))


def _variables(given: Sequence[str], boards: Sequence[Json]) -> dict[str, list[str]]:
    has = set[str]().union(*(variables_of(board) for board in boards))
    chosen: dict[str, list[str]] = {}
    for text in given:
        name, found, value = text.partition("=")
        if not found or name not in has:
            raise RenderError(
                f"--var takes one of {', '.join(sorted(has))} as NAME=VALUE: {text!r}"
            )
        chosen.setdefault(name, []).append(value)
    return chosen


def _say(text: str) -> None:
    print(text, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
