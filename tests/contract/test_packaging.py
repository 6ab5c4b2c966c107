"""The wheel ships `pdtrace` alone; the server runs from the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def build_wheel(folder: Path, **environ: str) -> zipfile.ZipFile:
    """Of a copy: what a build leaves behind must not get into the next one."""
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(
        ROOT / "pdtrace", source / "pdtrace", ignore=shutil.ignore_patterns("__pycache__", "*.so")
    )
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    subprocess.run(
        [*command, "--no-cache-dir", "--quiet", "--wheel-dir", folder, source],
        env={**os.environ, **environ},
        check=True,
        capture_output=True,
        timeout=100,
    )
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def plain_wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built where there is no compiler."""
    return build_wheel(tmp_path_factory.mktemp("plain"), CC="/nowhere/cc")


def extensions(wheel: zipfile.ZipFile) -> list[str]:
    return [name for name in wheel.namelist() if name.endswith((".so", ".pyd"))]


def test_wheel_holds_the_extension_for_every_python_from_here_on(wheel: zipfile.ZipFile) -> None:
    assert extensions(wheel) == ["pdtrace/native/_compiled.abi3.so"]
    assert "-cp311-abi3-" in Path(wheel.filename or "").name


def test_wheel_is_whole_without_a_compiler(
    plain_wheel: zipfile.ZipFile, wheel: zipfile.ZipFile
) -> None:
    assert extensions(plain_wheel) == []
    modules = {name for name in wheel.namelist() if name.startswith("pdtrace/")}
    assert {name for name in plain_wheel.namelist() if name.startswith("pdtrace/")} == (
        modules - {*extensions(wheel)}
    )


@pytest.mark.parametrize("which", ["wheel", "plain_wheel"])
def test_an_installed_wheel_records_and_says_how(
    which: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    built: zipfile.ZipFile = request.getfixturevalue(which)
    built.extractall(tmp_path)
    program = (
        "import sys; sys.path.insert(0, '.')\n"
        "from pdtrace import Mark, Recorder, RequestContext, Role\n"
        "from pdtrace.native import hot_path\n"
        "from pdtrace.ring import RingReader, scan_rings\n"
        "recorder = Recorder.open('rings', role=Role.DECODE, instance='one', raise_errors=True)\n"
        "recorder.begin(RequestContext.create()).mark(Mark.PAGES_RESERVED, 12, 188)\n"
        "(ring,) = scan_rings('rings')\n"
        "print(sys.modules['pdtrace'].__file__)\n"
        "print(hot_path(), RingReader(ring).read()[-1].values)\n"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    hot = "C" if extensions(built) else "Python"
    assert done.stdout.splitlines() == [
        str(Path("./pdtrace/__init__.py").absolute()).replace(str(Path.cwd()), str(tmp_path)),
        f"{hot} (12, 188)",
    ], done.stderr


def test_wheel_holds_only_pdtrace(wheel: zipfile.ZipFile) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"pdtrace"}
    assert "pdtrace/py.typed" in wheel.namelist()


def test_wheel_holds_every_module_of_pdtrace(wheel: zipfile.ZipFile) -> None:
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "pdtrace").rglob("*.py*")}
    sources = {name for name in sources if name.endswith((".py", ".pyi", ".typed"))}
    assert sources <= set(wheel.namelist())
    assert not [name for name in wheel.namelist() if name.endswith((".c", ".h"))]


def test_base_install_is_light(wheel: zipfile.ZipFile) -> None:
    (name,) = (n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
    requires = [
        line.removeprefix("Requires-Dist: ")
        for line in wheel.read(name).decode().splitlines()
        if line.startswith("Requires-Dist: ") and "extra ==" not in line
    ]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert len(requires) == len(project["dependencies"])
    heavy = ("torch", "pyzmq", "starlette", "uvicorn", "numpy", "transformers")
    assert not [line for line in requires if line.startswith(heavy)]


def test_licence_is_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    assert any(name.endswith("licenses/LICENSE") for name in wheel.namelist())


@pytest.mark.case("PKG-01")
@pytest.mark.parametrize("protobuf", [4, 5, 6])
def test_base_dependencies_resolve_beside_anybodys_protobuf(protobuf: int) -> None:
    """With 5 and 6 as they are; with 4, which no current OTLP exporter takes, without that one."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        line
        for line in project["dependencies"]
        if protobuf > 4 or not line.startswith("opentelemetry-exporter")
    ]
    resolved = subprocess.run(
        [sys.executable, "-m", "uv", "pip", "compile", "-q", "--no-header", "--no-annotate", "-"],
        input="\n".join([*wanted, f"protobuf=={protobuf}.*"]),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert resolved.returncode == 0, resolved.stderr
    assert f"protobuf=={protobuf}." in resolved.stdout
