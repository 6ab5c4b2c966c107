"""A real Prometheus over a folder of blocks, for tests that look at history; it scrapes nothing."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Generator
from pathlib import Path

import httpx

from server.listening import free_loopback_port
from tests.support.programs import program

_START_S = 90.0
_POLL_S = 0.1


@contextlib.contextmanager
def prometheus_with(data: Path) -> Generator[str]:
    """Its address, once it answers queries. Skips the test where there is no Prometheus."""
    config = data.parent / "prometheus.yml"
    config.write_text("global: {}\n")
    port = free_loopback_port()
    log = data.parent / "prometheus.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [
                program("prometheus"),
                f"--config.file={config}",
                f"--storage.tsdb.path={data}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait(process, url, log)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/-/ready", timeout=30.0, trust_env=False).status_code == 200:
                return
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(_POLL_S)
