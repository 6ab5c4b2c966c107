"""Which prefill and decode workers do not fit together, and why. Pure but for its memory.

Owns the comparison of what two workers say of themselves, and the pairings that a handshake refused
although that looked right. A pairing is one of incarnations: a worker that starts again has a clean
record.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from server.kv.layout import KvLayout
from server.wire.messages import Peer

MAX_REMEMBERED = 1024
"""Refused pairings kept; the oldest are forgotten, and found out again if need be."""

Pair = tuple[str, str]
"""Incarnations of a prefill and a decode worker."""


class Side(Protocol):
    """What a worker says of itself."""

    @property
    def peer(self) -> Peer: ...

    @property
    def fingerprint(self) -> str: ...

    @property
    def layout(self) -> KvLayout: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A pairing that is not to be chosen. `reason` names both values."""

    prefill: str
    decode: str
    reason: str

    @property
    def sentence(self) -> str:
        return f"{self.prefill} with {self.decode}: {self.reason}"


def pair_of(prefill: Side, decode: Side) -> Pair:
    return prefill.peer.incarnation, decode.peer.incarnation


def conflict_of(prefill: Side, decode: Side) -> str | None:
    """What the two say that does not fit, with both values; None if nothing."""
    if prefill.fingerprint != decode.fingerprint:
        return f"model fingerprint {prefill.fingerprint[:16]} against {decode.fingerprint[:16]}"
    if prefill.layout != decode.layout:
        differing = ", ".join(
            f"{name} {getattr(prefill.layout, name)} against {getattr(decode.layout, name)}"
            for name in KvLayout.__struct_fields__
            if getattr(prefill.layout, name) != getattr(decode.layout, name)
        )
        return f"KV layout: {differing}"
    return None


class RefusedPairs:
    """Pairings that a handshake refused, until one of the two starts again."""

    def __init__(self) -> None:
        self._refused: OrderedDict[Pair, Refusal] = OrderedDict()

    def __len__(self) -> int:
        return len(self._refused)

    @property
    def reasons(self) -> Mapping[Pair, Refusal]:
        return self._refused

    def add(self, prefill: Peer, decode: Peer, reason: str) -> None:
        """`reason` is the handshake's own sentence."""
        self._refused[prefill.incarnation, decode.incarnation] = Refusal(
            prefill=prefill.instance, decode=decode.instance, reason=reason
        )
        while len(self._refused) > MAX_REMEMBERED:
            self._refused.popitem(last=False)

    def forget(self, incarnation: str) -> None:
        """A worker is gone for good."""
        for pair in [pair for pair in self._refused if incarnation in pair]:
            del self._refused[pair]
