"""The wheel ships `pdtrace` alone; the server runs from the checkout.

It works where the user's other packages decide what is installed: the environments here hold one
version of protobuf and of OpenTelemetry each, or none.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from pdtrace.analysis.sources import read_source
from pdtrace.shipped import Shipped, write
from tests.support.otlp_receivers import Received, grpc_receiver, http_receiver

ROOT = Path(__file__).resolve().parents[2]


def build_wheel(folder: Path, **environ: str) -> Path:
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
    return path


@pytest.fixture(scope="module")
def wheel_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def wheel(wheel_path: Path) -> zipfile.ZipFile:
    return zipfile.ZipFile(wheel_path)


@pytest.fixture(scope="module")
def plain_wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built where there is no compiler."""
    return zipfile.ZipFile(build_wheel(tmp_path_factory.mktemp("plain"), CC="/nowhere/cc"))


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


def test_wheel_ships_boards_rules_and_collector_files(wheel: zipfile.ZipFile) -> None:
    shipped = {
        f"pdtrace/data/{below}/{path.relative_to(folder)}": path.read_bytes()
        for folder, below in (
            (ROOT / "dashboards" / "generated", "generated"),
            (ROOT / "collector", "collector"),
            (ROOT / "docs" / "alerts", "runbooks"),
        )
        for path in folder.rglob("*")
        if path.is_file()
    }
    assert len(shipped) > 7
    held = {name: wheel.read(name) for name in wheel.namelist() if name.startswith("pdtrace/data/")}
    assert held == shipped


@pytest.mark.parametrize("what", Shipped)
def test_wheel_writes_out_what_it_ships(wheel_path: Path, tmp_path: Path, what: Shipped) -> None:
    """The same as a checkout does, whose files are links."""
    installed, out, here = (tmp_path / name for name in ("installed", "out", "here"))
    zipfile.ZipFile(wheel_path).extractall(installed)
    done = subprocess.run(
        [sys.executable, "-m", "pdtrace", "export", what.value, str(out)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    write(what, here)
    written, expected = (
        {path.relative_to(top): path.read_bytes() for path in top.rglob("*") if path.is_file()}
        for top in (out, here)
    )
    assert written == expected
    assert len(done.stdout.splitlines()) == len(written)


def test_base_install_is_light(wheel: zipfile.ZipFile) -> None:
    (name,) = (n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
    requires = [
        line.removeprefix("Requires-Dist: ")
        for line in wheel.read(name).decode().splitlines()
        if line.startswith("Requires-Dist: ") and "extra ==" not in line
    ]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert len(requires) == len(project["dependencies"])
    heavy = (
        *("torch", "pyzmq", "starlette", "uvicorn", "numpy", "transformers"),
        *("opentelemetry", "protobuf", "grpc", "googleapis"),
    )
    assert not [line for line in requires if line.startswith(heavy)]


def test_licence_is_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    assert any(name.endswith("licenses/LICENSE") for name in wheel.namelist())


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """What somebody asks for: pdtrace with an `extra` or none, and packages `beside` it."""

    beside: Sequence[str]
    extra: str = ""

    def make(self, folder: Path, wheel: Path) -> Environment:
        environment = Environment(folder)
        _uv("venv", "--quiet", "--python", sys.executable, folder)
        constraints = folder / "constraints.txt"
        constraints.write_text("\n".join(self._constraints()))
        _uv(
            *("pip", "install", "--quiet", "--python", environment.python),
            *("--constraints", constraints),
            *(f"pdtrace{self.extra} @ {wheel.as_uri()}", *self.beside),
        )
        return environment

    def _constraints(self) -> list[str]:
        """The versions of this repository's own environment, as far as they are not in question:
        what appears on PyPI tomorrow does not decide whether a test passes."""
        asked = [re.split("[=<>]", one)[0] for one in self.beside]
        in_question = "|".join((r"opentelemetry.*|googleapis-common-protos|grpcio", *asked))
        lines = (ROOT / "requirements" / "dev.txt").read_text().splitlines()
        pins = [line.removesuffix(" \\") for line in lines if re.match(r"[\w.-]+==", line)]
        return [pin for pin in pins if not re.match(rf"({in_question})==", pin)]


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def versions(self) -> dict[str, str]:
        """Installed versions by distribution."""
        lines = _uv("pip", "freeze", "--python", self.python).splitlines()
        return dict(line.split("==") for line in lines if "==" in line)

    def run(self, *arguments: str | Path, **variables: str) -> str:
        """Standard output of its Python, away from the checkout; must end with exit code 0."""
        done = subprocess.run(
            [self.python, *arguments],
            cwd=self.folder,
            env={"PATH": "/usr/bin:/bin", "PDTRACE_RAISE": "1", **variables},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def record(self) -> Path:
        """A run directory with the rings of the example."""
        run = self.folder / "run"
        self.run(ROOT / "examples" / "01_record_your_engine.py", run / "rings")
        return run

    def look(self, run: Path) -> None:
        """Every look at the traces of `record` works."""
        assert "Needed 1 slot in the running batch" in " ".join(
            self.run("-m", "pdtrace", "why", "third", "--from", run).split()
        )
        assert "4 requests" in self.run("-m", "pdtrace", "check", "--from", run)
        assert "prefill.queue" in self.run("-m", "pdtrace", "stages")


def _uv(*arguments: str | Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "uv", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.case("PKG-01")
@pytest.mark.timeout(400)
def test_base_install_records_and_explains_without_opentelemetry(
    wheel_path: Path, tmp_path: Path
) -> None:
    """Beside a protobuf that current OTLP exporters refuse, with the oldest versions allowed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest = [line.partition(",")[0].replace(">=", "==") for line in project["dependencies"]]
    environment = Installation(beside=[*oldest, "protobuf==4.*"]).make(tmp_path / "env", wheel_path)
    versions = environment.versions()
    assert versions["protobuf"].startswith("4.")
    assert not [name for name in versions if name.startswith(("opentelemetry", "grpc"))]
    run = environment.record()
    environment.run(
        "-m", "pdtrace", "agent", "--rings", run / "rings", "--out", run, "--until-closed"
    )
    environment.look(run)


@pytest.mark.case("PKG-01")
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("protobuf", "opentelemetry"),
    [("4", "1.27.0"), ("5", None), ("6", None)],
)
def test_recordings_are_exported_beside_anybodys_protobuf(
    wheel_path: Path, tmp_path: Path, protobuf: str, opentelemetry: str | None
) -> None:
    """The oldest OpenTelemetry allowed takes protobuf 4, the newest the others; 7 is beside it in
    this repository's own environment."""
    beside = [f"protobuf=={protobuf}.*"]
    if opentelemetry is not None:
        beside.append(f"opentelemetry-sdk=={opentelemetry}")
    environment = Installation(extra="[otlp]", beside=beside).make(tmp_path / "env", wheel_path)
    versions = environment.versions()
    assert versions["protobuf"].startswith(f"{protobuf}.")
    assert opentelemetry in (None, versions["opentelemetry-exporter-otlp"])
    run = environment.record()
    for protocol, receiver in (("http/protobuf", http_receiver), ("grpc", grpc_receiver)):
        out = run / protocol.partition("/")[0]
        with receiver() as received:
            environment.run(
                *("-m", "pdtrace", "agent", "--rings", run / "rings", "--out", out),
                "--until-closed",
                OTEL_EXPORTER_OTLP_ENDPOINT=received.endpoint,
                OTEL_EXPORTER_OTLP_PROTOCOL=protocol,
            )
        written = [span.span_id for trace in read_source(out).traces for span in trace.spans]
        assert len(written) > 40
        assert sorted(span_ids(received)) == sorted(written), protocol
    environment.look(out)


def span_ids(received: Received) -> list[str]:
    """Of every span that came."""
    return [
        span.span_id.hex()
        for request in received.requests
        for resource_spans in request.resource_spans
        for scope_spans in resource_spans.scope_spans
        for span in scope_spans.spans
    ]
