"""Which requests waited because the gateway's own process stood still, said in their traces.

Owns in which of the gateway's stages a request is, and what was told of it; `server.standstill`
knows when the process stood still. What happens elsewhere meanwhile is for others to tell: only the
first token and the end of the answer then wait for the gateway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from pdtrace.stages import WaitReason
from server.gateway.call import Call
from server.gateway.now import Now
from server.pauses import never_paused
from server.standstill import Pause, Standstill

NS_PER_MS = 1_000_000


class KeptWaiting:
    """Lives on one event loop.

    calls    the open requests
    pauses   those that overlap a time, by its begin and end
    """

    def __init__(
        self,
        calls: Iterable[Call],
        now: Now,
        pauses: Callable[[int, int], Sequence[Pause]] = never_paused,
    ) -> None:
        self._calls = calls
        self._now = now
        self._standstill = Standstill(pauses, now.ns())

    def look(self) -> None:
        """Tell what happened since the last look. To be called before a stage ends, and now and
        then; cheap unless the loop stood still."""
        for begin_ns, end_ns in self._standstill.news(self._now.ns()):
            for call in self._calls:
                stage = own_stage(call)
                if stage is not None:
                    _tell(call, stage, begin_ns, end_ns)

    def arrived(self, call: Call, stage: str) -> None:
        """What `stage` of `call` waited for has come just now."""
        self.look()
        pause = self._standstill.before(self._now.ns())
        if pause is not None and pause[1] > call.received_ns:
            _tell(call, stage, *pause)


def own_stage(call: Call) -> str | None:
    """The stage of the gateway's own that `call` is in; None while workers have it."""
    answered = call.output is not None and call.output.finish_reason is not None
    if call.is_over or answered:
        return "gateway.finish"
    if call.attempt is not None:
        return None
    ended = ("gateway.ingest", "gateway.queue")
    return next((stage for stage in ended if stage not in call.stages), "gateway.route")


def _tell(call: Call, stage: str, begin_ns: int, end_ns: int) -> None:
    if call.told_pause == (stage, end_ns):
        return
    call.told_pause = (stage, end_ns)
    stood_ms = (end_ns - begin_ns) // NS_PER_MS
    call.trace.wait(stage, WaitReason.PROCESS_PAUSED, needed=stood_ms, at_ns=begin_ns)
