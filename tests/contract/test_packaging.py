"""The wheel ships `pdtrace` alone; the server runs from the checkout."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", folder],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=60,
    )
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def test_wheel_holds_only_pdtrace(wheel: zipfile.ZipFile) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"pdtrace"}
    assert "pdtrace/py.typed" in wheel.namelist()


def test_wheel_holds_every_module_of_pdtrace(wheel: zipfile.ZipFile) -> None:
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "pdtrace").rglob("*.py")}
    assert sources <= set(wheel.namelist())


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
