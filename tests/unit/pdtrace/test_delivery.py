"""Requests that wait in the files for a collector: replay, restarts, rotation, full disks."""

from __future__ import annotations

import errno
import gc
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from pdtrace.assembly.collected import CollectedRequest
from pdtrace.export import queue
from pdtrace.export.delivery import TRACES_NAME, Delivery
from pdtrace.export.queue import TAKEN, Answer, QueueLimits, Sent
from pdtrace.export.settings import ExportPlan
from pdtrace.export.sink import SinkPosition, lines_since, span_files
from pdtrace.export.spill import CURSORS_NAME, Spill, Stretch
from pdtrace.export.targets import otlp_http_target
from pdtrace.otlp.json_lines import count_sampled, decode_line
from pdtrace.spans import Resource, Span, SpanKind
from tests.support.copies import replace
from tests.support.otlp_receivers import http_receiver

EAGER = QueueLimits(max_queued=40, max_batch=10, delay_s=0.001)
SPANS_EACH = 5
RESOURCE = Resource(attributes={"service.name": "pd-gateway", "service.instance.id": "gateway-0"})


@pytest.fixture(autouse=True)
def direct(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")


def eventually(condition: Callable[[], bool], within_s: float = 30) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def request_of(number: int, *, sampled: bool = True) -> tuple[CollectedRequest, list[Span]]:
    trace_id = f"{number + 1:032x}"
    request = CollectedRequest(
        request_id=f"r{number}",
        trace_id=trace_id,
        root_span_id=f"{number + 1:016x}",
        client_parent_span_id="c" * 16,
        sampled=sampled,
    )
    spans = [
        Span(
            trace_id=trace_id,
            span_id=f"{number * SPANS_EACH + index + 1:016x}",
            parent_id=None,
            name=f"stage {index}",
            kind=SpanKind.INTERNAL,
            start_ns=1_000 + index,
            end_ns=2_000 + index,
            resource=RESOURCE,
            attributes={"number": number},
        )
        for index in range(SPANS_EACH)
    ]
    return request, spans


class Collector:
    """A target that takes spans while it is up; what it takes is kept."""

    name = "the collector"

    def __init__(self, *, up: bool = True, kind: str = "otlp") -> None:
        self.kind = kind
        self.up = up
        self.ids: list[str] = []
        self.batches: list[int] = []
        self.calls = 0

    def send(self, spans: Sequence[Span]) -> Answer:
        self.calls += 1
        if not self.up:
            return Answer(
                sent=Sent.RETRY, reason="Connection refused", code="unreachable", retry_after_s=0.0
            )
        self.batches.append(len(spans))
        self.ids += [span.span_id for span in spans]
        return TAKEN

    def shutdown(self) -> None:
        pass

    @property
    def numbers(self) -> list[int]:
        """The requests that arrived, in order, each whole."""
        assert len(self.ids) % SPANS_EACH == 0
        groups = [self.ids[i : i + SPANS_EACH] for i in range(0, len(self.ids), SPANS_EACH)]
        numbers = [(int(group[0], 16) - 1) // SPANS_EACH for group in groups]
        for number, group in zip(numbers, groups, strict=True):
            assert group == [span.span_id for span in request_of(number)[1]]
        return numbers


def delivery_of(
    out: Path | None,
    *targets: Collector,
    limits: QueueLimits = EAGER,
    max_file_bytes: int = 1 << 20,
    max_files: int = 100,
) -> Delivery:
    plan = ExportPlan(targets=targets, limits=limits)
    return Delivery(out=out, plan=plan, max_file_bytes=max_file_bytes, max_files=max_files)


def deliver(delivery: Delivery, numbers: Sequence[int], *, each: int = 7) -> None:
    for begin in range(0, len(numbers), each):
        delivery.deliver([request_of(number) for number in numbers[begin : begin + each]])


def in_files(out: Path) -> list[int]:
    lines = lines_since(out / TRACES_NAME)
    return [int(str(decode_line(line)[0].attributes["number"])) for line in lines]


# -- behind and live -------------------------------------------------------------------------


def test_collector_that_is_down_costs_nothing_and_gets_all_once_it_is_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    collector = Collector(up=False)
    delivery = delivery_of(tmp_path, collector)
    deliver(delivery, range(500))
    eventually(lambda: collector.calls > 2)
    totals = delivery.totals()
    assert (totals["spans_waiting"], totals["spans_dropped"]) == (500 * SPANS_EACH, 0)
    collector.up = True
    eventually(lambda: delivery.totals()["spans_waiting"] == 0)
    deliver(delivery, range(500, 520))
    eventually(lambda: delivery.totals()["spans_waiting"] == 0)
    delivery.close(5)
    assert collector.numbers == list(range(520)), "in order, none lost, none twice"
    assert max(collector.batches) <= EAGER.max_batch
    totals = delivery.totals()
    assert totals["spans_exported"] == 520 * SPANS_EACH
    assert totals["spans_replayed"] >= 400 * SPANS_EACH, "only what fits is kept in memory"
    assert sorted(record.message for record in caplog.records) == [
        "the collector does not keep up: further spans wait in the files",
        "the collector does not take spans: Connection refused. They wait in the files",
        "the collector takes spans again; 0 were dropped so far",
    ]


def test_memory_is_bounded_whatever_waits(tmp_path: Path) -> None:
    collector = Collector(up=False)
    delivery = delivery_of(tmp_path, collector)
    before = sys.getrefcount(RESOURCE)  # every span refers to it
    deliver(delivery, range(2_000))
    gc.collect()
    held = sys.getrefcount(RESOURCE) - before
    assert 0 < held <= EAGER.max_queued + 2 * EAGER.max_batch  # caches refer to it, too
    delivery.close(0.2)
    assert delivery.totals()["spans_waiting"] == 2_000 * SPANS_EACH


@pytest.mark.parametrize("seed", range(5))
def test_every_request_arrives_once_whenever_the_collector_is_up(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    collector = Collector()
    delivery = delivery_of(tmp_path, collector, max_file_bytes=20_000)
    sent = 0
    sampled: list[int] = []
    for _ in range(60):
        collector.up = chance.random() < 0.5
        size = chance.choice((1, 3, 20))
        built: list[tuple[CollectedRequest, list[Span]]] = []
        for number in range(sent, sent + size):
            keep = chance.random() < 0.7
            built.append(request_of(number, sampled=keep))
            if keep:
                sampled.append(number)
        delivery.deliver(built)
        sent += size
        if chance.random() < 0.3:
            time.sleep(0.01)
        if chance.random() < 0.1:
            delivery.close(0.5)
            delivery = delivery_of(tmp_path, collector, max_file_bytes=20_000)
    collector.up = True
    eventually(lambda: delivery.totals()["spans_waiting"] == 0)
    delivery.close(5)
    assert collector.numbers == sampled
    assert in_files(tmp_path) == list(range(sent))
    assert delivery.totals()["spans_dropped"] == 0


def test_two_exporters_lag_each_for_itself(tmp_path: Path) -> None:
    fast, slow = Collector(kind="otlp"), Collector(up=False, kind="console")
    delivery = delivery_of(tmp_path, fast, slow)
    deliver(delivery, range(50))
    eventually(lambda: len(fast.numbers) == 50)
    delivery.close(0.2)
    assert (slow.numbers, delivery.totals()["spans_waiting"]) == ([], 50 * SPANS_EACH)
    slow.up = True
    delivery = delivery_of(tmp_path, fast, slow)
    eventually(lambda: delivery.totals()["spans_waiting"] == 0)
    delivery.close(5)
    assert fast.numbers == slow.numbers == list(range(50))


# -- restarts --------------------------------------------------------------------------------


def test_next_agent_sends_what_the_last_one_could_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    collector = Collector()
    delivery = delivery_of(tmp_path, collector)
    deliver(delivery, range(10))
    eventually(lambda: len(collector.numbers) == 10)
    collector.up = False
    deliver(delivery, range(10, 100))
    delivery.close(0.2)
    [line] = [
        r.message for r in caplog.records if "wait in" in r.message and "next agent" in r.message
    ]
    assert line.endswith(
        f": 450 spans were not exported and wait in {tmp_path / TRACES_NAME} for the next agent: "
        "Connection refused"
    )
    collector.up = True
    delivery = delivery_of(tmp_path, collector)
    deliver(delivery, range(100, 110))
    eventually(lambda: delivery.totals()["spans_waiting"] == 0)
    totals = delivery.totals()
    assert totals["spans_exported"] == 100 * SPANS_EACH
    assert 90 * SPANS_EACH <= totals["spans_replayed"] <= totals["spans_exported"]
    delivery.close(5)
    assert collector.numbers == list(range(110))


def test_agent_that_was_killed_sends_at_most_one_batch_again(tmp_path: Path) -> None:
    """Its files and cursors are all that is left: here they are copied while it works."""
    collector = Collector()
    delivery = delivery_of(tmp_path / "one", collector, limits=replace(EAGER, max_queued=10_000))
    deliver(delivery, range(300), each=300)
    left = tmp_path / "two"
    (left / TRACES_NAME).mkdir(parents=True)
    for name in (CURSORS_NAME, f"{TRACES_NAME}/spans-000001.jsonl"):
        (left / name).write_bytes((tmp_path / "one" / name).read_bytes())
    noted = len(collector.ids)
    delivery.close(10)
    after = Collector()
    delivery = delivery_of(left, after)
    eventually(lambda: delivery.totals()["spans_waiting"] == 0)
    delivery.close(5)
    assert after.numbers == list(range(300 - len(after.numbers), 300))
    assert len(after.ids) + noted >= 300 * SPANS_EACH


def test_exporter_that_is_new_to_the_files_begins_at_their_end(tmp_path: Path) -> None:
    first = Delivery(out=tmp_path)
    first.deliver([request_of(0)])
    first.close(1)
    collector = Collector()
    delivery = delivery_of(tmp_path, collector)
    delivery.deliver([request_of(1)])
    delivery.close(5)
    assert collector.numbers == [1]


def test_agent_without_exporter_leaves_work_for_one_with(tmp_path: Path) -> None:
    collector = Collector()
    delivery_of(tmp_path, collector).close(1)
    without = Delivery(out=tmp_path)
    without.deliver([request_of(0)])
    without.close(1)
    delivery = delivery_of(tmp_path, collector)
    eventually(lambda: delivery.totals()["spans_waiting"] == 0)
    delivery.close(5)
    assert collector.numbers == [0]


@pytest.mark.parametrize("content", [b"", b"{", b'{"version":1,"cursors":{"otlp":7}}'])
def test_cursors_that_cannot_be_read_are_said_and_start_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    (tmp_path / CURSORS_NAME).write_bytes(content)
    collector = Collector()
    delivery = delivery_of(tmp_path, collector)
    delivery.deliver([request_of(0)])
    delivery.close(5)
    assert collector.numbers == [0]
    assert "cannot be used, export begins with the next request" in caplog.text


def test_files_that_somebody_removed_are_not_waited_for(tmp_path: Path) -> None:
    collector = Collector()
    delivery = delivery_of(tmp_path, collector)
    deliver(delivery, range(20))
    delivery.close(5)
    for path in span_files(tmp_path / TRACES_NAME):
        path.unlink()
    delivery = delivery_of(tmp_path, collector)
    deliver(delivery, range(20, 25))
    delivery.close(5)
    assert collector.numbers == list(range(25))


def test_line_that_is_no_request_is_passed_over_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    collector = Collector(up=False)
    delivery = delivery_of(tmp_path, collector)
    deliver(delivery, range(3))
    delivery.close(0.1)
    [path] = span_files(tmp_path / TRACES_NAME)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b'{"resourceSpans": [7]}\n' + lines[1] + lines[2])
    collector.up = True
    delivery = delivery_of(tmp_path, collector)
    eventually(lambda: delivery.totals()["spans_waiting"] == 0)
    delivery.close(5)
    assert collector.numbers == [0, 1, 2]
    assert caplog.text.count("is not exported: not OTLP") == 1


def test_what_somebody_removed_or_damaged_before_its_turn_is_counted_as_dropped(
    tmp_path: Path,
) -> None:
    collector = Collector(up=False)
    limits = QueueLimits(max_queued=20, max_batch=5, delay_s=0.01)
    delivery = delivery_of(tmp_path, collector, limits=limits, max_file_bytes=20_000)
    deliver(delivery, range(100))
    first, second, *_ = span_files(tmp_path / TRACES_NAME)[1:]
    gone = first.read_bytes().count(b"\n")
    first.unlink()
    lines = second.read_bytes().splitlines(keepends=True)
    second.write_bytes(b"\0" * (len(lines[0]) - 1) + b"\n" + b"".join(lines[1:]))
    collector.up = True
    deliver(delivery, range(100, 103))
    eventually(lambda: delivery.totals()["spans_waiting"] == 0)
    dropped = delivery.dropped()
    delivery.close(5)
    assert dropped["file deleted"] == (gone + 1) * SPANS_EACH == sum(dropped.values())
    assert len(collector.numbers) == 103 - gone - 1


def test_what_is_in_memory_when_somebody_deletes_its_file_is_lost_at_exit_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    delivery = delivery_of(tmp_path, Collector(up=False))
    deliver(delivery, range(5))
    for path in span_files(tmp_path / TRACES_NAME):
        path.unlink()
    deliver(delivery, range(5, 8))
    delivery.close(0.1)
    assert delivery.dropped()["not taken before exit"] == 5 * SPANS_EACH
    assert f"{3 * SPANS_EACH} spans were not exported and wait" in caplog.text


# -- sampling --------------------------------------------------------------------------------


def test_unsampled_requests_are_in_the_files_and_never_sent(tmp_path: Path) -> None:
    collector = Collector(up=False)
    delivery = delivery_of(tmp_path, collector)
    for number in range(100):
        delivery.deliver([request_of(number, sampled=number % 2 == 0)])
    assert delivery.totals()["spans_unsampled"] == 50 * SPANS_EACH
    assert delivery.totals()["spans_waiting"] == 50 * SPANS_EACH
    delivery.close(0.1)
    collector.up = True
    delivery = delivery_of(tmp_path, collector)
    eventually(lambda: delivery.totals()["spans_waiting"] == 0)
    delivery.close(5)
    assert collector.numbers == list(range(0, 100, 2))
    assert in_files(tmp_path) == list(range(100))
    counts = [count_sampled(line) for line in lines_since(tmp_path / TRACES_NAME)]
    assert counts == [SPANS_EACH, 0] * 50


def test_cursor_passes_unsampled_requests(tmp_path: Path) -> None:
    delivery = delivery_of(tmp_path, Collector())
    for number in range(10):
        delivery.deliver([request_of(number, sampled=False)])
    end = delivery.position
    assert end is not None
    delivery.close(5)
    assert Spill(tmp_path / TRACES_NAME, tmp_path / CURSORS_NAME, end).open_cursor("otlp") == end


# -- files that go, disks that are full ------------------------------------------------------


def test_file_that_is_deleted_before_its_turn_is_counted_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    collector = Collector(up=False)
    delivery = delivery_of(tmp_path, collector, max_file_bytes=10_000, max_files=3)
    deliver(delivery, range(200), each=1)
    kept = in_files(tmp_path)
    collector.up = True
    eventually(lambda: delivery.totals()["spans_waiting"] == 0)
    delivery.close(5)
    in_memory = [number for number in collector.numbers if number not in kept]
    assert in_memory == list(range(len(in_memory))), "what was in memory is not lost with its file"
    assert len(in_memory) <= (EAGER.max_queued + EAGER.max_batch) // SPANS_EACH
    assert collector.numbers == in_memory + kept
    lost = 200 - len(in_memory) - len(kept)
    assert lost > 100
    assert delivery.totals()["spans_dropped_file_deleted"] == lost * SPANS_EACH
    assert delivery.dropped()["file deleted"] == lost * SPANS_EACH
    assert delivery.totals()["files_deleted"] > 3
    assert caplog.text.count("spans are dropped (file deleted)") == 1


def test_files_of_a_former_agent_count_when_they_are_deleted(tmp_path: Path) -> None:
    collector = Collector(up=False)
    delivery = delivery_of(tmp_path, collector, max_file_bytes=10_000)
    deliver(delivery, range(100))
    delivery.close(0.1)
    delivery = delivery_of(tmp_path, collector, max_file_bytes=10_000, max_files=3)
    deliver(delivery, range(100, 300))
    totals = delivery.totals()
    assert totals["spans_waiting"] + totals["spans_dropped"] == 300 * SPANS_EACH
    assert totals["spans_waiting"] >= len(in_files(tmp_path)) * SPANS_EACH
    delivery.close(0.1)


def test_what_is_in_memory_alone_when_its_file_is_gone_is_lost_at_exit_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    delivery = delivery_of(tmp_path, Collector(up=False), max_file_bytes=10_000, max_files=2)
    deliver(delivery, range(60), each=1)
    kept = len(in_files(tmp_path))
    delivery.close(0.3)
    totals = delivery.totals()
    assert totals["spans_waiting"] == kept * SPANS_EACH
    assert totals["spans_dropped"] == (60 - kept) * SPANS_EACH
    assert totals["spans_dropped_not_taken_before_exit"] > 0
    assert "were not exported and are lost: Connection refused" in caplog.text


def test_files_that_cannot_be_read_for_a_while_are_read_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    collector = Collector(up=False)
    delivery = delivery_of(tmp_path, collector)
    deliver(delivery, range(50))
    delivery.close(0.1)
    monkeypatch.setattr(queue, "MAX_BACKOFF_S", 0.01)
    real_read = Spill.read
    failures = [OSError(errno.EIO, os.strerror(errno.EIO)) for _ in range(3)]

    def read(self: Spill, start: SinkPosition, end: SinkPosition, *, max_spans: int) -> Stretch:
        if failures:
            raise failures.pop()
        return real_read(self, start, end, max_spans=max_spans)

    monkeypatch.setattr(Spill, "read", read)
    collector.up = True
    delivery = delivery_of(tmp_path, collector)
    eventually(lambda: len(collector.ids) == 50 * SPANS_EACH)
    delivery.close(5)
    assert collector.numbers == list(range(50))
    assert caplog.text.count("the files cannot be read") == 1


def test_closing_does_not_wait_for_files_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    collector = Collector(up=False)
    delivery = delivery_of(tmp_path, collector)
    deliver(delivery, range(50))
    delivery.close(0.1)

    def read(self: Spill, start: SinkPosition, end: SinkPosition, *, max_spans: int) -> Stretch:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Spill, "read", read)
    delivery = delivery_of(tmp_path, collector)
    eventually(lambda: delivery.totals()["spans_waiting"] == 50 * SPANS_EACH)
    begin_s = time.monotonic()
    delivery.close(60)
    assert time.monotonic() - begin_s < 30
    assert delivery.totals()["spans_waiting"] == 50 * SPANS_EACH


def test_full_disk_exports_from_memory_while_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    collector = Collector()
    delivery = delivery_of(tmp_path, collector)
    deliver(delivery, range(5))
    real_write = os.write
    full = threading.Event()

    def write(fd: int, data: bytes) -> int:
        if full.is_set():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real_write(fd, data)

    monkeypatch.setattr(os, "write", write)
    full.set()
    for number in range(5, 15):
        delivery.deliver([request_of(number)])
        eventually(lambda: delivery.totals()["spans_waiting"] == 0)
    assert delivery.lines_lost == delivery.totals()["lines_lost"] == 10
    collector.up = False
    deliver(delivery, range(15, 100))
    dropped = delivery.totals()["spans_dropped_disk_full"]
    assert dropped >= (85 - (EAGER.max_queued + EAGER.max_batch) // SPANS_EACH) * SPANS_EACH
    full.clear()
    deliver(delivery, range(100, 150))
    collector.up = True
    eventually(lambda: delivery.totals()["spans_waiting"] == 0)
    delivery.close(5)
    arrived = collector.numbers
    assert (arrived[:15], arrived[-50:]) == ([*range(15)], [*range(100, 150)])
    from_memory = arrived[15:-50]
    assert from_memory == sorted(set(from_memory))
    assert set(from_memory) < set(range(15, 100))
    assert len(from_memory) == 85 - dropped // SPANS_EACH
    assert in_files(tmp_path) == [*range(5), *range(100, 150)]


def test_cursor_that_cannot_be_written_is_said_once_and_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", refuse)
    collector = Collector()
    delivery = delivery_of(tmp_path, collector)
    deliver(delivery, range(30))
    delivery.close(5)
    assert collector.numbers == list(range(30))
    assert caplog.text.count("export again what") + caplog.text.count("exports again what") == 1


def test_span_that_cannot_be_written_costs_its_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    collector = Collector()
    delivery = delivery_of(tmp_path, collector)
    request, spans = request_of(1)
    delivery.deliver([request_of(0), (request, [replace(spans[0], span_id='"')]), request_of(2)])
    delivery.close(5)
    assert collector.numbers == in_files(tmp_path) == [0, 2]
    assert delivery.errors == 1
    assert "the spans of request r1 cannot be written" in caplog.text


# -- without files ---------------------------------------------------------------------------


def test_without_files_the_queue_is_bounded_and_drops_are_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    collector = Collector(up=False)
    delivery = delivery_of(None, collector)
    deliver(delivery, range(100))
    totals = delivery.totals()
    kept = (100 * SPANS_EACH - totals["spans_dropped"]) // SPANS_EACH
    assert kept <= (EAGER.max_queued + EAGER.max_batch) // SPANS_EACH
    assert totals["spans_dropped"] == totals["spans_dropped_queue_full"]
    collector.up = True
    eventually(lambda: delivery.totals()["spans_waiting"] == 0)
    delivery.close(5)
    assert len(collector.numbers) == kept
    assert caplog.text.count("spans are dropped (queue full)") == 1


def test_without_files_what_is_not_taken_in_time_is_lost_and_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    delivery = delivery_of(None, Collector(up=False))
    delivery.deliver([request_of(0)])
    begin_s = time.monotonic()
    delivery.close(0.3)
    assert time.monotonic() - begin_s < 5
    assert delivery.totals()["spans_dropped_not_taken_before_exit"] == SPANS_EACH
    assert "5 spans were not exported and are lost: Connection refused" in caplog.text
    delivery.close(0.3)
    assert caplog.text.count("are lost") == 1


def test_files_only_needs_no_exporter(tmp_path: Path) -> None:
    delivery = Delivery(out=tmp_path)
    deliver(delivery, range(3))
    assert delivery.totals() == {"lines_lost": 0, "files_deleted": 0}
    assert delivery.dropped() == {}
    assert list(delivery.lines_since(delivery.position)) == []
    delivery.close(1)
    delivery.close(1)
    assert in_files(tmp_path) == [0, 1, 2]
    assert not (tmp_path / CURSORS_NAME).exists()


# -- what is in the files is what arrives ----------------------------------------------------


def messages(spans: Iterator[object]) -> Counter[bytes]:
    return Counter(span.SerializeToString() for span in spans)  # pyright: ignore[reportAttributeAccessIssue] generated


def test_replayed_spans_are_the_same_messages_as_ones_sent_at_once(tmp_path: Path) -> None:
    from pdtrace.assembly.request_spans import assemble
    from tests.support.marked_requests import pd_moments
    from tests.support.marked_requests import request_of as marked_request

    request = marked_request(pd_moments())
    spans = assemble(request)
    with http_receiver() as received:
        target = otlp_http_target(f"{received.endpoint}/v1/traces")
        at_once = Delivery(out=None, plan=ExportPlan(targets=[target], limits=EAGER))
        at_once.deliver([(request, spans)])
        at_once.close(10)
        direct = messages(iter(received.spans()))
        received.requests.clear()
        delivery_of(tmp_path, Collector()).close(1)
        files = Delivery(out=tmp_path)
        files.deliver([(request, spans)])
        files.close(1)
        target = otlp_http_target(f"{received.endpoint}/v1/traces")
        later = Delivery(out=tmp_path, plan=ExportPlan(targets=[target], limits=EAGER))
        later.close(10)
        assert messages(iter(received.spans())) == direct
        assert later.totals()["spans_replayed"] == len(spans)


def test_reading_stops_at_the_end_that_is_asked_for(tmp_path: Path) -> None:
    delivery = Delivery(out=tmp_path, max_file_bytes=5_000)
    ends = [SinkPosition()]
    for number in range(20):
        delivery.deliver([request_of(number)])
        assert delivery.position is not None
        ends.append(delivery.position)
    spill = Spill(tmp_path / TRACES_NAME, tmp_path / CURSORS_NAME, ends[-1])
    for begin in range(20):
        for end in range(begin, 21):
            stretch = spill.read(ends[begin], ends[end], max_spans=10_000)
            numbers = [spans[0].attributes["number"] for spans, _ in stretch.requests]
            assert numbers == list(range(begin, end))
            assert [behind for _, behind in stretch.requests] == ends[begin + 1 : end + 1]
            assert stretch.end == ends[end]
    counts = spill.count(ends[0], ends[-1])
    assert sum(counts.values()) == 20 * SPANS_EACH
    assert len(counts) == len(span_files(tmp_path / TRACES_NAME)) > 1
    delivery.close(1)
