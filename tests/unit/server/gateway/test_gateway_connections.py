"""The table of clients' connections: who gets a place, who gives one up, what is counted."""

from __future__ import annotations

import resource
from dataclasses import dataclass

import pytest
from prometheus_client import CollectorRegistry

from server.gateway.connections import (
    FILES_APART,
    HEAD_GRACE_S,
    REFUSALS_AT_ONCE,
    Connections,
    End,
    affordable,
)


@dataclass(eq=False)
class FakeConnection:
    """`without_request_since` None: a request is in progress."""

    without_request_since: float | None = None
    is_idle: bool = True
    evicted: bool = False

    def evict(self) -> None:
        self.evicted = True


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def ends(registry: CollectorRegistry, reason: End) -> float | None:
    return registry.get_sample_value("pd_gateway_connections_ended_total", {"reason": reason})


def test_those_within_the_limit_get_a_place_each(registry: CollectorRegistry) -> None:
    table = Connections(2, registry)
    first, second = FakeConnection(), FakeConnection()
    assert table.open(first, 0.0)
    assert table.open(second, 0.0)
    assert len(table) == registry.get_sample_value("pd_gateway_connections") == 2
    assert registry.get_sample_value("pd_gateway_connections_limit") == 2
    table.close(first)
    table.close(first)  # idempotent
    assert len(table) == 1


def test_the_longest_idle_one_makes_room(registry: CollectorRegistry) -> None:
    table = Connections(3, registry)
    busy, longest, lately = FakeConnection(), FakeConnection(1.0), FakeConnection(5.0)
    for connection in (busy, longest, lately):
        assert table.open(connection, 5.0)
    assert table.open(FakeConnection(), 6.0)
    assert [each.evicted for each in (busy, longest, lately)] == [False, True, False]
    assert len(table) == 3
    assert ends(registry, End.EVICTED) == 1


def test_one_that_is_sending_its_head_has_a_moment_of_grace(registry: CollectorRegistry) -> None:
    table = Connections(1, registry)
    sending = FakeConnection(without_request_since=10.0, is_idle=False)
    assert table.open(sending, 10.0)
    assert not table.open(FakeConnection(), 10.0 + HEAD_GRACE_S / 2)
    assert ends(registry, End.TOO_MANY) == 1
    assert table.open(FakeConnection(), 10.0 + HEAD_GRACE_S)
    assert sending.evicted


def test_nobody_with_a_request_is_put_out(registry: CollectorRegistry) -> None:
    table = Connections(2, registry)
    busy = [FakeConnection(), FakeConnection()]
    for connection in busy:
        table.open(connection, 0.0)
    assert not table.open(FakeConnection(), 1e9)
    assert not any(connection.evicted for connection in busy)


def test_so_many_at_a_time_are_told_that_they_are_refused(registry: CollectorRegistry) -> None:
    table = Connections(1, registry)
    refused = [FakeConnection() for _ in range(REFUSALS_AT_ONCE)]
    assert all(table.may_tell(connection) for connection in refused)
    assert not table.may_tell(FakeConnection())
    table.close(refused[0])
    assert table.may_tell(FakeConnection())
    assert len(table) == 0


def test_every_reason_is_a_series_from_the_start(registry: CollectorRegistry) -> None:
    Connections(1, registry)
    assert [ends(registry, reason) for reason in End] == [0] * len(End)


@pytest.mark.parametrize(
    ("soft", "hard", "raised", "allowed"),
    [
        (100_000, 100_000, None, 1000),  # enough already
        (256, 100_000, 1000 + REFUSALS_AT_ONCE + FILES_APART, 1000),
        (256, resource.RLIM_INFINITY, 1000 + REFUSALS_AT_ONCE + FILES_APART, 1000),
        (256, 512, 512, 512 - REFUSALS_AT_ONCE - FILES_APART),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, None, 1000),
        (16, 16, 16, 1),  # one at least
    ],
)
def test_open_files_bound_the_connections(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, raised: int | None, allowed: int
) -> None:
    limits = [(soft, hard)]

    def read(_kind: int) -> tuple[int, int]:
        return limits[-1]

    def write(_kind: int, new: tuple[int, int]) -> None:
        limits.append(new)

    monkeypatch.setattr(resource, "getrlimit", read)
    monkeypatch.setattr(resource, "setrlimit", write)
    assert affordable(1000) == allowed
    assert limits[1:] == ([] if raised is None else [(raised, hard)])


def test_limit_that_cannot_be_raised_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_kind: int, _new: tuple[int, int]) -> None:
        raise ValueError("not allowed to raise maximum limit")

    def few(_kind: int) -> tuple[int, int]:
        return 300, 100_000

    monkeypatch.setattr(resource, "getrlimit", few)
    monkeypatch.setattr(resource, "setrlimit", refuse)
    assert affordable(1000) == 300 - REFUSALS_AT_ONCE - FILES_APART
    assert "cannot be raised" in caplog.text
    assert "108 connections are allowed in place of 1000" in caplog.text
