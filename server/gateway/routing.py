"""Which prefill and which decode worker serve a request. Pure: a snapshot in, a choice out.

Owns the policies; knows nothing of heartbeats, sockets or time. `RouterState` keeps the little that
they remember between requests: whose turn it is, and which prompts each prefill worker has seen.

Costs are tokens, so that "how busy" and "how much of the prompt is cached" add up: a prefill
worker's cost is the prompt tokens it still has to compute, this request's included. That is also
how `prefix_aware` gives way under skew: a cached prefix is worth its own length, not more.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from server.gateway.pairing import Pair, Refusal, conflict_of, pair_of
from server.kv.layout import KvLayout
from server.wire.messages import Peer, WorkerLoad

MAX_INDEXED_PAGES = 65_536
"""Page hashes remembered per prefill worker; the least recently used are forgotten."""

_HASH_BYTES = 8


class Policy(StrEnum):
    """`--policy`."""

    ROUND_ROBIN = "round_robin"
    LEAST_LOADED = "least_loaded"
    PREFIX_AWARE = "prefix_aware"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSnapshot:
    """A worker that may be given work, at one instant.

    load              what its last heartbeat said
    pending_tokens    prompt tokens sent to it by this gateway whose first token has not come
    in_flight         requests that this gateway has on it
    promised_pages    pages those will take at most, or `load.pages_total` where that is less
    """

    peer: Peer
    fingerprint: str
    layout: KvLayout
    load: WorkerLoad
    pending_tokens: int = 0
    in_flight: int = 0
    promised_pages: int = 0

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens ahead of a further request. Heartbeats lag, the gateway's own count not."""
        return max(self.load.queued_tokens, self.pending_tokens)

    @property
    def page_pressure(self) -> float:
        """Share of its pages that is used or promised, 0 to 1."""
        total = self.load.pages_total
        if total == 0:
            return 0.0
        return min(1.0, max(total - self.load.pages_free, self.promised_pages) / total)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSnapshot:
    """Workers that may be given work. Colocated workers are both `prefill` and `decode`.

    refused   pairings that a handshake refused, as incarnations
    """

    prefill: tuple[WorkerSnapshot, ...]
    decode: tuple[WorkerSnapshot, ...]
    colocated: bool = False
    refused: Collection[Pair] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteRequest:
    """What routing looks at in a request.

    avoid       incarnations on which an attempt before failed: chosen where there is nobody else
    elsewhere   not even then
    """

    prompt_ids: Sequence[int]
    max_tokens: int
    avoid: frozenset[str] = frozenset()
    elsewhere: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PairChoice:
    """The pair, why, and out of how many. Colocated: both are the same worker."""

    prefill: WorkerSnapshot
    decode: WorkerSnapshot
    reason: str
    candidates: int


class PrefixIndex:
    """Which pages of which prompts a worker has computed, as chained hashes; bounded.

    A guess of what its prefix cache holds: the worker may have evicted a page that is known here.
    """

    def __init__(self, max_pages: int = MAX_INDEXED_PAGES) -> None:
        self._max_pages = max_pages
        self._pages: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pages)

    def matched_pages(self, hashes: Sequence[bytes]) -> int:
        """Leading pages of `hashes` that are known."""
        for index, page in enumerate(hashes):
            if page not in self._pages:
                return index
        return len(hashes)

    def add(self, hashes: Sequence[bytes]) -> None:
        # The front of a prompt is used last, so that it is forgotten last: a tail without its
        # front can never match.
        for page in reversed(hashes):
            self._pages[page] = None
            self._pages.move_to_end(page)
        while len(self._pages) > self._max_pages:
            self._pages.popitem(last=False)


def page_hashes(token_ids: Sequence[int], page_size: int) -> list[bytes]:
    """A hash per whole page of `token_ids`, each covering everything before it too."""
    hashes: list[bytes] = []
    chain = hashlib.blake2b(digest_size=_HASH_BYTES)
    for start in range(0, len(token_ids) - page_size + 1, page_size):
        chain.update(array("q", token_ids[start : start + page_size]).tobytes())
        hashes.append(chain.digest())
    return hashes


@dataclass(slots=True)
class RouterState:
    """What the policies remember.

    turn       requests routed so far
    prefixes   per incarnation of a prefill worker: a restarted one has an empty cache
    """

    turn: int = 0
    prefixes: dict[str, PrefixIndex] = field(default_factory=dict[str, PrefixIndex])

    def record(self, choice: PairChoice, request: RouteRequest, policy: Policy) -> None:
        """Remember that `request` goes to `choice`."""
        self.turn += 1
        if policy is Policy.PREFIX_AWARE:
            worker = choice.prefill
            index = self.prefixes.setdefault(worker.peer.incarnation, PrefixIndex())
            index.add(page_hashes(request.prompt_ids, worker.layout.page_size))

    def forget(self, incarnation: str) -> None:
        """Drop what is known of a worker that is gone."""
        self.prefixes.pop(incarnation, None)


def choose_pair(
    cluster: ClusterSnapshot, request: RouteRequest, policy: Policy, state: RouterState
) -> PairChoice | None:
    """The pair for `request`, or None when no two workers fit together and hold it. Changes
    nothing."""
    pairs = _for_request(_compatible(cluster), request)
    if not pairs:
        return None
    candidates = sum(len(decodes) for _, decodes in pairs)
    if policy is Policy.ROUND_ROBIN:
        prefill, decode = _round_robin(pairs, state.turn)
        return PairChoice(
            prefill=prefill, decode=decode, reason=f"turn {state.turn}", candidates=candidates
        )
    position, reason = _cheapest_prefill(pairs, request, policy, state)
    prefill, decodes = pairs[position]
    if cluster.colocated:
        return PairChoice(prefill=prefill, decode=prefill, reason=reason, candidates=candidates)
    decode, why = _roomiest_decode(decodes, request, state.turn)
    return PairChoice(
        prefill=prefill, decode=decode, reason=f"{reason}; {why}", candidates=candidates
    )


def count_pairs(cluster: ClusterSnapshot) -> int:
    """Pairs of workers that fit together."""
    return sum(len(decodes) for _, decodes in _compatible(cluster))


def refusals(cluster: ClusterSnapshot, known: Mapping[Pair, Refusal]) -> list[Refusal]:
    """Pairs of workers that do not fit together, in order of name.

    known   why a handshake refused those that look as if they did
    """
    if cluster.colocated:
        return []
    found: list[Refusal] = []
    for prefill in _by_name(cluster.prefill):
        for decode in _by_name(cluster.decode):
            conflict = conflict_of(prefill, decode)
            refusal = known.get(pair_of(prefill, decode))
            if conflict is not None:
                refusal = Refusal(
                    prefill=prefill.peer.instance, decode=decode.peer.instance, reason=conflict
                )
            if refusal is not None:
                found.append(refusal)
    return found


def misfits(cluster: ClusterSnapshot, known: Mapping[Pair, Refusal]) -> dict[str, Refusal]:
    """Workers that fit nobody who is there, by name, each with one of the reasons."""
    paired = {
        worker.peer.instance
        for prefill, decodes in _compatible(cluster)
        for worker in (prefill, *decodes)
    }
    found: dict[str, Refusal] = {}
    for refusal in refusals(cluster, known):
        for name in (refusal.prefill, refusal.decode):
            if name not in paired:
                found.setdefault(name, refusal)
    return found


_Pairs = list[tuple[WorkerSnapshot, list[WorkerSnapshot]]]


def _compatible(cluster: ClusterSnapshot) -> _Pairs:
    """Each prefill worker with the decode workers that can take its KV; both in order of name."""
    if cluster.colocated:
        return [(worker, [worker]) for worker in _by_name(cluster.prefill)]
    decodes = _by_name(cluster.decode)
    pairs = [
        (
            prefill,
            [
                decode
                for decode in decodes
                if pair_of(prefill, decode) not in cluster.refused
                and conflict_of(prefill, decode) is None
            ],
        )
        for prefill in _by_name(cluster.prefill)
    ]
    return [(prefill, matching) for prefill, matching in pairs if matching]


def _for_request(pairs: _Pairs, request: RouteRequest) -> _Pairs:
    """Those that can hold all of the request, and of them the ones least to be avoided."""
    found = _filtered(pairs, lambda prefill, decode: _holds(prefill, decode, request))
    if not request.avoid:
        return found

    def avoided(prefill: WorkerSnapshot, decode: WorkerSnapshot) -> int:
        return len(request.avoid & {prefill.peer.incarnation, decode.peer.incarnation})

    fewest = min((avoided(p, d) for p, decodes in found for d in decodes), default=0)
    if fewest and request.elsewhere:
        return []
    return _filtered(found, lambda prefill, decode: avoided(prefill, decode) == fewest)


def _filtered(pairs: _Pairs, keep: Callable[[WorkerSnapshot, WorkerSnapshot], bool]) -> _Pairs:
    kept = [
        (prefill, [decode for decode in decodes if keep(prefill, decode)])
        for prefill, decodes in pairs
    ]
    return [(prefill, decodes) for prefill, decodes in kept if decodes]


def _holds(prefill: WorkerSnapshot, decode: WorkerSnapshot, request: RouteRequest) -> bool:
    """Whether the pools are large enough, were they empty. A pool of no known size is."""
    prompt_len = len(request.prompt_ids)
    longest = prompt_len + request.max_tokens - 1  # the last token's KV is never written
    return all(
        worker.load.pages_total == 0 or worker.layout.pages_for(length) <= worker.load.pages_total
        for worker, length in ((prefill, prompt_len), (decode, longest))
    )


def _by_name(workers: Sequence[WorkerSnapshot]) -> list[WorkerSnapshot]:
    return sorted(workers, key=lambda worker: worker.peer.instance)


def _round_robin(pairs: _Pairs, turn: int) -> tuple[WorkerSnapshot, WorkerSnapshot]:
    """Both roles advance each turn; after every full round decode shifts, so all pairs occur."""
    prefill, decodes = pairs[turn % len(pairs)]
    rounds = turn // math.lcm(len(pairs), len(decodes))
    return prefill, decodes[(turn + rounds) % len(decodes)]


def _rank(position: int, count: int, turn: int) -> int:
    """Breaks ties in turn, so that equal workers share the work."""
    return (position - turn) % count


def _cheapest_prefill(
    pairs: _Pairs, request: RouteRequest, policy: Policy, state: RouterState
) -> tuple[int, str]:
    """Position of the prefill worker with the fewest tokens to compute until this one is done."""
    count = len(pairs)
    cached = [0] * count
    if policy is Policy.PREFIX_AWARE:
        cached = [_cached_tokens(worker, request, state) for worker, _ in pairs]

    def cost(position: int) -> tuple[int, int]:
        queued = pairs[position][0].queued_tokens
        return queued - cached[position], _rank(position, count, state.turn)

    best = min(range(count), key=cost)
    queued = pairs[best][0].queued_tokens
    reason = f"{queued} tokens queued"
    most_cached = max(cached)
    if cached[best]:
        reason = f"{cached[best]} prompt tokens cached, {reason}"
    elif most_cached:
        busy = pairs[cached.index(most_cached)][0]
        reason = (
            f"{reason} (prefix of {most_cached} on {busy.peer.instance} "
            f"is behind {busy.queued_tokens})"
        )
    return best, reason


def _cached_tokens(worker: WorkerSnapshot, request: RouteRequest, state: RouterState) -> int:
    index = state.prefixes.get(worker.peer.incarnation)
    if index is None:
        return 0
    page_size = worker.layout.page_size
    return page_size * index.matched_pages(page_hashes(request.prompt_ids, page_size))


def _roomiest_decode(
    decodes: Sequence[WorkerSnapshot], request: RouteRequest, turn: int
) -> tuple[WorkerSnapshot, str]:
    """A worker with room for the prompt if there is one, then the one under least pressure."""

    def key(position: int) -> tuple[bool, float, int, int]:
        worker = decodes[position]
        needed = worker.layout.pages_for(len(request.prompt_ids))
        room = worker.load.pages_total * (1 - worker.page_pressure)
        return (
            needed > room,
            worker.page_pressure,
            worker.in_flight + worker.load.waiting,
            _rank(position, len(decodes), turn),
        )

    best = decodes[min(range(len(decodes)), key=key)]
    return best, f"{best.page_pressure:.0%} of pages taken, {best.in_flight} requests"
