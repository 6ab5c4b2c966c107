"""Which processes that cannot go on a request in flight needs, in sentences. Pure.

Owns who needs whom; how a process stands is `pdtrace.live.process_view`'s.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from pdtrace.analysis.waits import listed
from pdtrace.inflight import InFlight, Look, ProcessNow, ProcessState
from pdtrace.live.process_view import standing
from pdtrace.stages import STAGE_BY_NAME, Role, WaitReason

MAX_PROMPTS = 3
"""Requests named whose prompts a stalled process is at."""

_COMPUTE = "prefill.compute"
_WORKERS = frozenset(role.value for role in Role) - {Role.GATEWAY.value, Role.TRANSFER.value}


class Standings:
    """Sentences on the processes of a look that cannot go on."""

    def __init__(self, look: Look) -> None:
        self._processes = look.processes
        self._prompts: defaultdict[str, list[str]] = defaultdict(list)
        for request in sorted(look.requests, key=lambda request: -request.stage_age_s):
            if request.stage == _COMPUTE and request.worker and request.ended is None:
                self._prompts[request.worker].append(request.request_id)

    def of(self, request: InFlight, *, all_legs: bool) -> list[str]:
        """Those on processes that a request needs.

        all_legs  also on its workers that do not have to end its stage; what was answered is held
                  by any of them
        """
        names = {request.worker}
        stage = STAGE_BY_NAME.get(request.stage or "")
        roles = stage.roles if stage is not None and request.worker is None else ()
        if request.wait is not None and request.wait.reason == WaitReason.NO_WORKER:
            roles = _WORKERS
        if all_legs or request.ended is not None:
            names |= {request.prefill_worker, request.decode_worker}
        sentences = [
            sentence
            for process in self._processes
            if process.instance in names or process.role in roles
            if (sentence := self._sentence(process))
        ]
        return list(dict.fromkeys(sentences))

    def _sentence(self, process: ProcessNow) -> str | None:
        clause = standing(process)
        if clause is None:
            return None
        # What keeps the others waiting, unless the process was stopped by somebody.
        prompts: Sequence[str] = ()
        if process.state is ProcessState.STALLED and process.halt is None:
            prompts = self._prompts.get(process.instance, ())[:MAX_PROMPTS]
        return clause + (f", in the prompt of {listed(prompts)}." if prompts else ".")
