"""The generated boards are of the TypeScript types that Grafana is built from (@grafana/schema).

Unknown keys, wrong enums and options of another kind of panel do not compile. Queries have no
public types; `dashboards.lint` and Prometheus look at them.
"""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from dashboards.build import boards
from tests.support.programs import program

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ROOT / "tests" / "typing" / "grafana"
INSTALLED = ROOT / ".venv" / "share" / "dashboard-types"

PANELS = {
    "timeseries": ("timeseries", "TimeSeries", True),
    "stat": ("stat", "Stat", False),
    "bargauge": ("bargauge", "BarGauge", False),
    "heatmap": ("heatmap", "Heatmap", True),
    "table": ("table", "Table", False),
    "state-timeline": ("statetimeline", "StateTimeline", True),
}
"""Kind of panel → module, name, and whether it has field options of its own."""
UNTYPED = frozenset({"row", "traces"})
"""Kinds that have no options in the schema."""

PRELUDE = """\
import type { Dashboard } from '@grafana/schema';
// JSON has an enum's value where TypeScript wants its member.
type Lit<T> = T extends string ? `${T}` | T : T extends number ? T | number : T;
type Json<T> = T extends (infer U)[] ? Json<U>[]
  : T extends object ? { [K in keyof T]: Json<T[K]> } : Lit<T>;
type Some<T> = T extends (infer U)[] ? Some<U>[]
  : T extends object ? { [K in keyof T]?: Some<T[K]> } : T;
"""

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def tsc() -> list[str]:
    """The compiler beside the types; skips without node, npm or a network."""
    node, npm = program("node"), program("npm")
    compiler = INSTALLED / "node_modules" / "typescript" / "bin" / "tsc"
    lock = (PACKAGES / "package-lock.json").read_text()
    stamp = INSTALLED / "package-lock.json"
    if not compiler.exists() or not stamp.exists() or stamp.read_text() != lock:
        shutil.rmtree(INSTALLED, ignore_errors=True)
        shutil.copytree(PACKAGES, INSTALLED)
        done = subprocess.run(
            [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"],
            cwd=INSTALLED,
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
        )
        if done.returncode:
            shutil.rmtree(INSTALLED, ignore_errors=True)
            pytest.skip(f"npm cannot install @grafana/schema: {done.stderr.strip()[-300:]}")
    return [node, str(compiler)]


def source(made: Mapping[str, dict[str, Any]]) -> str:
    """TypeScript that compiles only if the boards are what they should be."""
    return PRELUDE + "".join([*_imports(), *_checks(made)])


def _imports() -> Iterator[str]:
    for module, name, _ in PANELS.values():
        path = f"@grafana/schema/dist/esm/raw/composable/{module}/panelcfg/x"
        yield f"import type * as {name} from '{path}/{name}PanelCfg_types.gen';\n"


def _checks(made: Mapping[str, dict[str, Any]]) -> Iterator[str]:
    for number, board in enumerate(made.values()):
        typed = copy.deepcopy(board)
        for annotation in typed["annotations"]["list"]:
            for key in ("target", "titleFormat"):  # the data source's own; the schema has no types
                del annotation[key]
        yield f"export const b{number} = {json.dumps(typed)} satisfies Json<Dashboard>;\n"
        for panel in board["panels"]:
            if panel["type"] in UNTYPED:
                continue
            _, name, has_fields = PANELS[panel["type"]]
            own = json.dumps(panel["options"])
            key = f"{number}_{panel['id']}"
            yield f"export const o{key} = {own} satisfies Json<Some<{name}.Options>>;\n"
            custom = panel["fieldConfig"]["defaults"].get("custom")
            if has_fields and custom:
                fields = json.dumps(custom)
                yield f"export const f{key} = {fields} satisfies Json<Some<{name}.FieldConfig>>;\n"


def compiled(tsc: list[str], folder: Path, made: Mapping[str, dict[str, Any]]) -> str:
    """What the compiler complains about."""
    (folder / "boards.ts").write_text(source(made))
    (folder / "node_modules").symlink_to(INSTALLED / "node_modules")
    options = {
        "strict": True,
        "noEmit": True,
        "module": "nodenext",
        "moduleResolution": "nodenext",
        "skipLibCheck": True,
        "target": "es2022",
        "types": [],
    }
    config = {"compilerOptions": options, "files": ["boards.ts"]}
    (folder / "tsconfig.json").write_text(json.dumps(config))
    done = subprocess.run(
        [*tsc, "-p", "."], cwd=folder, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode in {0, 1, 2}, done.stderr
    return done.stdout


def test_boards_have_grafanas_types(tsc: list[str], tmp_path: Path) -> None:
    assert compiled(tsc, tmp_path, boards()) == ""


def test_wrong_keys_and_options_do_not_compile(tsc: list[str], tmp_path: Path) -> None:
    """So that the test above cannot pass by checking nothing."""
    made = boards()
    made["pd-overview"]["editble"] = False
    stat = next(p for p in made["pd-overview"]["panels"] if p["type"] == "stat")
    stat["options"]["colorMode"] = "colourful"
    table = next(p for p in made["pd-slow"]["panels"] if p["type"] == "table")
    table["options"]["footer"] = {"show": False}
    lines = next(p for p in made["pd-stages"]["panels"] if p["type"] == "timeseries")
    lines["fieldConfig"]["defaults"]["custom"]["drawStyle"] = "crayon"
    said = compiled(tsc, tmp_path, made)
    for wrong in ("editble", "colourful", "footer", "crayon"):
        assert wrong in said
