"""Derived files appear whole or not at all."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from server.disk_cache import DiskCache


def test_a_written_file_is_read_back(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "new" / "folder")
    assert cache.read("x") is None
    assert cache.try_write_bytes("x", b"data") == tmp_path / "new" / "folder" / "x"
    assert cache.read("x") == b"data"
    cache.discard("x")
    assert cache.read("x") is None


def test_a_writer_that_fails_leaves_the_old_file_and_no_litter(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path)
    cache.try_write_bytes("x", b"old")

    def fail(path: Path) -> None:
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.try_write("x", fail)
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert cache.read("x") == b"old"


def test_a_folder_that_cannot_be_made_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = DiskCache(tmp_path / "file" / "cache")
    assert cache.try_write_bytes("x", b"data") is None
    with cache.lock("x"):
        assert cache.read("x") is None


def test_readers_see_whole_files_while_others_write(tmp_path: Path) -> None:
    contents = [bytes([number]) * 100_000 for number in range(3)]
    DiskCache(tmp_path).try_write_bytes("x", contents[0])
    done = threading.Event()

    def rewrite(content: bytes) -> None:
        while not done.is_set():
            DiskCache(tmp_path).try_write_bytes("x", content)

    writers = [threading.Thread(target=rewrite, args=(content,)) for content in contents[1:]]
    for writer in writers:
        writer.start()
    seen = [DiskCache(tmp_path).read("x") for _ in range(200)]
    done.set()
    for writer in writers:
        writer.join(timeout=60)
    assert all(content in contents for content in seen)


def test_the_lock_excludes_other_holders(tmp_path: Path) -> None:
    inside: list[int] = []
    overlaps: list[int] = []

    def enter(number: int) -> None:
        with DiskCache(tmp_path).lock("x"):
            inside.append(number)
            overlaps.append(len(inside))
            inside.remove(number)

    threads = [threading.Thread(target=enter, args=(number,)) for number in range(8)]
    with DiskCache(tmp_path).lock("x"):
        for thread in threads:
            thread.start()
        assert overlaps == []
    for thread in threads:
        thread.join(timeout=60)
    assert overlaps == [1] * 8


def test_the_default_folder_follows_xdg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert DiskCache.default().root == tmp_path / "pdtrace"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert DiskCache.default().root == tmp_path / "home" / ".cache" / "pdtrace"
