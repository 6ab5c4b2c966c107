"""The copy jobs of a transfer process: their states, order and handoffs.

Owns the table and its bounds; knows nothing of how bytes move or of messages' way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from pdtrace.recorder import RequestTrace
from server.errors import IntegrityError
from server.kv.transfer.base import CopyState, Reason, check_transition
from server.kv.transfer.policy import JobView
from server.kv.transfer.tombstones import Tombstones
from server.said import Said
from server.wire.messages import CopyJob


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """One copy job.

    held_until_ns   0 unless a fault holds it
    started_ns      when it began to copy; 0 before
    """

    message: CopyJob
    held_until_ns: int = 0
    started_ns: int = 0
    state: CopyState = CopyState.QUEUED

    def advance(self, target: CopyState) -> None:
        """Raises IntegrityError for a change that the table does not allow."""
        check_transition(self.state, target)
        self.state = target

    @property
    def view(self) -> JobView:
        """What the policy sees of it."""
        context = self.message.context
        return JobView(
            handoff_id=context.handoff_id,
            request_id=context.request_id,
            job_index=self.message.index,
            route=self.message.transfer_address,
            held_until_ns=self.held_until_ns,
        )


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a handoff ends; `error` is the type of the exception behind it, if there was one."""

    reason: Reason
    message: str
    error: str | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class TransferHandoff:
    """The jobs of one handoff that are not over, in order; the first may be copying.

    first         its first job, for the identities in it
    next_index    of the job that must come next
    num_bytes     copied by the jobs that are over
    failure       why its running job drains, when that is because the handoff has failed
    touched_ns    when something last happened to it
    said          what the trace was last told of why its next job does not start
    """

    first: CopyJob
    trace: RequestTrace
    touched_ns: int
    jobs: deque[Job] = field(default_factory=deque[Job])
    next_index: int = 0
    num_bytes: int = 0
    failure: Failure | None = None
    said: Said | None = None

    @property
    def handoff_id(self) -> str:
        return self.first.context.handoff_id

    @property
    def running(self) -> Job | None:
        """The job that copies or drains at this instant."""
        job = self.jobs[0] if self.jobs else None
        return None if job is None or job.state is CopyState.QUEUED else job


class JobTable:
    """Handoffs with jobs, and a bounded memory of those that are over."""

    def __init__(self) -> None:
        self._handoffs: dict[str, TransferHandoff] = {}
        self._waiting: dict[tuple[str, int], Job] = {}  # in order of arrival
        self._over = Tombstones()

    @property
    def num_waiting(self) -> int:
        """Jobs that have not started."""
        return len(self._waiting)

    @property
    def num_handoffs(self) -> int:
        return len(self._handoffs)

    @property
    def is_idle(self) -> bool:
        """Whether no job waits or runs."""
        return not self._waiting and not any(h.jobs for h in self._handoffs.values())

    def __iter__(self) -> Iterator[TransferHandoff]:
        """Handoffs; the table may change while the caller goes through them."""
        return iter(list(self._handoffs.values()))

    def get(self, handoff_id: str) -> TransferHandoff | None:
        return self._handoffs.get(handoff_id)

    def is_over(self, handoff_id: str) -> bool:
        """Whether the handoff has ended here, as far as that is remembered."""
        return handoff_id in self._over

    def come_from(self, incarnation: str) -> dict[str, int]:
        """How many jobs have come, by handoff of that prefill worker."""
        return {
            handoff.handoff_id: handoff.next_index
            for handoff in self._handoffs.values()
            if handoff.first.prefill.incarnation == incarnation
        }

    def open(self, handoff: TransferHandoff) -> None:
        self._handoffs[handoff.handoff_id] = handoff

    def add(self, handoff: TransferHandoff, job: Job) -> None:
        """Queue the next job of `handoff`."""
        handoff.jobs.append(job)
        handoff.next_index = job.message.index + 1
        self._waiting[handoff.handoff_id, job.message.index] = job

    def start(self, view: JobView) -> Job:
        """Take a waiting job out of the queue: it copies from here on."""
        job = self._waiting.pop((view.handoff_id, view.job_index))
        job.advance(CopyState.COPYING)
        return job

    def finish(self, handoff: TransferHandoff, num_bytes: int) -> Job:
        """The running job of `handoff` has copied `num_bytes`."""
        job = handoff.jobs.popleft()
        job.advance(CopyState.COPIED)
        handoff.num_bytes += num_bytes
        return job

    def give_up(self, handoff: TransferHandoff, target: CopyState) -> None:
        """Take the waiting jobs of `handoff` out of the queue; they end as `target`."""
        running = handoff.running
        for job in handoff.jobs:
            if job is not running:
                del self._waiting[handoff.handoff_id, job.message.index]
                job.advance(target)
        handoff.jobs = deque([] if running is None else [running])

    def close(self, handoff_id: str) -> None:
        """Forget a handoff whose jobs are over; from here on it is known as over."""
        self._handoffs.pop(handoff_id, None)
        self._over.add(handoff_id)

    def waiting(self) -> list[JobView]:
        """Jobs that have not started, in order of arrival."""
        return [job.view for job in self._waiting.values()]

    def running(self) -> list[JobView]:
        """Jobs that copy or drain at this instant."""
        return [
            job.view for handoff in self._handoffs.values() if (job := handoff.running) is not None
        ]

    def check_integrity(self) -> None:
        """Raises IntegrityError unless queue and handoffs hold the same jobs."""
        queued = {
            (handoff.handoff_id, job.message.index)
            for handoff in self._handoffs.values()
            for job in handoff.jobs
            if job.state is CopyState.QUEUED
        }
        if queued != self._waiting.keys():
            raise IntegrityError(
                f"queue has {sorted(self._waiting)}, handoffs have {sorted(queued)}"
            )
        for handoff in self._handoffs.values():
            started = [job for job in handoff.jobs if job.state is not CopyState.QUEUED]
            if len(started) > 1 or (started and handoff.jobs[0] is not started[0]):
                raise IntegrityError(f"handoff {handoff.handoff_id} runs jobs out of order")
