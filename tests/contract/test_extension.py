"""The extension in C is there wherever it can be built, compiles without a warning, and everything
works without it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path
from typing import Any

import pytest

from pdtrace.native import NATIVE_VARIABLE, hot_path

ROOT = Path(__file__).resolve().parents[2]
HEADERS = Path(sysconfig.get_path("include"))
COMPILERS = [name for name in ("gcc", "clang", "cc") if shutil.which(name)]
HOT_TESTS = ("test_ring.py", "test_recorder.py", "test_losses.py")


def extension() -> Any:
    (found,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"][
        "ext-modules"
    ]
    return found


def run_python(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_the_extension_is_built_where_it_can_be() -> None:
    """No silent fallback: a check that ran in Python alone has not checked what users get."""
    can_be = bool(COMPILERS) and (HEADERS / "Python.h").exists()
    found = run_python("-c", "from pdtrace.native import hot_path; print(hot_path())")
    assert found.stdout == ("C\n" if can_be else "Python\n"), f"make setup builds it {found.stderr}"


@pytest.mark.parametrize("off", ["0", "off", " OFF "])
def test_the_extension_can_be_turned_off(off: str) -> None:
    program = "import sys; from pdtrace.native import hot_path; import pdtrace.recorder; "
    program += "print(hot_path(), 'pdtrace.native._compiled' in sys.modules)"
    assert run_python("-c", program, **{NATIVE_VARIABLE: off}).stdout == "Python False\n"


def test_every_source_is_built() -> None:
    built = {Path(name) for name in extension()["sources"] + extension()["depends"]}
    there = {path.relative_to(ROOT) for path in (ROOT / "pdtrace").rglob("*.[ch]")}
    assert built == there


@pytest.mark.parametrize("standard", ["c11", "gnu17"])
def test_every_source_compiles_without_a_warning(standard: str, tmp_path: Path) -> None:
    assert COMPILERS or hot_path() == "Python"
    macros = [f"-D{name}={value}" for name, value in extension()["define-macros"]]
    warnings = ["-Wall", "-Wextra", "-Werror", "-Wshadow", "-Wconversion", "-Wstrict-prototypes"]
    for compiler in COMPILERS:
        flags = [f"-std={standard}", "-O2", *warnings, *macros, "-isystem", HEADERS]
        done = subprocess.run(
            [compiler, *flags, "-c", *(ROOT / name for name in extension()["sources"])],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == 0, done.stderr


@pytest.mark.timeout(600)
def test_the_same_tests_pass_without_the_extension() -> None:
    files = [f"tests/unit/pdtrace/{name}" for name in HOT_TESTS]
    arguments = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *files)
    done = run_python(*arguments, **{NATIVE_VARIABLE: "0"})
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr
    assert " passed" in done.stdout
    assert " skipped" not in done.stdout
