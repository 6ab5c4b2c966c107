"""Tells the processes of a running server which faults to inject, and what they answer.

Owns the way in by the run directory; knows nothing of what a fault does.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from server.errors import StartError
from server.injection.fault import Fault, check_at
from server.process import AGENT
from server.wire.curve import load_keys
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
    curve_keys: str | None = None


class _Server(msgspec.Struct):
    """What is needed of `server.json`."""

    processes: tuple[_Process, ...]
    settings: _Settings
    stopped_at: float | None = None


class FaultClient:
    """A way to the processes of the server that runs in `run_dir`. Use as a context manager.

    Raises StartError when no server runs there, when it does not allow faults, and when its keys
    cannot be read.
    """

    def __init__(self, run_dir: Path) -> None:
        server = _read_state(run_dir)
        self._processes = [process for process in server.processes if process.role != AGENT]
        keys = load_keys(server.settings.curve_keys)
        # A name of its own: two may ask at a time. The folder belongs to the server and stays.
        name = f"inject-{os.getpid()}-{secrets.token_hex(4)}"
        endpoint = EndpointDirectory(run_dir).endpoint(name)
        self._inbox = Inbox(endpoint)
        self._outbox = Outbox(linger_s=0.0, keys=keys)
        self._me = Peer(instance="inject", endpoint=endpoint, incarnation="")

    def __enter__(self) -> FaultClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._outbox.close()
        self._inbox.close()

    def tell(
        self, faults: Sequence[Fault] = (), *, clear: bool = False, timeout_s: float = ANSWER_S
    ) -> dict[str, FaultReport | None]:
        """Arm `faults` and return what the processes answer, by instance; None for no answer.

        clear   disarm what is armed first

        Without faults and `clear` this only asks. Raises StartError for a fault of a process that
        the server has not.
        """
        check_at(faults, {name for peer in self._processes for name in (peer.instance, peer.role)})
        self._inbox.drain()  # answers that came too late for the call before
        order = InjectFaults(faults=tuple(faults), clear=clear, reply_to=self._me)
        for process in self._processes:
            self._outbox.send(process.endpoint, order)
        reports: dict[str, FaultReport | None] = {peer.instance: None for peer in self._processes}
        end_s = time.monotonic() + timeout_s
        while None in reports.values() and (left_s := end_s - time.monotonic()) > 0:
            received = self._inbox.get(left_s)
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
        raise StartError(
            f"the server of {run_dir.resolve()} has stopped: --run-dir names the folder of a "
            "running server"
        )
    if not server.settings.allow_faults:
        raise StartError(f"the server of {run_dir} allows no faults: start it with --allow-faults")
    return server
