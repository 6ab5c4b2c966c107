"""Tells the processes of a running server which faults to inject, and what they answer.

Owns the way in by the run directory; knows nothing of what a fault does.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from server.errors import StartError
from server.injection.fault import Fault, check_at
from server.process import AGENT
from server.wire.endpoints import EndpointDirectory
from server.wire.messages import FaultReport, InjectFaults, Peer
from server.wire.sockets import Inbox, Outbox

ANSWER_S = 5.0


class _Process(msgspec.Struct):
    instance: str
    role: str
    endpoint: str


class _Settings(msgspec.Struct):
    allow_faults: bool


class _Server(msgspec.Struct):
    """What is needed of `server.json`."""

    processes: tuple[_Process, ...]
    settings: _Settings
    stopped_at: float | None = None


def inject(
    run_dir: Path,
    faults: Sequence[Fault] = (),
    *,
    clear: bool = False,
    timeout_s: float = ANSWER_S,
) -> Mapping[str, FaultReport | None]:
    """Arm `faults` in the server that runs in `run_dir`; its processes' answers, by instance.

    clear       disarm what is armed first
    timeout_s   how long to wait for answers; None stands for a process that gave none

    Without faults and `clear` this only asks. Raises StartError when no server runs there, when it
    does not allow faults, and for a fault of a process that it has not.
    """
    server = _read_state(run_dir)
    processes = [process for process in server.processes if process.role != AGENT]
    names = {name for process in processes for name in (process.instance, process.role)}
    check_at(faults, names)
    # A name of its own: two may ask at a time. The folder belongs to the server and stays.
    endpoint = EndpointDirectory(run_dir).endpoint(f"inject-{os.getpid()}-{secrets.token_hex(4)}")
    inbox, outbox = Inbox(endpoint), Outbox(linger_s=0.0)
    try:
        me = Peer(instance="inject", endpoint=endpoint, incarnation="")
        order = InjectFaults(faults=tuple(faults), clear=clear, reply_to=me)
        for process in processes:
            outbox.send(process.endpoint, order)
        return _gather(inbox, [process.instance for process in processes], timeout_s)
    finally:
        outbox.close()
        inbox.close()


def _gather(
    inbox: Inbox, instances: Sequence[str], timeout_s: float
) -> Mapping[str, FaultReport | None]:
    reports: dict[str, FaultReport | None] = dict.fromkeys(instances)
    end_s = time.monotonic() + timeout_s
    while None in reports.values() and (left_s := end_s - time.monotonic()) > 0:
        received = inbox.get(left_s)
        if received is not None and isinstance(received.message, FaultReport):
            reports[received.message.peer.instance] = received.message
    return reports


def _read_state(run_dir: Path) -> _Server:
    path = run_dir / "server.json"
    try:
        server = msgspec.json.decode(path.read_bytes(), type=_Server)
    except OSError as error:
        raise StartError(
            f"{path} cannot be read ({error.strerror}): --run-dir names the folder of a running "
            "server"
        ) from error
    except msgspec.MsgspecError as error:
        raise StartError(f"{path} is no server's state: {error}") from error
    if server.stopped_at is not None:
        raise StartError(f"the server of {run_dir} has stopped")
    if not server.settings.allow_faults:
        raise StartError(f"the server of {run_dir} allows no faults: start it with --allow-faults")
    return server
