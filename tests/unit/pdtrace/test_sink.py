"""The rotating file sink: whole lines, bounded files, full disks, crashes and restarts."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

import pytest

from pdtrace.export.sink import FileSink, SinkError, SinkPosition, lines_since, span_files


def line(number: int, size: int = 20) -> bytes:
    return b"%0*d\n" % (size - 1, number)


def content(directory: Path) -> list[bytes]:
    return list(lines_since(directory))


def test_lines_are_readable_as_soon_as_they_are_written(tmp_path: Path) -> None:
    sink = FileSink(tmp_path / "traces")
    assert sink.write([line(1), line(2)])
    assert content(tmp_path / "traces") == [line(1), line(2)]
    assert sink.write([line(3)])
    assert content(tmp_path / "traces") == [line(1), line(2), line(3)]
    assert sink.position == SinkPosition(number=1, offset=60)
    sink.close()


def test_files_rotate_by_size_and_never_split_a_line(tmp_path: Path) -> None:
    sink = FileSink(tmp_path, max_file_bytes=50)
    sink.write([line(n) for n in range(5)])
    sink.write([line(5)])
    sink.close()
    assert [path.name for path in span_files(tmp_path)] == [
        "spans-000001.jsonl",
        "spans-000002.jsonl",
        "spans-000003.jsonl",
    ]
    assert [path.stat().st_size for path in span_files(tmp_path)] == [40, 40, 40]
    assert content(tmp_path) == [line(n) for n in range(6)]


def test_line_larger_than_a_file_gets_its_own(tmp_path: Path) -> None:
    sink = FileSink(tmp_path, max_file_bytes=50)
    sink.write([line(0), line(1, size=500), line(2)])
    sink.close()
    assert [path.stat().st_size for path in span_files(tmp_path)] == [20, 500, 20]


def test_oldest_files_go_when_there_are_too_many(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sink = FileSink(tmp_path, max_file_bytes=20, max_files=3)
    with caplog.at_level(logging.WARNING):
        for n in range(10):
            sink.write([line(n)])
    assert content(tmp_path) == [line(7), line(8), line(9)]
    assert sink.files_deleted == 7
    assert len(caplog.records) == 1
    sink.close()


def test_next_sink_appends_and_removes_a_line_that_a_crash_cut(tmp_path: Path) -> None:
    sink = FileSink(tmp_path)
    sink.write([line(1)])
    sink.close()
    [path] = span_files(tmp_path)
    with path.open("ab") as file:
        file.write(b'{"resourceSpans": [' + b"x" * 3_000_000)
    assert content(tmp_path) == [line(1)], "readers skip the cut line"
    sink = FileSink(tmp_path)
    sink.write([line(2)])
    sink.close()
    assert content(tmp_path) == [line(1), line(2)]


def test_file_that_is_one_cut_line_is_emptied(tmp_path: Path) -> None:
    (tmp_path / "spans-000004.jsonl").write_bytes(b"half a line")
    sink = FileSink(tmp_path)
    assert sink.position == SinkPosition(number=4, offset=0)
    sink.close()


def test_two_sinks_never_share_a_directory(tmp_path: Path) -> None:
    sink = FileSink(tmp_path)
    with pytest.raises(SinkError, match="another agent"):
        FileSink(tmp_path)
    sink.close()
    FileSink(tmp_path).close()


def test_directory_that_cannot_be_made_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SinkError, match=r"cannot write traces to .*file/traces"):
        FileSink(tmp_path / "file" / "traces")


def test_full_disk_is_counted_and_said_once_and_leaves_whole_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sink = FileSink(tmp_path)
    sink.write([line(1)])
    real_write = os.write
    room = [30]

    def write_until_full(fd: int, data: bytes) -> int:
        if room[0] == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        size = min(room[0], len(data))
        room[0] -= size
        return real_write(fd, data[:size])

    monkeypatch.setattr(os, "write", write_until_full)
    with caplog.at_level(logging.WARNING):
        assert sink.write([line(2), line(3)]) == [None, None]
        assert sink.write([line(4)]) == [None]
        assert content(tmp_path) == [line(1)]
        assert [record.levelname for record in caplog.records] == ["ERROR"]
        assert "No space left" in caplog.text
        room[0] = 1_000
        assert sink.write([line(5)]) == [SinkPosition(offset=40)]
    assert sink.lines_lost == 3
    assert content(tmp_path) == [line(1), line(5)]
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]
    sink.close()


def test_each_line_has_the_position_behind_it(tmp_path: Path) -> None:
    sink = FileSink(tmp_path, max_file_bytes=50)
    ends = sink.write([line(n) for n in range(5)])
    assert ends == [SinkPosition(number=1 + n // 2, offset=20 + n % 2 * 20) for n in range(5)]
    assert ends[-1] == sink.position
    for n, end in enumerate(ends):
        assert list(lines_since(tmp_path, end)) == [line(m) for m in range(n + 1, 5)]
    sink.close()


def test_file_is_announced_before_it_is_deleted(tmp_path: Path) -> None:
    sink = FileSink(tmp_path, max_file_bytes=20, max_files=2)
    announced: list[tuple[int, bool]] = []

    def before_delete(number: int) -> None:
        announced.append((number, (tmp_path / f"spans-{number:06d}.jsonl").exists()))

    sink.before_delete = before_delete
    sink.write([line(n) for n in range(4)])
    sink.close()
    assert announced == [(1, True), (2, True)]


def test_lines_since_a_position_begin_there(tmp_path: Path) -> None:
    sink = FileSink(tmp_path, max_file_bytes=40)
    sink.write([line(n) for n in range(3)])
    position = sink.position
    sink.write([line(n) for n in range(3, 6)])
    sink.close()
    assert list(lines_since(tmp_path, position)) == [line(3), line(4), line(5)]


def test_directory_and_files_are_private(tmp_path: Path) -> None:
    sink = FileSink(tmp_path / "traces")
    sink.write([line(1)])
    sink.close()
    assert (tmp_path / "traces").stat().st_mode & 0o077 == 0
    assert span_files(tmp_path / "traces")[0].stat().st_mode & 0o077 == 0


def test_other_files_in_the_directory_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "spans-notes.jsonl").write_text("mine\n")
    sink = FileSink(tmp_path, max_file_bytes=20, max_files=1)
    for n in range(4):
        sink.write([line(n)])
    sink.close()
    assert (tmp_path / "spans-notes.jsonl").read_text() == "mine\n"
    assert content(tmp_path) == [line(3)]
