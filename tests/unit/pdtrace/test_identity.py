"""Who records: one host is one host to all its processes, whatever it lacks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pdtrace.recorder import Recorder
from pdtrace.ring import RingIdentity, RingReader, scan_rings
from pdtrace.ring import identity as module
from pdtrace.ring.identity import make_identity, read_boot_id, read_host_id
from pdtrace.stages import Role

OPEN_A_RING = """
import sys
from pdtrace import Recorder, Role
Recorder.open(sys.argv[1], role=Role.DECODE, instance="decode-7").close()
"""


def identities(directory: Path) -> list[RingIdentity]:
    found: list[RingIdentity] = []
    for path in scan_rings(directory):
        with RingReader(path) as reader:
            found.append(reader.identity)
    return found


def test_host_and_instance_are_the_same_in_every_process_and_over_time(tmp_path: Path):
    for _ in range(2):
        subprocess.run([sys.executable, "-c", OPEN_A_RING, str(tmp_path)], check=True, timeout=60)
    with Recorder.open(tmp_path, role=Role.DECODE, instance="decode-7") as recorder:
        clock_id = recorder.clock_id
    found = identities(tmp_path)
    assert len(found) == len({one.pid for one in found}) == 3
    assert {one.instance for one in found} == {"decode-7"}
    assert len({one.host_id for one in found}) == 1
    assert {one.clock_id for one in found} == {clock_id}


@pytest.mark.parametrize(
    ("variable", "resource", "expected"),
    [
        (None, {}, "of-the-machine"),
        (None, {"host.id": "of-the-resource"}, "of-the-resource"),
        ("of-the-variable", {"host.id": "of-the-resource"}, "of-the-variable"),
        ("  of-the-variable\n", {}, "of-the-variable"),
        ("  ", {}, "of-the-machine"),
    ],
)
def test_the_host_id_can_be_set(
    variable: str | None,
    resource: dict[str, str | bool | int | float],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(module, "read_host_id", lambda: "of-the-machine")
    monkeypatch.delenv("PDTRACE_HOST_ID", raising=False)
    if variable is not None:
        monkeypatch.setenv("PDTRACE_HOST_ID", variable)
    identity = make_identity(role=Role.DECODE, instance="d", resource=resource)
    assert identity.host_id == expected
    assert "host.id" not in identity.resource
    assert identity.clock_id == f"{expected}/{read_boot_id()}"


def test_a_host_without_a_machine_id_has_one_id_in_all_its_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    empty, binary = tmp_path / "empty", tmp_path / "binary"
    empty.write_text("\n")
    binary.write_bytes(b"\xff\xfe")
    paths = (empty, binary, tmp_path / "missing")
    monkeypatch.setattr(module, "_MACHINE_ID_FILES", paths)
    # `uuid.getnode` gives such a process a number of its own where there is no network interface.
    monkeypatch.setattr("uuid.getnode", lambda: pytest.fail("differs between processes"))
    first = read_host_id()
    assert first
    code = f"""
from pathlib import Path
from pdtrace.ring import identity
identity._MACHINE_ID_FILES = tuple(map(Path, {[str(path) for path in paths]!r}))
print(identity.read_host_id())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == read_host_id() == first


def test_bytes_that_are_no_text_do_not_keep_a_process_from_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "team=\udcff,k\udcfe=v")
    monkeypatch.setenv("PDTRACE_HOST_ID", "host-\udcff")
    Recorder.open(tmp_path, role=Role.DECODE, instance="d\ud800").close()
    [found] = identities(tmp_path)
    assert (found.instance, found.host_id) == ("d?", "host-?")
    assert found.resource == {"team": "?", "k?": "v"}
