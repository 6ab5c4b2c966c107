"""What a recording is known to lack, ring by ring, over all agents that read it.

Owns the totals and how they are kept up (`LossBook`); they stand in the agent's state file, so a
restart adds to them, and `read_losses` reads them back for `pdtrace check` and `why`. Knows nothing
of which request lacks what: that is `pd.incomplete` on its root.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from pathlib import Path

import msgspec

from pdtrace.ring.layout import Counter, RingIdentity

STATE_NAME = "agent-state.json"
"""The agent's state file in a run directory."""

MAX_OPEN_IDS = 16
"""Request ids kept of a ring whose writer ended with requests open; all of them are counted."""

MAX_GONE = 64
"""Rings listed one by one after their file is gone; older ones are added up per instance."""

MAX_COUNT = 2**53
"""A process that counts a million a second gets there in 285 years."""

_HEADER = {
    "dropped": Counter.DROPPED,
    "errors": Counter.ERRORS,
    "truncated": Counter.TRUNCATED,
    "shed_steps": Counter.SHED_STEPS,
    "shed_waits": Counter.SHED_WAITS,
    "shed_attributes": Counter.SHED_ATTRIBUTES,
}
KINDS = ("missed", "torn", "unknown", *_HEADER)
"""Fields of `RingLosses` that count records or strings."""

_WORDS = {
    "missed": "records overwritten before they were read",
    "torn": "records damaged",
    "unknown": "records of kinds that this version does not know",
    "dropped": "records that could not be written",
    "errors": "recording calls that failed",
    "truncated": "strings cut",
    "shed_steps": "steps left out to keep within the recording budget",
    "shed_waits": "waits left out to keep within the recording budget",
    "shed_attributes": "marks without their attributes to keep within the recording budget",
}


class WriterEnd(StrEnum):
    """How the process that wrote a ring ended."""

    CLOSED = "closed"  # it said so
    LOST = "lost"  # killed, or gone without a word


class RingLosses(msgspec.Struct, frozen=True, kw_only=True):
    """What one ring is known to lack, and how its writer ended. Totals.

    missed           records overwritten before they were read
    torn             records found damaged
    unknown          intact records of kinds that this version does not know
    dropped          records that its recorder could not write
    errors           recording calls that failed, and were swallowed
    truncated        strings cut
    shed_*           left out by the recorder to keep within its budget (`pdtrace.ring.Counter`)
    unreadable       why it could not be read, or not to its end; None where it could
    ended            None while its writer lives
    ended_unix_ns    when that was noticed
    open_requests    requests that its writer had open then; `open_ids` names the first of them
    """

    made_ns: int = 0
    role: str = ""
    instance: str = ""
    pid: int = 0
    host_id: str = ""
    missed: int = 0
    torn: int = 0
    unknown: int = 0
    dropped: int = 0
    errors: int = 0
    truncated: int = 0
    shed_steps: int = 0
    shed_waits: int = 0
    shed_attributes: int = 0
    unreadable: str | None = None
    ended: WriterEnd | None = None
    ended_unix_ns: int | None = None
    open_requests: int = 0
    open_ids: tuple[str, ...] = ()

    def counts(self) -> dict[str, int]:
        """The losses by kind (`KINDS`)."""
        return {kind: getattr(self, kind) for kind in KINDS}


class Losses(msgspec.Struct, frozen=True, kw_only=True):
    """All of a run's losses.

    rings      by file name, also of files that are gone
    earlier    rings beyond the last `MAX_GONE` gone ones, added up by instance
    requests   finished requests, and of these how many are `incomplete`
    late       marks that came for requests that were finished already
    unnamed    marks whose request is not known
    evicted    requests given up because too many were open
    overgrown  marks left out of requests with too many
    faults     requests that cost pdtrace an error of its own: no spans, or no verdict
    lines_lost     requests that could not be written to the files
    spans_dropped  spans that no exporter will send
    problem    why these totals could not be read; None where they could
    """

    rings: dict[str, RingLosses] = {}
    earlier: dict[str, RingLosses] = {}
    requests: int = 0
    incomplete: int = 0
    late: int = 0
    unnamed: int = 0
    evicted: int = 0
    overgrown: int = 0
    faults: int = 0
    lines_lost: int = 0
    spans_dropped: int = 0
    problem: str | None = None

    def by_instance(self) -> dict[tuple[str, str], dict[str, int]]:
        """Losses by (role, instance) and kind; every recording process is there, with zeros too."""
        totals: dict[tuple[str, str], dict[str, int]] = {}
        for losses in (*self.earlier.values(), *self.rings.values()):
            if not losses.instance:
                continue  # a file that could not be opened: nobody knows whose it is
            kinds = totals.setdefault((losses.role, losses.instance), dict.fromkeys(KINDS, 0))
            for kind, count in losses.counts().items():
                kinds[kind] += count
        return totals

    def sentences(self) -> list[str]:
        """What is lost, for people: one sentence per ring that lacks something, then the rest."""
        found: list[str] = []
        for name, ring in self.rings.items():
            if ring.unreadable is not None:
                found.append(f"{name}: {ring.unreadable}")
        for (_, instance), kinds in self.by_instance().items():
            counts = [f"{count} {_WORDS[kind]}" for kind, count in kinds.items() if count]
            if counts:
                found.append(f"{instance}: {', '.join(counts)}")
        for count, words in (
            (self.unnamed, "marks whose request is not known"),
            (self.evicted, "requests given up because too many were open"),
            (self.overgrown, "marks left out of requests with too many of them"),
            (self.faults, "requests that a fault of pdtrace cost their spans or verdict"),
            (self.lines_lost, "requests that could not be written to the files"),
            (self.spans_dropped, "spans that no exporter sends"),
        ):
            if count:
                found.append(f"{count} {words}")
        if self.problem is not None:
            found.append(self.problem)
        return found


class LossBook:
    """The running totals per ring. Not thread-safe."""

    def __init__(self, former: Losses | None = None) -> None:
        self._former = Losses() if former is None else former
        self._rings = dict(self._former.rings)
        self._earlier = dict(self._former.earlier)

    def begin(self, name: str, identity: RingIdentity) -> None:
        """A ring is read: from its begin, or on from where a former agent stopped."""
        made_ns = identity.anchor.wall_ns
        known = self._rings.get(name)
        if known is not None and known.made_ns == made_ns:
            self._rings[name] = msgspec.structs.replace(known, unreadable=None)
            return
        self._add_up(name)
        self._rings[name] = RingLosses(
            made_ns=made_ns,
            role=identity.role.value,
            instance=identity.instance,
            pid=identity.pid,
            host_id=identity.host_id,
        )

    def count(self, name: str, *, missed: int = 0, torn: int = 0, unknown: int = 0) -> None:
        """Adds what reading a ring has found to be lost."""
        known = self._rings[name]
        self._rings[name] = msgspec.structs.replace(
            known,
            missed=known.missed + missed,
            torn=known.torn + torn,
            unknown=known.unknown + unknown,
        )

    def header(self, name: str, counters: Mapping[Counter, int]) -> None:
        """Takes over what the ring's own header counts, unless nobody can have counted so far."""
        known = self._rings[name]
        counts = {kind: counters.get(counter, 0) for kind, counter in _HEADER.items()}
        wrong = next((kind for kind, count in counts.items() if count > MAX_COUNT), None)
        if wrong is not None:
            why = f"its header is damaged: it counts {counts[wrong]} {_WORDS[wrong]}"
            self._rings[name] = msgspec.structs.replace(known, unreadable=why)
            return
        if any(getattr(known, kind) != count for kind, count in counts.items()):
            self._rings[name] = msgspec.structs.replace(known, **counts)

    def ended(self, name: str, end: WriterEnd, unix_ns: int, open_ids: Sequence[str]) -> None:
        """The writer of a ring is gone, and had these requests open. Said once: an agent that reads
        the ring's end again knows less."""
        known = self._rings[name]
        if known.ended is not None:
            return
        self._rings[name] = msgspec.structs.replace(
            known,
            ended=end,
            ended_unix_ns=unix_ns,
            open_requests=len(open_ids),
            open_ids=tuple(open_ids[:MAX_OPEN_IDS]),
        )

    def unreadable(self, name: str, why: str) -> None:
        """A ring cannot be read, or not further."""
        known = self._rings.get(name, RingLosses())
        self._rings[name] = msgspec.structs.replace(known, unreadable=why)

    def is_unreadable(self, name: str) -> bool:
        """Whether a ring holds what nobody has read."""
        known = self._rings.get(name)
        return known is not None and known.unreadable is not None

    def tidy(self, present: Collection[str]) -> None:
        """Adds up the oldest of those whose files are gone, so that the totals stay small."""
        gone = [name for name in self._rings if name not in present]
        for name in gone[: max(0, len(gone) - MAX_GONE)]:
            self._add_up(name)

    def losses(self, **totals: int) -> Losses:
        """The totals, to which this agent's own `totals` (fields of `Losses`) are added."""
        former = self._former
        return Losses(
            rings=dict(self._rings),
            earlier=dict(self._earlier),
            **{name: getattr(former, name) + count for name, count in totals.items()},
        )

    def _add_up(self, name: str) -> None:
        losses = self._rings.pop(name, None)
        if losses is None or not losses.instance:
            return
        known = self._earlier.get(losses.instance)
        if known is None:
            known = RingLosses(role=losses.role, instance=losses.instance)
        sums = {kind: count + getattr(known, kind) for kind, count in losses.counts().items()}
        self._earlier[losses.instance] = msgspec.structs.replace(
            known,
            role=losses.role,
            open_requests=known.open_requests + losses.open_requests,
            **sums,
        )


class _Kept(msgspec.Struct, frozen=True):
    losses: Losses = Losses()


def read_losses(run_dir: str | Path) -> Losses:
    """The losses that the agent of a run directory has written down. Never raises.

    A run without an agent, or with a state that cannot be read, has a `problem` and no totals.
    """
    path = Path(run_dir) / STATE_NAME
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Kept).losses
    except FileNotFoundError:
        return Losses(problem=f"no agent has written {path}: losses are not known")
    except OSError as error:
        return Losses(problem=f"{path} cannot be read ({error.strerror}): losses are not known")
    except msgspec.MsgspecError as error:
        return Losses(problem=f"{path} is damaged ({error}): losses are not known")
