from __future__ import annotations

import fcntl
import os
import socket
import stat
import time
from pathlib import Path

import pytest

from pdtrace.export.spill import CURSORS_NAME
from pdtrace.ring.losses import STATE_NAME
from server import rundir
from server.errors import StartError
from server.rundir import RunDir, point_latest, remove_stale_pools, timestamped


def test_acquire_makes_private_folders(tmp_path: Path) -> None:
    with RunDir.acquire(tmp_path / "run") as run_dir:
        for folder in (run_dir.path, run_dir.rings, run_dir.traces, run_dir.log("a").parent):
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_second_server_on_the_same_run_directory_is_refused(tmp_path: Path) -> None:
    with (
        RunDir.acquire(tmp_path),
        pytest.raises(StartError, match=rf"in use by another server \(pid {os.getpid()}\)"),
    ):
        RunDir.acquire(tmp_path, fresh=True)


def test_run_directory_is_free_again_after_release(tmp_path: Path) -> None:
    RunDir.acquire(tmp_path).release()
    RunDir.acquire(tmp_path).release()


@pytest.mark.parametrize("folder", ["rings", "traces", "logs"])
def test_recording_is_not_overwritten_unasked(tmp_path: Path, folder: str) -> None:
    with RunDir.acquire(tmp_path):
        (tmp_path / folder / "kept").write_text("data")
    with pytest.raises(StartError, match=r"holds a recording .*--fresh"):
        RunDir.acquire(tmp_path)
    assert (tmp_path / folder / "kept").read_text() == "data"


def test_a_refused_start_leaves_the_directory_unlocked(tmp_path: Path) -> None:
    with RunDir.acquire(tmp_path):
        (tmp_path / "rings" / "kept").write_text("data")
    with pytest.raises(StartError):
        RunDir.acquire(tmp_path)
    RunDir.acquire(tmp_path, fresh=True).release()


def test_fresh_removes_only_what_a_server_made(tmp_path: Path) -> None:
    with RunDir.acquire(tmp_path):
        (tmp_path / "rings" / "old").write_text("data")
    (tmp_path / "notes.txt").write_text("mine")
    with RunDir.acquire(tmp_path, fresh=True) as run_dir:
        assert list(run_dir.rings.iterdir()) == []
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_unusable_run_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StartError, match=r"file/run cannot be used"):
        RunDir.acquire(tmp_path / "file" / "run")


def test_a_name_that_is_no_utf8_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    # Processes are told their paths in JSON.
    path = tmp_path / os.fsdecode(b"run-\xff")
    with pytest.raises(StartError, match="is not valid UTF-8"):
        RunDir.acquire(path)
    assert not path.exists()


def test_a_link_in_place_of_a_folder_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "precious").write_text("data")
    run = tmp_path / "run"
    run.mkdir()
    (run / "rings").symlink_to(victim)
    with pytest.raises(StartError, match="rings"):
        RunDir.acquire(run, fresh=True)
    assert (victim / "precious").exists()


@pytest.mark.case("FAIL-12")
def test_a_file_in_a_sockets_place_is_named_and_left_alone(tmp_path: Path) -> None:
    with RunDir.acquire(tmp_path) as run_dir:
        path = Path(run_dir.endpoint("gateway-0").removeprefix("ipc://"))
        name = path.relative_to(tmp_path)
    path = tmp_path / name
    path.parent.mkdir()
    path.write_text("mine")
    for fresh in (False, True):
        with pytest.raises(StartError, match=r"gateway-0\.sock exists and is not a socket"):
            RunDir.acquire(tmp_path, fresh=fresh)
    assert path.read_text() == "mine"


def test_sockets_of_a_killed_server_are_removed(tmp_path: Path) -> None:
    (tmp_path / "sock").mkdir()
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "sock" / "x.sock"))
    with RunDir.acquire(tmp_path):
        assert not list((tmp_path / "sock").iterdir())


def test_release_keeps_the_recording_and_removes_sockets_and_pools(tmp_path: Path) -> None:
    shared = tmp_path / "shm"
    shared.mkdir()
    run_dir = RunDir.acquire(tmp_path / "run")
    pools = run_dir.place_pools(1024, shared_memory=shared)
    (pools / "decode-0").write_bytes(b"kv")
    socket = Path(run_dir.endpoint("gateway-0").removeprefix("ipc://"))
    socket.write_text("")
    (run_dir.rings / "gateway-0.ring").write_text("marks")
    run_dir.config("gateway-0").write_text("secret")
    run_dir.release()
    run_dir.release()
    assert not run_dir.config("gateway-0").exists()
    assert not pools.exists()
    assert not socket.exists()
    assert (run_dir.rings / "gateway-0.ring").exists()


def test_pools_fall_back_to_the_run_directory_without_shared_memory(tmp_path: Path) -> None:
    with RunDir.acquire(tmp_path) as run_dir:
        assert run_dir.place_pools(1024, shared_memory=tmp_path / "absent") == tmp_path / "kv"


def test_too_large_pools_are_refused_with_both_sizes(tmp_path: Path) -> None:
    with (
        RunDir.acquire(tmp_path) as run_dir,
        pytest.raises(StartError, match=r"KV pools need \d+ MiB.*lower --prefill-pages"),
    ):
        run_dir.place_pools(2**60, shared_memory=tmp_path)


def test_pools_of_a_killed_server_are_removed_and_those_of_a_live_one_kept(tmp_path: Path) -> None:
    prefix = rundir._pool_prefix()  # pyright: ignore[reportPrivateUsage]
    for name in ("dead", "alive"):
        (tmp_path / f"{prefix}{name}").mkdir()
        (tmp_path / f"{prefix}{name}" / "owner").touch()
    fd = os.open(tmp_path / f"{prefix}alive" / "owner", os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        assert remove_stale_pools(tmp_path) == [tmp_path / f"{prefix}dead"]
        assert (tmp_path / f"{prefix}alive").is_dir()
    finally:
        os.close(fd)


def test_what_a_start_that_was_killed_half_way_left_is_removed_and_a_start_under_way_is_not(
    tmp_path: Path,
) -> None:
    for name in ("old", "old-locked", "young"):
        (tmp_path / f"pdtrace-new-{name}").mkdir()
    (tmp_path / "pdtrace-new-old-locked" / "owner").touch()
    hour_ago_s = time.time() - 3600
    for name in ("old", "old-locked"):
        os.utime(tmp_path / f"pdtrace-new-{name}", (hour_ago_s, hour_ago_s))
    with RunDir.acquire(tmp_path / "run") as run_dir:
        run_dir.place_pools(1024, shared_memory=tmp_path)
        left = sorted(path.name for path in tmp_path.glob("pdtrace-new-*"))
    assert left == ["pdtrace-new-young"]


def test_long_run_directory_gets_short_socket_paths(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 90)
    with RunDir.acquire(deep) as run_dir:
        endpoint = run_dir.endpoint("transfer-0").removeprefix("ipc://")
        assert len(endpoint) < 108
        assert stat.S_IMODE(Path(endpoint).parent.stat().st_mode) == 0o700
    assert not Path(endpoint).parent.exists()


def test_latest_names_the_newest_run_and_never_replaces_a_folder(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        point_latest(tmp_path / name)
    assert (tmp_path / "latest").resolve() == tmp_path / "two"
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").mkdir()
    point_latest(tmp_path / "one")
    assert not (tmp_path / "latest").is_symlink()


def test_timestamped_never_returns_an_existing_path(tmp_path: Path) -> None:
    first = timestamped(tmp_path)
    first.mkdir()
    assert timestamped(tmp_path) != first


def test_fresh_forgets_whatever_an_agent_noted_beside_the_traces(tmp_path: Path) -> None:
    """Cursors of files that are gone would pass over new ones."""
    noted = ("agent.json", STATE_NAME, CURSORS_NAME)
    for name in noted:
        (tmp_path / name).write_text("{}")
    (tmp_path / "mine.json").write_text("{}")
    with RunDir.acquire(tmp_path, fresh=True):
        assert [name for name in noted if (tmp_path / name).exists()] == []
        assert (tmp_path / "mine.json").exists()
