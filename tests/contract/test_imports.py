"""Who may import what (docs/architecture.md, "Import rules").

Static rules read every import statement, also those inside functions; the others import every
module in a process in which the forbidden packages do not exist, so indirect imports count too.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("pdtrace", "server", "dashboards")

# The only modules that may need torch: the engine, and transfers between devices.
TORCH_AREA = re.compile(r"server\.(engine\.\w+|kv\.transfer\.cuda_\w+)")
# Decisions and data without input or output: policies, layouts, states, messages, vocabulary.
PURE = re.compile(
    r"server\.(\w+\.)*(policy|\w+_policy|routing|layout|pages|radix|states?|\w+_states?|messages"
    r"|config|errors|request|base)"
    r"|pdtrace\.(stages|semconv|spans)"
    r"|pdtrace\.analysis\.(timeline|violations|placement|intervals|verdict)"
)
# The parts of `pdtrace`, lowest first: none imports what stands on a line below its own, nor its
# neighbour on the line. Flat modules that are not named here are what everything stands on.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("native",),
    ("ring", "otlp"),
    ("assembly",),
    ("analysis", "export"),
    ("live",),
    ("agent",),
    ("check",),
    ("terminal",),
    ("cli",),
    ("__main__",),
)
# What exports with OpenTelemetry's own types, which are an extra; loaded when export is asked for.
OTLP_MODULES = frozenset({"pdtrace.otlp.protobuf", "pdtrace.export.targets"})
ZMQ_AREA = re.compile(r"server\.wire\.(sockets|curve)|server\.kv\.transfer\.\w+")

# Runs with the forbidden packages hidden; prints {module: error} of those that failed to import.
IMPORT_ALL = """
import importlib, importlib.abc, json, sys

modules, denied, allowed = json.load(sys.stdin)

class Hide(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        hidden = top in denied or (allowed is not None and top not in allowed)
        if hidden and top not in sys.stdlib_module_names:
            raise ImportError(f"{top} is hidden")
        return None

sys.meta_path.insert(0, Hide())
failed = {}
for module in modules:
    try:
        importlib.import_module(module)
    except Exception as error:
        failed[module] = f"{type(error).__name__}: {error}"
print(json.dumps(failed))
"""


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules(*packages: str) -> dict[str, Path]:
    return {
        module_name(path): path
        for package in packages
        for path in sorted((ROOT / package).rglob("*.py"))
        if path.name != "__main__.py" and "node_modules" not in path.parts
    }


def imported(path: Path) -> Iterator[str]:
    """Absolute names that the file imports, wherever the statement stands."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def offenders(area: Iterable[tuple[str, Path]], forbidden: Iterable[str]) -> list[str]:
    tops = set(forbidden)
    return [
        f"{name} imports {target}"
        for name, path in area
        for target in imported(path)
        if target.partition(".")[0] in tops
    ]


def failed_imports(
    names: Iterable[str], *, denied: Iterable[str] = (), allowed: Iterable[str] | None = None
) -> dict[str, str]:
    request = [list(names), list(denied), None if allowed is None else sorted(allowed)]
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL],
        input=json.dumps(request),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def torch_modules() -> set[str]:
    return {
        name
        for name, path in modules("server").items()
        if any(target.partition(".")[0] in {"torch", "flashinfer"} for target in imported(path))
    }


def test_pdtrace_imports_neither_server_nor_engine_libraries() -> None:
    forbidden = ("server", "dashboards", "torch", "zmq", "transformers", "numpy")
    assert offenders(modules("pdtrace").items(), forbidden) == []


def upward_imports() -> Iterator[str]:
    rank = {part: level for level, layer in enumerate(LAYERS) for part in layer}
    for name, path in modules("pdtrace").items():
        part = [*name.split("."), ""][1]
        for target in imported(path):
            top, _, rest = target.partition(".")
            other = rest.partition(".")[0]
            if top != "pdtrace" or other == part or other not in rank:
                continue
            # A part that is not named (2) stands on rings at the most, as `recorder` does.
            if rank[other] >= rank.get(part, 2):
                yield f"{name} imports {target}"


def test_packages_of_pdtrace_import_downwards_only() -> None:
    folders = {path.parent.name for path in (ROOT / "pdtrace").glob("*/__init__.py")}
    assert folders == {part for layer in LAYERS for part in layer} - {"check", "cli", "__main__"}
    assert list(upward_imports()) == []


def test_import_of_a_forbidden_package_is_found_wherever_it_stands(tmp_path: Path) -> None:
    """The rules below hold for packages that are empty, too: they must be able to break."""
    odd = tmp_path / "odd.py"
    odd.write_text("import pdtrace\n\ndef f():\n    from server.launch import Launcher\n")
    assert offenders([("dashboards.odd", odd)], ("server", "torch")) != []
    assert offenders([("dashboards.odd", odd)], ("torch", "zmq")) == []


def test_dashboards_import_pdtrace_only() -> None:
    assert offenders(modules("dashboards").items(), ("server", "torch", "zmq")) == []


def test_dashboards_use_the_foundation_sdk_in_one_module() -> None:
    others = [(n, p) for n, p in modules("dashboards").items() if n != "dashboards.sdk"]
    assert len(others) > 10
    assert offenders(others, ("grafana_foundation_sdk",)) == []
    parsers = [(n, p) for n, p in others if n != "dashboards.promql"]
    assert offenders(parsers, ("promql_parser",)) == []


def test_nothing_imports_dashboards() -> None:
    assert offenders(modules("pdtrace", "server").items(), ("dashboards",)) == []


def test_torch_is_imported_by_engine_and_device_transfers_only() -> None:
    assert {name for name in torch_modules() if not TORCH_AREA.fullmatch(name)} == set()


def test_zmq_is_imported_by_the_wire_only() -> None:
    area = [(n, p) for n, p in modules("server").items() if not ZMQ_AREA.fullmatch(n)]
    assert offenders(area, ("zmq",)) == []


def test_opentelemetry_stays_out_of_the_server() -> None:
    assert offenders(modules("server").items(), ("opentelemetry",)) == []


def test_everything_but_the_engine_imports_without_torch() -> None:
    exempt = torch_modules()
    names = [name for name in modules(*PACKAGES) if name not in exempt]
    failed = failed_imports(names, denied=("torch", "flashinfer", "transformers"))
    # An engine module may need a torch module of the engine; nothing else may.
    assert {name: why for name, why in failed.items() if not TORCH_AREA.fullmatch(name)} == {}


def test_pure_modules_import_without_torch_zmq_and_opentelemetry() -> None:
    names = [name for name in modules("pdtrace", "server") if PURE.fullmatch(name)]
    assert "server.kv.layout" in names
    assert failed_imports(names, denied=("torch", "zmq", "opentelemetry")) == {}


def test_pdtrace_imports_with_its_base_dependencies_only() -> None:
    names = set(modules("pdtrace"))
    assert names >= OTLP_MODULES
    allowed = {"pdtrace", *dependency_modules()}
    assert not allowed & {"torch", "zmq", "opentelemetry", "google", "grpc"}
    assert failed_imports(names - OTLP_MODULES, allowed=allowed) == {}
    assert failed_imports(OTLP_MODULES, allowed=allowed | dependency_modules("otlp")) == {}


@pytest.mark.parametrize("package", ["pdtrace", "server", "dashboards"])
def test_no_catch_all_modules(package: str) -> None:
    vague = {"utils", "helpers", "common", "manager", "misc"}
    assert [n for n in modules(package) if n.rpartition(".")[2] in vague] == []


def dependency_modules(extra: str | None = None) -> set[str]:
    """Top-level modules of the base dependencies, or an extra's, and of what those require."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = project["optional-dependencies"][extra] if extra else project["dependencies"]
    todo = [distribution_name(line) for line in lines]
    seen: set[str] = set()
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        try:
            requires = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue  # not needed on this platform or Python
        seen.add(name)
        todo += [distribution_name(line) for line in requires if "extra ==" not in line]
    return {
        top
        for top, distributions in metadata.packages_distributions().items()
        if any(canonical(distribution) in seen for distribution in distributions)
    }


def distribution_name(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match is not None, requirement
    return canonical(match.group())


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
