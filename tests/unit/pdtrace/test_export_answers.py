"""What collectors answer, and what becomes of the batch: back-off, refusals, partial success."""

from __future__ import annotations

import logging
import time
import tracemalloc
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from email.utils import formatdate
from typing import Any

import grpc
import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status

from pdtrace.assembly.request_spans import assemble
from pdtrace.export import queue as export_queue
from pdtrace.export import targets as export_targets
from pdtrace.export.queue import (
    MAX_BACKOFF_S,
    MAX_RETRY_AFTER_S,
    TAKEN,
    ExportQueue,
    QueueLimits,
    Sent,
    Target,
    backoff_s,
)
from pdtrace.export.targets import (
    MAX_REASON_CHARS,
    connection_fault,
    http_answer,
    otlp_grpc_target,
    otlp_http_target,
)
from pdtrace.spans import Event
from tests.support.copies import replace
from tests.support.marked_requests import pd_moments, request_of
from tests.support.otlp_receivers import (
    Received,
    Reply,
    black_hole,
    grpc_receiver,
    http_receiver,
    raw_receiver,
    refusing_receiver,
    silent_receiver,
    trickling_receiver,
)

SPANS = assemble(request_of(pd_moments()))
EAGER = QueueLimits(delay_s=0.001)
Receiver = Callable[..., AbstractContextManager[Received]]


@pytest.fixture(autouse=True)
def direct(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")


def eventually(condition: Callable[[], bool], within_s: float = 30) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def target_of(receiver: Receiver, received: Received) -> Target:
    if receiver is grpc_receiver:
        return otlp_grpc_target(received.endpoint)
    return otlp_http_target(f"{received.endpoint}/v1/traces")


def numbered(count: int) -> list[list[Any]]:
    """Requests of one span each."""
    return [[replace(SPANS[0], span_id=f"{number + 1:016x}")] for number in range(count)]


def no_parts(thing: object, *parts: str) -> bool:
    return False


# -- tried again -----------------------------------------------------------------------------


def test_backoff_grows_to_its_bound_and_follows_the_collector() -> None:
    delays = [backoff_s(failures, None) for failures in range(12)]
    assert delays == sorted(delays)
    assert (delays[0], delays[-1]) == (0.5, MAX_BACKOFF_S)
    assert backoff_s(5, 1.5) == 1.5
    assert 0 < backoff_s(0, 0.0) < 0.5
    assert backoff_s(0, 1e6) == MAX_RETRY_AFTER_S


def retry_info(seconds: float) -> AnyMessage:
    packed = AnyMessage()
    delay = Duration(seconds=int(seconds), nanos=round(seconds % 1 * 1e9))
    packed.Pack(RetryInfo(retry_delay=delay))
    return packed


@pytest.mark.parametrize(
    ("receiver", "reply"),
    [
        (http_receiver, Reply(status=429, headers={"Retry-After": "0.7"})),
        (http_receiver, Reply(status=503, headers={"Retry-After": "0.7"})),
        (
            grpc_receiver,
            Reply(
                code=grpc.StatusCode.RESOURCE_EXHAUSTED,
                trailers=[
                    (
                        "grpc-status-details-bin",
                        Status(code=8, details=[retry_info(0.7)]).SerializeToString(),
                    )
                ],
            ),
        ),
        (
            grpc_receiver,
            Reply(
                code=grpc.StatusCode.UNAVAILABLE,
                trailers=[
                    (
                        "google.rpc.retryinfo-bin",
                        RetryInfo(retry_delay=Duration(nanos=700_000_000)).SerializeToString(),
                    )
                ],
            ),
        ),
    ],
)
def test_collector_that_asks_to_wait_is_left_alone_for_so_long(
    receiver: Receiver, reply: Reply, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_queue, "FIRST_BACKOFF_S", 0.01)
    with receiver([reply, 200]) as received:
        queue = ExportQueue([target_of(receiver, received)], limits=EAGER)
        queue.submit(SPANS)
        eventually(lambda: queue.totals()["spans_exported"] == len(SPANS))
        queue.close(5)
    first, second = received.times
    assert second - first >= 0.65


@pytest.mark.parametrize("receiver", [http_receiver, grpc_receiver])
@pytest.mark.parametrize("status", [429, 503])
def test_busy_collector_gets_every_span_later(
    receiver: Receiver, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    with receiver([status, status, 200]) as received:
        queue = ExportQueue([target_of(receiver, received)], limits=EAGER)
        queue.submit(SPANS)
        eventually(lambda: queue.totals()["spans_exported"] == len(SPANS))
        queue.close(5)
    assert received.calls == 3
    assert queue.totals()["spans_dropped"] == 0
    assert [record.name for record in caplog.records] == ["pdtrace.export.queue"] * 2
    assert "takes spans again" in caplog.records[1].message


@pytest.mark.parametrize(
    ("value", "expected"),
    [("3", 3.0), ("0", 0.0), ("-2", 0.0), ("nan", None), ("inf", None), ("soon", None)],
)
def test_retry_after_header(value: str, expected: float | None) -> None:
    answer = http_answer(503, "", {"retry-after": value}, b"")
    assert (answer.sent, answer.retry_after_s) == (Sent.RETRY, expected)


def test_retry_after_may_be_a_date() -> None:
    date = formatdate(time.time() + 30, usegmt=True)
    seconds = http_answer(429, "", {"retry-after": date}, b"").retry_after_s
    assert seconds is not None
    assert 20 < seconds <= 31


# -- refused for good --------------------------------------------------------------------------


PROTOBUF = {"content-type": "application/x-protobuf"}


@pytest.mark.parametrize(
    ("headers", "body", "says"),
    [
        (PROTOBUF, Status(code=3, message="span 7 is bad").SerializeToString(), "span 7 is bad"),
        (PROTOBUF, b"\xff\xff", ""),
        ({"content-type": "application/json"}, b'{"message": "no"}', '{"message": "no"}'),
        ({}, b"two\r\nlines \x1b[31m", "two lines [31m"),
        ({}, b"x" * 100_000, "x" * MAX_REASON_CHARS + "…"),
        ({}, b"", ""),
    ],
)
def test_refusal_carries_the_collectors_words_cut_and_printable(
    headers: dict[str, str], body: bytes, says: str
) -> None:
    answer = http_answer(400, "Bad Request", headers, body)
    assert answer.sent is Sent.REFUSED
    assert answer.reason == f"400 Bad Request {says}".strip()


@pytest.mark.parametrize(
    ("status", "sent"),
    [
        (400, Sent.REFUSED),
        (401, Sent.REFUSED),
        (403, Sent.REFUSED),
        (404, Sent.REFUSED),
        (413, Sent.TOO_LARGE),
        (408, Sent.REFUSED),
        (429, Sent.RETRY),
        (500, Sent.REFUSED),
        (501, Sent.REFUSED),
        (502, Sent.RETRY),
        (503, Sent.RETRY),
        (504, Sent.RETRY),
        (302, Sent.REFUSED),
        (200, Sent.OK),
        (202, Sent.OK),
    ],
)
def test_statuses_mean_what_the_specification_says(status: int, sent: Sent) -> None:
    assert http_answer(status, "", {}, b"").sent is sent


def test_go_servers_answer_400_to_what_is_too_large() -> None:
    answer = http_answer(400, "Bad Request", {}, b"http: request body too large")
    assert answer.sent is Sent.TOO_LARGE


@pytest.mark.parametrize("receiver", [http_receiver, grpc_receiver])
def test_refused_batches_are_dropped_counted_and_said_once_and_the_queue_goes_on(
    receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    refusal = Reply(
        status=400,
        body=b"span 7 is bad",
        code=grpc.StatusCode.INVALID_ARGUMENT,
        text="span 7 is bad",
    )
    with receiver([refusal, refusal, 200, refusal, 200]) as received:
        limits = QueueLimits(max_batch=1, delay_s=0.001)
        queue = ExportQueue([target_of(receiver, received)], limits=limits)
        for spans in numbered(5):
            queue.submit(spans)
        queue.close(10)
    assert received.span_ids() == [f"{number:016x}" for number in (3, 5)]
    assert queue.totals()["spans_dropped_refused"] == 3
    assert queue.totals()["spans_exported"] == 2
    [record] = caplog.records
    assert "span 7 is bad. They are dropped" in record.message


@pytest.mark.parametrize(
    ("code", "sent"),
    [
        (grpc.StatusCode.UNAUTHENTICATED, Sent.REFUSED),
        (grpc.StatusCode.UNIMPLEMENTED, Sent.REFUSED),
        (grpc.StatusCode.INTERNAL, Sent.REFUSED),
        (grpc.StatusCode.ABORTED, Sent.RETRY),
        (grpc.StatusCode.DATA_LOSS, Sent.RETRY),
        (grpc.StatusCode.DEADLINE_EXCEEDED, Sent.RETRY),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, Sent.RETRY),
    ],
)
def test_grpc_codes_mean_what_the_specification_says(code: grpc.StatusCode, sent: Sent) -> None:
    with grpc_receiver([Reply(code=code, trailers=[("grpc-status-details-bin", b"\xff")])]) as r:
        target = otlp_grpc_target(r.endpoint)
        answer = target.send(SPANS)
        target.shutdown()
    assert (answer.sent, answer.code, answer.retry_after_s) == (sent, code.name, None)


# -- too large -----------------------------------------------------------------------------------


def test_batch_that_a_collector_finds_too_large_is_sent_in_parts() -> None:
    with grpc_receiver(max_message_bytes=8_000) as received:
        limits = QueueLimits(max_batch=512, delay_s=0.05)
        queue = ExportQueue([otlp_grpc_target(received.endpoint)], limits=limits)
        for spans in numbered(300):
            queue.submit(spans)
        queue.close(30)
    assert received.span_ids() == [f"{number + 1:016x}" for number in range(300)]
    assert queue.totals()["spans_dropped"] == 0


def test_batch_of_spans_with_many_events_stays_below_what_receivers_take() -> None:
    event = Event(name="pd.wait", time_ns=1_500, attributes={"pd.wait.reason": "x" * 250})
    requests = [[replace(spans[0], events=(event,) * 100)] for spans in numbered(200)]
    with grpc_receiver() as received:
        limits = QueueLimits(delay_s=0.05)
        queue = ExportQueue([otlp_grpc_target(received.endpoint)], limits=limits)
        for spans in requests:
            queue.submit(spans)
        queue.close(30)
    sizes = [request.ByteSize() for request in received.requests]
    assert sum(sizes) > 4 * 2**20 > 2 * max(sizes), "all at once would be refused"
    assert len(sizes) < 10
    assert queue.totals()["spans_exported"] == 200


def test_request_that_is_too_large_alone_is_dropped_and_the_others_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with grpc_receiver(max_message_bytes=20_000) as received:
        limits = QueueLimits(max_batch=512, delay_s=0.05)
        queue = ExportQueue([otlp_grpc_target(received.endpoint)], limits=limits)
        requests = numbered(20)
        requests[7] = [replace(requests[7][0], attributes={"text": "x" * 50_000})]
        for spans in requests:
            queue.submit(spans)
        queue.close(30)
    assert sorted(received.span_ids()) == [f"{n + 1:016x}" for n in range(20) if n != 7]
    assert queue.totals()["spans_dropped_too_large"] == 1
    assert len(caplog.records) == 1


def test_request_too_large_over_http_is_split_too() -> None:
    with http_receiver([413, 413, 200]) as received:
        queue = ExportQueue(
            [otlp_http_target(f"{received.endpoint}/v1/traces")],
            limits=QueueLimits(max_batch=8, delay_s=0.05),
        )
        for spans in numbered(8):
            queue.submit(spans)
        queue.close(30)
    assert sorted(received.span_ids()) == [f"{n + 1:016x}" for n in range(8)]
    assert len(received.requests[0].resource_spans[0].scope_spans[0].spans) == 2


def test_one_request_that_cannot_be_encoded_costs_itself(caplog: pytest.LogCaptureFixture) -> None:
    with http_receiver() as received:
        queue = ExportQueue(
            [otlp_http_target(f"{received.endpoint}/v1/traces")],
            limits=QueueLimits(max_batch=50, delay_s=0.05),
        )
        requests = numbered(40)
        requests[11] = [replace(requests[11][0], start_ns=-1)]
        for spans in requests:
            queue.submit(spans)
        queue.close(30)
    assert sorted(received.span_ids()) == [f"{n + 1:016x}" for n in range(40) if n != 11]
    assert queue.totals()["spans_dropped_not_encodable"] == 1
    assert len(caplog.records) == 1


# -- taken in part -----------------------------------------------------------------------------


@pytest.mark.parametrize("receiver", [http_receiver, grpc_receiver])
def test_partial_success_counts_what_the_collector_rejected(
    receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    reply = Reply(rejected=3, text="too old", headers=PROTOBUF)
    with receiver([reply, reply, 200]) as received:
        queue = ExportQueue([target_of(receiver, received)], limits=EAGER)
        for count in (1, 2, 3):
            queue.submit(SPANS)
            eventually(lambda count=count: received.calls == count)
        queue.close(10)
    assert queue.totals()["spans_dropped_rejected"] == 6
    assert queue.totals()["spans_exported"] == 3 * len(SPANS) - 6
    [record] = caplog.records
    assert "took a batch but for 3 spans: too old" in record.message


def test_collector_that_rejects_more_than_it_got_is_not_believed() -> None:
    with http_receiver([Reply(rejected=10_000)]) as received:
        queue = ExportQueue([otlp_http_target(f"{received.endpoint}/v1/traces")], limits=EAGER)
        queue.submit(SPANS)
        queue.close(10)
    assert queue.totals()["spans_dropped"] == len(SPANS)
    assert queue.totals()["spans_exported"] == 0


@pytest.mark.parametrize("body", [b"", b"OK", b"\xff\xff\xff", b"{}"])
def test_success_with_an_odd_body_is_success(body: bytes) -> None:
    assert http_answer(200, "OK", {}, body) == TAKEN
    assert http_answer(200, "OK", {"content-type": "application/json"}, body) == TAKEN


# -- no answer -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("receiver", "http_says", "grpc_says"),
    [
        (refusing_receiver, "Connection refused", "Connection refused"),
        (silent_receiver, "no answer within 0.3 s", "no answer within 0.3 s"),
        (black_hole, "no answer within 0.3 s", "no answer within 0.3 s"),
    ],
)
def test_reason_names_what_is_wrong_with_the_connection(
    monkeypatch: pytest.MonkeyPatch, receiver: Receiver, http_says: str, grpc_says: str
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.3")
    with receiver() as received:
        http_target = otlp_http_target(f"{received.endpoint}/v1/traces")
        answer = http_target.send(SPANS)
        http_target.shutdown()
        assert (answer.sent, answer.code, answer.reason) == (Sent.RETRY, "unreachable", http_says)
        grpc_target = otlp_grpc_target(received.endpoint)
        answer = grpc_target.send(SPANS)
        grpc_target.shutdown()
        assert answer.sent is Sent.RETRY
        assert grpc_says in answer.reason


def test_reason_of_a_connection_is_the_deepest_one() -> None:
    def failing() -> None:
        try:
            raise ConnectionRefusedError(111, "Connection refused")
        except OSError as error:
            raise RuntimeError("HTTPConnectionPool(…): Max retries exceeded") from error

    with pytest.raises(RuntimeError) as raised:
        failing()
    assert connection_fault(raised.value, 1) == "Connection refused"
    assert connection_fault(KeyError(), 1) == "KeyError"
    assert connection_fault(None, 1) == "no answer"


@pytest.mark.parametrize("receiver", [http_receiver, grpc_receiver])
def test_timeout_in_milliseconds_is_not_waited_for_in_seconds(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, receiver: Receiver
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "10000")
    with receiver() as received:
        target = target_of(receiver, received)
        assert target.send(SPANS) == TAKEN
        target.shutdown()
    assert "10000 is taken as 60" in caplog.text


@pytest.mark.parametrize("connect", [otlp_http_target, otlp_grpc_target])
@pytest.mark.parametrize(
    "receiver", [refusing_receiver, silent_receiver, black_hole, trickling_receiver]
)
def test_closing_is_bounded_whatever_the_collector_does(
    caplog: pytest.LogCaptureFixture, connect: Callable[[str], Target], receiver: Receiver
) -> None:
    with receiver() as received:
        suffix = "/v1/traces" if connect is otlp_http_target else ""
        queue = ExportQueue([connect(received.endpoint + suffix)], limits=EAGER)
        for spans in numbered(2_000):
            queue.submit(spans)
        begin_s = time.monotonic()
        queue.close(0.5)
        assert time.monotonic() - begin_s < 5, "0.5 s, and a busy machine"
    totals = queue.totals()
    assert totals["spans_dropped_not_taken_before_exit"] == 2_000
    assert totals["spans_exported"] == totals["spans_waiting"] == 0
    assert caplog.text.count("were not exported and are lost: ") == 1
    assert {record.name for record in caplog.records} == {"pdtrace.export.queue"}


@pytest.mark.parametrize("receiver", [http_receiver, grpc_receiver])
def test_collector_that_comes_up_later_is_found_soon(receiver: Receiver) -> None:
    with refusing_receiver() as refusing:
        port = refusing.port
        target = target_of(receiver, refusing)
        queue = ExportQueue([target], limits=EAGER)
        queue.submit(SPANS)
        eventually(lambda: queue.totals()["spans_waiting"] == len(SPANS))
        time.sleep(0.2)  # some tries are refused first; how many does not matter
    with receiver(port=port) as received:
        eventually(lambda: queue.totals()["spans_exported"] == len(SPANS))
        queue.close(5)
        assert len(received.spans()) == len(SPANS)


@pytest.mark.parametrize("connect", [otlp_http_target, otlp_grpc_target])
def test_exporter_without_the_parts_that_are_used_is_called_as_it_is(
    monkeypatch: pytest.MonkeyPatch, connect: Callable[[str], Target]
) -> None:
    monkeypatch.setattr(export_targets, "_has", no_parts)
    receiver = http_receiver if connect is otlp_http_target else grpc_receiver
    with receiver() as received:
        suffix = "/v1/traces" if connect is otlp_http_target else ""
        target = connect(received.endpoint + suffix)
        assert target.send(SPANS) == TAKEN
        target.shutdown()
    assert len(received.spans()) == len(SPANS)


def test_exporters_own_log_lines_do_not_reach_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.5")
    monkeypatch.setattr(export_targets, "_has", no_parts)
    with refusing_receiver() as received, caplog.at_level(logging.WARNING):
        targets: Sequence[Target] = [
            otlp_http_target(f"{received.endpoint}/v1/traces"),
            otlp_grpc_target(received.endpoint),
        ]
        for target in targets:
            answer = target.send(SPANS)
            target.shutdown()
            target.shutdown()
            assert answer.sent is Sent.RETRY
            assert "Failed to export" in answer.reason, "taken from the log"
    assert caplog.records == []


@pytest.mark.parametrize(
    ("headers", "body", "endless"),
    [
        (b"Content-Length: 1000", [b"cut off"], False),
        (b"Content-Length: 1000000", [b"x"], True),
        (b"Content-Type: text/plain", [b"x" * 100_000], True),
        (b"Content-Encoding: gzip\r\nContent-Length: 4", [b"junk"], False),
        (b"Content-Encoding: gzip", [zlib.compress(b"0" * 50_000_000, wbits=31)], False),
        (b"Transfer-Encoding: chunked", [b"no chunk\r\n"], False),
        (b"Transfer-Encoding: chunked", [b"1\r\nx\r\n"], True),
    ],
    ids=["cut off", "trickles", "endless", "no gzip", "bomb", "no chunks", "endless chunks"],
)
@pytest.mark.parametrize("status", [200, 503])
def test_status_counts_whatever_the_body_is_and_no_more_of_it_is_kept_than_needed(
    status: int, headers: bytes, body: Sequence[bytes], endless: bool
) -> None:
    head = b"HTTP/1.1 %d Whatever\r\n%s\r\n\r\n" % (status, headers)
    with raw_receiver(head, body, endless=endless) as received:
        target = otlp_http_target(f"{received.endpoint}/v1/traces")
        tracemalloc.start()
        answer = target.send(SPANS)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        target.shutdown()
    assert answer.sent is (Sent.OK if status == 200 else Sent.RETRY)
    assert answer.code == ("" if status == 200 else "503")
    assert received.calls == 1
    assert most < 10_000_000
