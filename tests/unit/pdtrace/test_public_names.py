from __future__ import annotations

import subprocess
import sys
import tomllib
import types
from pathlib import Path

import pdtrace


def test_all_is_sorted_and_names_everything_imported():
    exported = pdtrace.__all__
    plain = [name for name in exported if not name.startswith("__")]
    constants = [name for name in plain if name.isupper()]
    classes = [name for name in plain if name[0].isupper() and not name.isupper()]
    functions = [name for name in plain if name[0].islower()]
    # Constants, classes, dunders and functions, each group sorted: ruff's isort-style order.
    assert exported == [
        *sorted(constants),
        *sorted(classes),
        "__version__",
        *sorted(functions),
    ]
    public = {
        name
        for name, value in vars(pdtrace).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert public == set(plain)


def test_version_is_the_distributions():
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    assert pdtrace.__version__ == project["version"]


def test_importing_pdtrace_loads_no_heavy_library():
    code = (
        "import sys, pdtrace\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules} & "
        "{'opentelemetry', 'torch', 'zmq', 'server', 'numpy', 'rich', 'typer', 'google', 'grpc'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
