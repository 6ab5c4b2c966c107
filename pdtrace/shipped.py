"""Files that come with pdtrace and run elsewhere: dashboards, alert rules, collector files.

Owns where they lie (`pdtrace/data`; in a checkout links to where they are made) and how they are
written out; knows nothing of what is in them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType

from pdtrace.alert_links import PATHS, RUNBOOKS, Places, placed
from pdtrace.errors import PdtraceError


class ShippedError(PdtraceError):
    """Files are not there, or cannot be written; the message says which."""

    code = "shipped_error"


class Shipped(StrEnum):
    """What can be written out."""

    DASHBOARDS = "dashboards"
    RULES = "rules"
    COLLECTOR = "collector"


DATA = Path(__file__).resolve().parent / "data"

_FOLDERS: Mapping[Shipped, tuple[tuple[Path, str], ...]] = MappingProxyType(
    {
        Shipped.DASHBOARDS: ((DATA / "generated" / "boards", ""),),
        Shipped.RULES: (
            (DATA / "generated" / "prometheus", "prometheus"),
            (DATA / "generated" / "grafana", "grafana"),
            (DATA / "runbooks", RUNBOOKS),
        ),
        Shipped.COLLECTOR: (
            (DATA / "collector", ""),
            (DATA / "generated" / "boards", "generated/boards"),
            (DATA / "generated" / "prometheus", "generated/prometheus"),
            (DATA / "runbooks", f"generated/{RUNBOOKS}"),
        ),
    }
)
_RULES = b"  - rules/*.yml\n"
_BESIDE = {
    Path("compose.yaml"): (b"../dashboards/generated", b"./generated"),
    Path("prometheus.yml"): (_RULES, _RULES + b"  - generated/prometheus/*.yml\n"),
}
"""What these have elsewhere in a checkout lies beside them where they are written out."""
_LINK = re.compile(r"\[([^\]]+)\]\((?!\w+:|#)([^)#\s]+)[^)]*\)")
"""In a page, to a file. The first group is what is read, the second where it leads."""


def files(what: Shipped) -> Iterator[tuple[Path, bytes]]:
    """Each file's path below the folder that it is to be written to, and what is in it.

    Links of pages to what is not written with them, such as the docs of a checkout, become names.
    Raises ShippedError where the installation lacks them.
    """
    sources: dict[Path, Path] = {}
    for folder, below in _FOLDERS[what]:
        found = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        if not found:
            raise ShippedError(
                f"this installation has no {what.value} ({folder}); install pdtrace from a wheel, "
                "or run it in a complete checkout"
            )
        sources |= {Path(below) / path.relative_to(folder): path for path in found}
    for to, path in sources.items():
        content = path.read_bytes().replace(*_BESIDE.get(to, (b"", b"")))
        if to.suffix == ".md":
            content = _with_links_among(sources, to, content.decode()).encode()
        yield to, content


def _with_links_among(written: Mapping[Path, Path], page: Path, text: str) -> str:
    def kept_or_named(link: re.Match[str]) -> str:
        leads_to = Path(os.path.normpath(page.parent / link[2]))
        return link[0] if leads_to in written else f"`{link[1].strip('`')}`"

    return _LINK.sub(kept_or_named, text)


def write(
    what: Shipped, folder: Path, *, replace: bool = False, places: Places = PATHS
) -> list[Path]:
    """Writes them below `folder`, which is made; returns their paths.

    Nothing is written where a file of other content is in the way, unless `replace`.

    places  where the links of alerts lead

    Raises ShippedError.
    """
    wanted = [(folder / path, content) for path, content in files(what)]
    if places != PATHS:
        if what is not Shipped.RULES:
            raise ShippedError(f"{what.value} hold no links of alerts: only rules do")
        wanted = [(path, _placed(path, content, places)) for path, content in wanted]
    try:
        changed = [
            path for path, content in wanted if path.exists() and path.read_bytes() != content
        ]
        if changed and not replace:
            others = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            raise ShippedError(
                f"{changed[0]}{others} would be overwritten and differs; give another directory, "
                "or --force"
            )
        for path, content in wanted:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    except OSError as error:
        raise ShippedError(f"{error.filename or folder}: {error.strerror or error}") from error
    return [path for path, _ in wanted]


def _placed(path: Path, content: bytes, places: Places) -> bytes:
    is_rules = path.suffix in {".yml", ".yaml"}
    return placed(content.decode(), places).encode() if is_rules else content
