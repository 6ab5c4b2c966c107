"""Which processes there are and how they are, from their heartbeats.

Owns the members' states; knows nothing of requests, sockets or which worker is best. A process that
starts again under the same name has another incarnation and is another worker. Times are seconds
on the monotonic clock, given by the caller.

    loading ─▶ ready ⇄ stalled          ready: beats, says what it serves, its loop goes round
       │         │        │             stalled: beats, has work, but its loop stands still
       ▼         ▼        ▼
     dead ◀── draining ◀──┘             dead: no heartbeat for `dead_after_s`, or its connection was
                 │                      lost and two heartbeats are missing; a beat revives it
                 ▼
               left                     left: its last heartbeat said that it stopped in order

A ready one is `suspect` from the moment at which somebody could not reach it, or it said that it is
leaving, until its next heartbeat: that one tells.

Whoever can reach the gateway's inbox may send a heartbeat. Processes that the server was not
started with are taken in (another host may have some), but do not stay: see `forget_strangers`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Set
from dataclasses import dataclass, field
from enum import StrEnum

from pdtrace.stages import Role
from server.gateway.pairing import Pair
from server.gateway.routing import ClusterSnapshot, WorkerSnapshot
from server.wire.messages import Heartbeat, Peer

MAX_STRANGERS = 64
"""Processes, other than those the server was started with, that are remembered at once."""
_REMEMBERED_INCARNATIONS = 256


class MemberState(StrEnum):
    READY = "ready"
    LOADING = "loading"
    DRAINING = "draining"
    STALLED = "stalled"
    SUSPECT = "suspect"
    INCOMPATIBLE = "incompatible"
    LEFT = "left"
    DEAD = "dead"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberReport:
    """One process at one instant.

    progress_age_s    seconds since its loop last went round, 0 while it is idle and beating
    heartbeat_age_s   seconds since its last heartbeat
    reason            why it is not ready, None when it is
    lacking           whether the server lacks it, as it is not ready: it did not leave on purpose,
                      and is one of those the server was started with or was ready once
    ignored           messages without effect since it started, as "why.Type"
    denied            connections that it did not let in since, by plane
    recorded          what it does is recorded
    """

    instance: str
    role: str
    state: MemberState
    progress_age_s: float
    heartbeat_age_s: float
    reason: str | None
    lacking: bool = False
    ignored: Mapping[str, int] = field(default_factory=dict[str, int])
    denied: Mapping[str, int] = field(default_factory=dict[str, int])
    recorded: bool = True


@dataclass(slots=True, kw_only=True)
class WorkerUse:
    """What this gateway has on a worker: the part of its load that heartbeats say too late.

    pending_tokens   prompt tokens whose first token has not come
    in_flight        requests
    promised_pages   KV pages those may take
    """

    pending_tokens: int = 0
    in_flight: int = 0
    promised_pages: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCapacity:
    """Tokens of one sequence that fit: its prompt while it is prefilled, all of it in decode.

    None where no live worker has said.
    """

    prompt_tokens: int | None
    total_tokens: int | None


@dataclass(slots=True)
class _Member:
    """What its last heartbeat said, and what happened since: the next one makes another record.

    served    it was ready once
    doubt     why it gets no work until then
    cut_off   it counts as dead, because its connection was lost
    """

    heartbeat: Heartbeat
    seen_s: float
    served: bool = False
    announced_dead: bool = False
    doubt: str | None = None
    cut_off: bool = False


class Registry:
    """Members by instance name.

    fingerprint       of the model this gateway tokenizes for: workers of another are no use
    num_transfers     transfer processes without which no generation is possible
    expected          names of the processes that the server was started with
    """

    def __init__(
        self,
        *,
        fingerprint: str,
        colocated: bool,
        num_transfers: int,
        dead_after_s: float,
        stalled_after_s: float,
        expected: Set[str],
    ) -> None:
        self._fingerprint = fingerprint
        self._colocated = colocated
        self._num_transfers = num_transfers
        self._dead_after_s = dead_after_s
        self._stalled_after_s = stalled_after_s
        self._expected = expected
        self._members: dict[str, _Member] = {}
        self._retired: deque[str] = deque(maxlen=_REMEMBERED_INCARNATIONS)

    def observe(self, heartbeat: Heartbeat, now_s: float) -> Peer | None:
        """Take in a heartbeat; returns the peer it replaces, if it is another incarnation.

        Beats that come late (an older number, a replaced incarnation) change nothing. One that
        was replaced and goes on while its successor is silent was called so wrongly.
        """
        peer = heartbeat.peer
        known = self._members.get(peer.instance)
        if peer.incarnation in self._retired:
            if known is None or not self._is_dead(known, now_s):
                return None
            self._retired.remove(peer.incarnation)
        replaced: Peer | None = None
        if known is not None:
            if known.heartbeat.peer.incarnation != peer.incarnation:
                replaced = known.heartbeat.peer
                self._retired.append(replaced.incarnation)
            elif heartbeat.seq <= known.heartbeat.seq:
                return None
        member = _Member(heartbeat, now_s)
        ready = self._state(member, now_s)[0] is MemberState.READY
        member.served = ready or (known is not None and replaced is None and known.served)
        self._members[peer.instance] = member
        return replaced

    def has_left(self, peer: Peer) -> bool:
        """Whether the last that was heard of `peer` is that it stopped in order."""
        member = self._members.get(peer.instance)
        return member is not None and member.heartbeat.peer == peer and member.heartbeat.leaving

    def newly_dead(self, now_s: float) -> list[Peer]:
        """Peers that died since the last call: each death is told once."""
        dead: list[Peer] = []
        for member in self._members.values():
            if not member.announced_dead and self._is_dead(member, now_s):
                member.announced_dead = True
                dead.append(member.heartbeat.peer)
        return dead

    def forget_strangers(self, silent_s: float, now_s: float) -> list[MemberReport]:
        """Drop those whom the server was not started with and that are silent for `silent_s`, and
        the most silent of them beyond MAX_STRANGERS; their last reports."""
        strangers = sorted(
            (member for name, member in self._members.items() if name not in self._expected),
            key=lambda member: member.seen_s,
        )
        beyond = len(strangers) - MAX_STRANGERS
        dropped = [
            member
            for number, member in enumerate(strangers)
            if number < beyond or now_s - member.seen_s > silent_s
        ]
        for member in dropped:
            del self._members[member.heartbeat.peer.instance]
        return [self._report(member, now_s) for member in dropped]

    def cut_off(self, is_lost: Callable[[Peer], bool], silent_s: float, now_s: float) -> None:
        """Take those for dead to whom the connection `is_lost`, and that are silent for `silent_s`.

        A connection alone says little, as it may be made again; a beat that is late says little.
        """
        for member in self._members.values():
            silent = now_s - member.seen_s > silent_s
            if silent and not member.cut_off and is_lost(member.heartbeat.peer):
                member.cut_off = True

    def doubt(self, incarnation: str, reason: str) -> None:
        """Give a member no work until it is heard of again."""
        for member in self._members.values():
            if member.heartbeat.peer.incarnation == incarnation:
                member.doubt = reason

    def doubt_transfers(self, reason: str) -> None:
        """The same for every transfer process."""
        for member in self._members.values():
            if member.heartbeat.role == Role.TRANSFER:
                member.doubt = reason

    def latest_beat(self, incarnation: str) -> int:
        """Number of the latest heartbeat of a member; 0 for one that was never heard of."""
        return max(
            (
                member.heartbeat.seq
                for member in self._members.values()
                if member.heartbeat.peer.incarnation == incarnation
            ),
            default=0,
        )

    def peers(self) -> list[Peer]:
        """Everybody heard of, dead or alive."""
        return [member.heartbeat.peer for member in self._members.values()]

    def excuse(self, seconds: float, now_s: float) -> None:
        """This gateway itself stood still for `seconds`: nobody's silence in that time counts."""
        for member in self._members.values():
            member.seen_s = min(now_s, member.seen_s + seconds)

    def reports(self, now_s: float) -> list[MemberReport]:
        """All members, in order of name."""
        return [self._report(member, now_s) for _, member in sorted(self._members.items())]

    def snapshot(
        self, now_s: float, use: Mapping[str, WorkerUse], refused: Collection[Pair] = frozenset()
    ) -> ClusterSnapshot:
        """Workers that may be given work; none while a transfer process is missing.

        use       what this gateway has on each incarnation
        refused   pairings that a handshake refused
        """
        ready = [
            member
            for member in self._members.values()
            if self._state(member, now_s)[0] is MemberState.READY
        ]
        if sum(member.heartbeat.role == Role.TRANSFER for member in ready) < self._num_transfers:
            ready = []
        by_role = {
            role: tuple(
                _snapshot(member.heartbeat, use.get(member.heartbeat.peer.incarnation))
                for member in ready
                if member.heartbeat.role == role
            )
            for role in (Role.PREFILL, Role.DECODE, Role.WORKER)
        }
        if self._colocated:
            workers = by_role[Role.WORKER]
            return ClusterSnapshot(prefill=workers, decode=workers, colocated=True)
        return ClusterSnapshot(
            prefill=by_role[Role.PREFILL], decode=by_role[Role.DECODE], refused=refused
        )

    def kv_capacity(self, now_s: float) -> KvCapacity:
        """What the largest pool of each role holds; dead workers do not count."""
        tokens: dict[str, int] = {}
        for member in self._members.values():
            beat = member.heartbeat
            if beat.layout is None or beat.leaving or self._is_dead(member, now_s):
                continue
            held = beat.load.pages_total * beat.layout.page_size
            tokens[beat.role] = max(held, tokens.get(beat.role, 0))
        if self._colocated:
            held = tokens.get(Role.WORKER) or None
            return KvCapacity(prompt_tokens=held, total_tokens=held)
        return KvCapacity(
            prompt_tokens=tokens.get(Role.PREFILL) or None,
            total_tokens=tokens.get(Role.DECODE) or None,
        )

    def _report(self, member: _Member, now_s: float) -> MemberReport:
        state, reason = self._state(member, now_s)
        return MemberReport(
            instance=member.heartbeat.peer.instance,
            role=member.heartbeat.role,
            state=state,
            progress_age_s=self._progress_age_s(member, now_s),
            heartbeat_age_s=max(0.0, now_s - member.seen_s),
            reason=reason,
            lacking=(
                state not in (MemberState.READY, MemberState.LEFT)
                and (member.served or member.heartbeat.peer.instance in self._expected)
            ),
            ignored=member.heartbeat.ignored,
            denied=member.heartbeat.denied,
            recorded=not member.heartbeat.unrecorded,
        )

    def _progress_age_s(self, member: _Member, now_s: float) -> float:
        """An idle loop that beats is as fresh as its heartbeat is due."""
        silent_s = max(0.0, now_s - member.seen_s)
        beat = member.heartbeat
        if beat.busy or self._is_dead(member, now_s):
            return beat.progress_age_s + silent_s
        return beat.progress_age_s

    def _is_dead(self, member: _Member, now_s: float) -> bool:
        return member.cut_off or now_s - member.seen_s > self._dead_after_s

    def _state(self, member: _Member, now_s: float) -> tuple[MemberState, str | None]:
        beat = member.heartbeat
        if beat.leaving:
            return MemberState.LEFT, "stopped when it was told to"
        if self._is_dead(member, now_s):
            how = "connection lost, and " if member.cut_off else ""
            return MemberState.DEAD, f"{how}no heartbeat for {now_s - member.seen_s:.1f} s"
        if beat.draining:
            return MemberState.DRAINING, "is shutting down"
        age_s = self._progress_age_s(member, now_s)
        if beat.busy and age_s > self._stalled_after_s:
            return MemberState.STALLED, f"has work but made no progress for {age_s:.1f} s"
        if member.doubt is not None:
            return MemberState.SUSPECT, f"{member.doubt}, not heard of since"
        if beat.role == Role.TRANSFER:
            return MemberState.READY, None
        if beat.info is None or beat.layout is None:
            return MemberState.LOADING, "has not loaded its model"
        if beat.info.fingerprint != self._fingerprint:
            return (
                MemberState.INCOMPATIBLE,
                f"serves model {beat.info.name} ({beat.info.fingerprint[:12]}), "
                f"this gateway tokenizes for {self._fingerprint[:12]}",
            )
        return MemberState.READY, None


def _snapshot(beat: Heartbeat, use: WorkerUse | None) -> WorkerSnapshot:
    assert beat.info is not None
    assert beat.layout is not None
    use = use or WorkerUse()
    return WorkerSnapshot(
        peer=beat.peer,
        fingerprint=beat.info.fingerprint,
        layout=beat.layout,
        load=beat.load,
        pending_tokens=use.pending_tokens,
        in_flight=use.in_flight,
        promised_pages=use.promised_pages,
    )
