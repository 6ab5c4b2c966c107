"""Socket paths: length limits, privacy, and what may be removed."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from server.errors import StartError
from server.wire.endpoints import IPC, MAX_PATH_BYTES, EndpointDirectory, clear_stale_socket


def path_of(endpoint: str) -> Path:
    assert endpoint.startswith(IPC)
    return Path(endpoint.removeprefix(IPC))


@pytest.fixture
def short_run(tmp_path: Path) -> Iterator[Path]:
    """A run directory short enough for sockets, whatever pytest's own paths are."""
    link = Path("/tmp") / f"pdt{os.getpid()}"
    link.symlink_to(tmp_path)
    yield link / "run"
    link.unlink()


def test_a_short_run_directory_holds_its_own_sockets(short_run: Path) -> None:
    directory = EndpointDirectory(short_run)
    path = path_of(directory.endpoint("decode-0"))
    assert path == short_run / "sock" / "decode-0.sock"
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    "name", ["x" * 120, "größe-日本語-" * 6, b"\xff\xfe not utf-8".decode(errors="surrogateescape")]
)
def test_a_long_run_directory_gets_a_short_private_one(tmp_path: Path, name: str) -> None:
    run = tmp_path / name / ("y" * 60)
    directory = EndpointDirectory(run)
    path = path_of(directory.endpoint("decode-0"))
    try:
        assert len(str(path).encode()) <= MAX_PATH_BYTES
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert directory.endpoint("prefill-0") != directory.endpoint("decode-0")
        assert path_of(EndpointDirectory(run).endpoint("decode-0")) == path, "found again"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
    finally:
        directory.close()
    assert not path.parent.exists()


def test_two_long_run_directories_do_not_share_sockets(tmp_path: Path) -> None:
    first = EndpointDirectory(tmp_path / ("a" * 120))
    second = EndpointDirectory(tmp_path / ("b" * 120))
    try:
        assert first.endpoint("decode-0") != second.endpoint("decode-0")
    finally:
        first.close()
        second.close()


def test_an_open_socket_directory_is_made_private(short_run: Path) -> None:
    (short_run / "sock").mkdir(parents=True, mode=0o755)
    path = path_of(EndpointDirectory(short_run).endpoint("gateway"))
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_file_where_the_directory_belongs_is_a_start_error(short_run: Path) -> None:
    short_run.mkdir()
    (short_run / "sock").write_text("mine")
    with pytest.raises(StartError, match="sock"):
        EndpointDirectory(short_run).endpoint("gateway")
    assert (short_run / "sock").read_text() == "mine"


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "x" * 65])
def test_names_that_could_leave_the_directory_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="endpoint name"):
        EndpointDirectory(tmp_path).endpoint(name)


def test_the_socket_of_a_dead_process_is_removed(short_run: Path) -> None:
    short_run.mkdir()
    path = short_run / "s.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
    assert path.exists(), "closing a listener leaves its file behind"
    clear_stale_socket(f"{IPC}{path}")
    assert not path.exists()


def test_the_socket_of_a_running_process_is_left_alone(short_run: Path) -> None:
    short_run.mkdir()
    path = short_run / "s.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(0)
        for _ in range(3):  # the third probe meets a full backlog: a stopped process
            with pytest.raises(StartError, match="in use by a running process"):
                clear_stale_socket(f"{IPC}{path}")
        assert path.exists()


def test_a_regular_file_is_named_and_not_deleted(short_run: Path) -> None:
    short_run.mkdir()
    path = short_run / "s.sock"
    path.write_text("precious")
    with pytest.raises(StartError, match="is not a socket"):
        clear_stale_socket(f"{IPC}{path}")
    assert path.read_text() == "precious"


def test_a_symlink_is_not_followed_and_not_deleted(short_run: Path) -> None:
    short_run.mkdir()
    (short_run / "target").write_text("precious")
    link = short_run / "s.sock"
    link.symlink_to(short_run / "target")
    with pytest.raises(StartError, match="is not a socket"):
        clear_stale_socket(f"{IPC}{link}")
    assert link.is_symlink()


def test_a_path_beyond_the_limit_is_named_with_the_limit(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="Unix sockets allow 107"):
        clear_stale_socket(f"{IPC}{tmp_path}/{'x' * 120}")
