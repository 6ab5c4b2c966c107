"""Writes `generated/`: the boards, the Prometheus rules and the Grafana-managed rules.

python -m dashboards.build                        write what changed
python -m dashboards.build --check                exit code 1 if something would change
python -m dashboards.build --slo FILE --out DIR   your own objectives, written elsewhere

Elsewhere the runbook pages and `slo.env`, the objectives for other programs, lie beside them.
With --grafana URL and --runbooks URL the links of alerts are whole addresses.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dashboards.annotations import marks
from dashboards.boards import one_request, overview, slow_traces, stages, transfer_and_workers
from dashboards.rules import grafana, prometheus
from dashboards.rules.alerts import alerts
from dashboards.rules.recordings import recordings
from dashboards.sdk import Board, Json, board_json
from pdtrace.agent.slo_environment import environment_file
from pdtrace.alert_links import PATHS, Places
from pdtrace.errors import PdtraceError
from pdtrace.slo import DEFAULT_SLO, Slo, read_slo

GENERATED = Path(__file__).resolve().parent / "generated"
PAGES = GENERATED.parents[1] / "docs" / "alerts"

BOARDS: tuple[Callable[[Slo], Board], ...] = (
    overview.board,
    stages.board,
    slow_traces.board,
    one_request.board,
    transfer_and_workers.board,
)


def boards(slo: Slo = DEFAULT_SLO) -> dict[str, Json]:
    """Every board as JSON, by uid."""
    made = [make(slo) for make in BOARDS]
    return {board.uid: board_json(board, marks()) for board in made}


def files(slo: Slo = DEFAULT_SLO, places: Places = PATHS) -> Mapping[str, str]:
    """Every generated file by its path below `generated/`."""
    made = {
        f"boards/{uid}.json": json.dumps(board, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
        for uid, board in boards(slo).items()
    }
    rules = alerts(slo, places=places)
    made["prometheus/pdtrace.rules.yml"] = prometheus.rule_file(recordings(slo), rules)
    made["grafana/alerts.yaml"] = grafana.rule_file(rules)
    return made


def own_files(slo: Slo, out: Path, places: Places = PATHS) -> Mapping[str, str]:
    """What is written for somebody's own objectives: all that programs need to know of them."""
    made = dict(files(slo, places))
    for page in sorted(PAGES.glob("*.md")):
        made[PATHS.runbook(page.stem)] = page.read_text()
    made["slo.env"] = environment_file(slo, out)
    return made


def stale(wanted: Mapping[str, str], folder: Path) -> list[str]:
    """Paths that are missing, different, or no longer made."""
    there = {
        str(path.relative_to(folder)): path.read_text()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    return sorted(path for path in {*wanted, *there} if wanted.get(path) != there.get(path))


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0 done or up to date, 1 with --check if not, 2 for settings that cannot be used."""
    parser = argparse.ArgumentParser(
        prog="dashboards.build", description="Write the boards and rules."
    )
    parser.add_argument("--check", action="store_true", help="compare only; exit code 1 if stale")
    parser.add_argument(
        "--slo", type=Path, metavar="FILE", help="objectives as TOML (docs/dashboards.md)"
    )
    for name, what in (("grafana", "Grafana"), ("runbooks", "the runbook pages")):
        parser.add_argument(
            f"--{name}",
            metavar="URL",
            default=getattr(PATHS, name),
            help=f"where {what} can be reached, for the links of alerts",
        )
    parser.add_argument("--out", type=Path, metavar="DIR", default=GENERATED, help="where to write")
    given = parser.parse_args(arguments)
    is_own = given.out != GENERATED
    try:
        places = Places(grafana=given.grafana, runbooks=given.runbooks)
        slo = DEFAULT_SLO if given.slo is None else read_slo(given.slo)
    except (PdtraceError, ValueError) as error:
        print(f"dashboards.build: {error}", file=sys.stderr)
        return 2
    if (given.slo is not None or places != PATHS) and not is_own:
        print(
            "dashboards.build: settings of your own need --out DIR; generated/ has the defaults",
            file=sys.stderr,
        )
        return 2
    wanted = own_files(slo, given.out, places) if is_own else files(slo)
    changed = stale(wanted, given.out)
    if given.check:
        for path in changed:
            print(f"{given.out / path} is out of date; run make fix", file=sys.stderr)
        return 1 if changed else 0
    for path in changed:
        target = given.out / path
        if path in wanted:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(wanted[path])
        elif not is_own:
            target.unlink()  # no longer made; in anybody's folder other files may lie beside
    if is_own:
        print(f"for servers, agents, Jaeger, collector and compose: {given.out / 'slo.env'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
