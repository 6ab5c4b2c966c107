"""Scheduler and transfer processes, started for real, with the test in the gateway's place."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from pdtrace.propagation import RequestContext
from pdtrace.stages import Mode, Role
from server.config import COLOCATED, ProcessConfig, Settings
from server.engine.base import SamplingParams
from server.wire.endpoints import EndpointDirectory
from server.wire.messages import (
    AnyMessage,
    Cancel,
    ColocatedRequest,
    DecodeRequest,
    Heartbeat,
    HeartbeatAck,
    LegClosed,
    Peer,
    PrefillRequest,
    Tokens,
)
from server.wire.sockets import Inbox, Outbox

ROOT = Path(__file__).resolve().parents[2]
START_S = 60.0
ANSWER_S = 30.0
GREEDY = SamplingParams()


@dataclass(slots=True)
class Answer:
    """What came back for one handoff: output tokens by index, and the closing of each leg."""

    token_at: dict[int, int] = field(default_factory=dict[int, int])
    finish_reason: str | None = None
    first_from: str | None = None
    closed: dict[str, LegClosed] = field(default_factory=dict[str, LegClosed])

    @property
    def endings(self) -> set[str]:
        """ "completed", or outcome, reason and message, of every leg."""
        return {
            leg.outcome
            if leg.outcome == "completed"
            else f"{leg.instance} {leg.outcome} {leg.reason}: {leg.message}"
            for leg in self.closed.values()
        }

    @property
    def tokens(self) -> list[int]:
        return [self.token_at[index] for index in range(len(self.token_at))]


class Processes:
    """The processes of one server but its gateway, which the test plays.

    answers_beats   whether heartbeats are answered; a gateway that once did is watched
    """

    def __init__(self, run_dir: Path, settings: Settings) -> None:
        self.run_dir = run_dir
        self.settings = settings
        self.answers: dict[str, Answer] = {}
        self.answers_beats = False
        self.peers: dict[str, Peer] = {}
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._endpoints = EndpointDirectory(run_dir)
        settings.rings_path.mkdir(parents=True)
        self._gateway = Peer(
            instance="gateway-0", endpoint=self._endpoints.endpoint("gateway-0"), incarnation="g"
        )
        self._inbox = Inbox(self._gateway.endpoint)
        self._outbox = Outbox()
        self._num_requests = 0

    @property
    def legs(self) -> tuple[str, ...]:
        colocated = self.settings.mode == COLOCATED
        return ("worker-0",) if colocated else ("prefill-0", "decode-0")

    def start(self) -> None:
        """Start all processes and wait until each one's heart beats."""
        if self.settings.mode != COLOCATED:
            self.start_some("transfer-0")
        self.start_some(*self.legs)
        self.wait_until(lambda: set(self._children) <= set(self.peers), START_S)

    def start_some(self, *instances: str, life: int = 1) -> None:
        """Start these processes; `life` 2 is the second under the same name."""
        for instance in instances:
            role = instance.rpartition("-")[0]
            config = ProcessConfig(
                settings=self.settings,
                role=role,
                instance=instance,
                incarnation=f"{instance}-{life}",
                endpoint=self._endpoints.endpoint(instance),
                gateway_endpoint=self._gateway.endpoint,
                transfer_endpoint=(
                    None if role == "worker" else self._endpoints.endpoint("transfer-0")
                ),
                pool_path=None if role == "transfer" else str(self.run_dir / f"{instance}.kv"),
            )
            path = self.run_dir / f"{instance}.json"
            path.write_bytes(msgspec.json.encode(config))
            with (self.run_dir / f"{instance}.log").open("wb") as log:
                self._children[instance] = subprocess.Popen(
                    [sys.executable, "-m", "server.process", str(path)],
                    cwd=ROOT,
                    stdin=subprocess.DEVNULL,
                    stderr=log,
                )

    def send_signal(self, instance: str, number: signal.Signals) -> None:
        self._children[instance].send_signal(number)

    def wait_exit(self, instance: str, timeout_s: float = 20.0) -> int:
        """Exit code of a process, reading its messages until it is gone."""
        child = self._children[instance]
        self.wait_until(lambda: child.poll() is not None, timeout_s)
        self.listen(0.3)
        assert child.returncode is not None
        return child.returncode

    def log(self, instance: str) -> str:
        return (self.run_dir / f"{instance}.log").read_text()

    def stop(self) -> dict[str, int]:
        """SIGTERM to all; exit code of each."""
        for child in self._children.values():
            child.send_signal(signal.SIGTERM)
        return {instance: self.wait_exit(instance) for instance in self._children}

    def close(self) -> None:
        """Kill what still runs."""
        for child in self._children.values():
            if child.poll() is None:
                child.kill()
            child.wait()
        self._inbox.close()
        self._outbox.close()
        self._endpoints.close()

    # -- requests -----------------------------------------------------------------------------

    def submit(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int = 8,
        sampling: SamplingParams = GREEDY,
        early: bool = False,
        faults: dict[str, int] | None = None,
    ) -> str:
        """Send a request to its legs; returns its handoff id."""
        self._num_requests += 1
        number = self._num_requests
        colocated = self.settings.mode == COLOCATED
        context = RequestContext(
            request_id=f"r{number}",
            trace_id=f"{number:032x}",
            root_span_id=f"{number:016x}",
            attempt_span_id=f"{number + 1_000_000:016x}",
            handoff_id=f"h{number}",
            mode=Mode.COLOCATED if colocated else Mode.PD_EARLY if early else Mode.PD,
        )
        self.answers[context.handoff_id] = Answer()
        if colocated:
            request = ColocatedRequest(
                context=context,
                prompt_ids=tuple(prompt),
                max_tokens=max_tokens,
                sampling=sampling,
                stop=(),
                ignore_eos=False,
                gateway=self._gateway,
                faults=faults or {},
            )
            self._send("worker-0", request)
            return context.handoff_id
        decode = DecodeRequest(
            context=context,
            prompt_len=len(prompt),
            prompt_digest="d",
            max_tokens=max_tokens,
            sampling=sampling,
            stop=(),
            ignore_eos=False,
            early=early,
            prefill=self.peers["prefill-0"],
            gateway=self._gateway,
            faults=faults or {},
        )
        prefill = PrefillRequest(
            context=context,
            prompt_ids=tuple(prompt),
            prompt_digest="d",
            max_tokens=max_tokens,
            sampling=sampling,
            early=early,
            decode=self.peers["decode-0"],
            gateway=self._gateway,
            faults=faults or {},
        )
        self._send("decode-0", decode)
        self._send("prefill-0", prefill)
        return context.handoff_id

    def _send(self, instance: str, message: AnyMessage) -> None:
        """One that was started anew is reachable once the socket has noticed."""
        self.wait_until(lambda: self._outbox.send(self.peers[instance].endpoint, message))

    def cancel(self, handoff_id: str, *legs: str) -> None:
        """The client went away: tell every leg, or these alone."""
        message = Cancel(
            handoff_id=handoff_id,
            outcome="cancelled",
            reason="client_disconnected",
            by="client",
            gateway=self._gateway,
        )
        for instance in legs or self.legs:
            self._outbox.send(self.peers[instance].endpoint, message)

    def wait_closed(self, *handoff_ids: str, timeout_s: float = ANSWER_S) -> None:
        """Wait until every leg of these handoffs has closed."""
        self.wait_until(
            lambda: all(set(self.answers[h].closed) == set(self.legs) for h in handoff_ids),
            timeout_s,
        )

    def wait_until(self, condition: Callable[[], bool], timeout_s: float = ANSWER_S) -> None:
        """Take in messages until `condition` holds. Raises AssertionError with the logs' ends."""
        end_s = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > end_s:
                logs = "\n".join(f"{i}: {self.log(i)[-1500:]}" for i in self._children)
                raise AssertionError(f"waited {timeout_s} s in vain: {self.answers}\n{logs}")
            self.listen(0.02)

    def listen(self, for_s: float) -> None:
        """Take in messages for `for_s` seconds."""
        end_s = time.monotonic() + for_s
        while (left_s := end_s - time.monotonic()) > 0:
            received = self._inbox.get(left_s)
            if received is None:
                continue
            match received.message:
                case Heartbeat(peer=peer) as beat:
                    if beat.info is not None or beat.role == Role.TRANSFER:  # else it loads
                        self.peers[peer.instance] = peer
                    if self.answers_beats:
                        self._answer(beat, received.arrived_ns)
                case Tokens(instance=instance, items=items):
                    for item in items:
                        answer = self.answers[item.handoff_id]
                        if item.index == 0:
                            answer.first_from = instance
                        answer.token_at.update(enumerate(item.token_ids, start=item.index))
                        answer.finish_reason = item.finish_reason or answer.finish_reason
                case LegClosed(handoff_id=handoff_id, instance=instance) as closed:
                    self.answers[handoff_id].closed[instance] = closed
                case other:
                    raise AssertionError(f"gateway got {other}")

    def _answer(self, beat: Heartbeat, arrived_ns: int) -> None:
        self._outbox.send(
            beat.peer.endpoint,
            HeartbeatAck(
                incarnation=beat.peer.incarnation,
                seq=beat.seq,
                sent_ns=beat.sent_ns,
                received_ns=arrived_ns,
                answered_ns=time.monotonic_ns(),
                clock_id="",
                gateway=self._gateway,
            ),
        )


@contextlib.contextmanager
def running_processes(
    run_dir: Path, *, start: bool = True, **changes: object
) -> Generator[Processes]:
    """Processes of a small server without a model, ready; killed on leaving what still runs."""
    values: dict[str, object] = {
        "run_dir": str(run_dir),
        "model": "fake:step_ms=1",
        "page_size": 4,
        "prefill_pages": 64,
        "decode_pages": 64,
        "prefill_budget": 16,
        "reserve_output_tokens": 4,
        "max_running": 4,
        "allow_faults": True,
        "heartbeat_s": 0.2,
        **changes,
    }
    processes = Processes(run_dir, msgspec.convert(values, Settings))
    try:
        if start:
            processes.start()
        yield processes
    finally:
        processes.close()
