"""The wheel ships `pdtrace` alone; the server runs from the checkout.

It works where the user's other packages decide what is installed: the environments here hold one
version of protobuf and of OpenTelemetry each, or none.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from pdtrace.analysis.sources import read_source
from tests.support.otlp_receivers import Received, grpc_receiver, http_receiver

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", folder],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=60,
    )
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def wheel(wheel_path: Path) -> zipfile.ZipFile:
    return zipfile.ZipFile(wheel_path)


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
