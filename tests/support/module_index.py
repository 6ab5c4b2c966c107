"""Writes `docs/modules.md`: one line per module, the first of its docstring.

python -m tests.support.module_index [--check]
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "modules.md"
PACKAGES = {
    "pdtrace": "Records, assembles, analyses, shows. Ships in the wheel.",
    "server": "The prefill/decode server. Runs from the checkout.",
    "dashboards": "Generates Grafana boards and alert rules. What it makes ships in the wheel.",
}
HEADER = """# Modules

Generated from the modules' docstrings by `python -m tests.support.module_index`; do not edit.
"""


def first_line(path: Path) -> str:
    """First sentence of a module's docstring. Raises ValueError when it has none."""
    text = ast.get_docstring(ast.parse(path.read_text()))
    if not text:
        raise ValueError(f"{path} has no docstring")
    return " ".join(text.split("\n\n")[0].split())


def page() -> str:
    """The whole page."""
    parts = [HEADER]
    for package, meaning in PACKAGES.items():
        parts.append(f"## {package}\n\n{meaning}\n\n| module | owns |\n|---|---|")
        for path in sorted((ROOT / package).rglob("*.py")):
            if "node_modules" in path.parts or not path.read_text().strip():
                continue
            name = path.relative_to(ROOT / package)
            parts.append(f"| `{name}` | {first_line(path).replace('|', '&#124;')} |")
        parts.append("")
    return "\n".join(parts)


def main(arguments: list[str]) -> int:
    """Write the page, or with `--check` say whether it is up to date; the exit code."""
    if arguments == ["--check"]:
        if PAGE.exists() and PAGE.read_text() == page():
            return 0
        print(f"{PAGE.relative_to(ROOT)} is out of date: run `make fix`", file=sys.stderr)
        return 1
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
