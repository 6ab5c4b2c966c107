"""Settings of every server process: one frozen object each, built once, checked on build.

Owns names, defaults and ranges; the command line (`server.cli`) fills it, the launcher writes it to
the run directory, each process reads its own. Nothing else reads the environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import msgspec

from server.client_limits import ClientLimits
from server.clock_fault import ClockFault
from server.errors import StartError
from server.injection.fault import Fault, check_at

PD = "pd"
COLOCATED = "colocated"
NO_AGENT_HTTP = -1
"""`agent_port` that keeps the agent from answering over HTTP."""

MAX_WORKERS = 256
"""Of each role; every one is a process."""
_MOST = 2**63 - 1
"""Gauges hold no more."""
_MOST_S = 1e9
"""So that nanoseconds of it are a number."""

WITHOUT_EFFECT: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        PD: ("workers", "chunked"),
        COLOCATED: (
            "prefill",
            "decode",
            "prefill_pages",
            "first_token",
            "transfer",
            "verify_copies",
        ),
    }
)
"""Settings that mean nothing in a mode: refused where somebody asks for them."""

_WITHOUT_FLAG = frozenset(
    {
        "max_body_bytes",
        "heartbeat_s",
        "dead_after_s",
        "stalled_after_s",
        "deadlines",
    }
)


def flag(name: str) -> str:
    """How a setting is called on the command line; its own name where there is no flag for it."""
    return name if name in _WITHOUT_FLAG else f"--{name.replace('_', '-')}"


def is_utf8(text: str) -> bool:
    """False for text with bytes from the command line that are no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class Deadlines(msgspec.Struct, frozen=True, kw_only=True):
    """Longest stay in each non-terminal state, seconds on the monotonic clock.

    Between the legs: prefill's wait for decode's pages is decode's to bound (`reserve_s`), decode's
    wait for KV is prefill's (`prefill_queue_s`, `prefill_compute_s`, `transfer_s`), as long as the
    other one answers.
    """

    gateway_queue_s: float = 60.0
    accept_s: float = 1.0  # from here on a worker that goes on without naming it has lost it
    reserve_s: float = 60.0
    handshake_s: float = 30.0  # pages known to handshake done; the other leg's not being known
    prefill_queue_s: float = 120.0
    prefill_compute_s: float = 300.0
    transfer_s: float = 30.0
    copy_s: float = 20.0  # one copy job, from its start; below transfer_s, so that it says why
    await_kv_s: float = 480.0  # more than queue, compute, transfer and drain on the other side
    decode_queue_s: float = 120.0
    preempted_s: float = 120.0
    drain_s: float = 10.0
    peer_silence_s: float = 60.0  # the other leg's worker can be reached but does not answer
    stop_s: float = 10.0  # requests in flight may go on after SIGTERM to their worker
    request_s: float = 600.0


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings shared by all processes of one server. See `python -m server up --help`."""

    run_dir: str = "run"
    host: str = "127.0.0.1"
    port: int = 8000
    mode: str = PD
    model: str | None = None  # path, "fake", or None for the packaged default
    served_name: str | None = None
    dtype: str = "float32"
    device: str = "cpu"
    threads: int = 1
    prefill: int = 1
    decode: int = 1
    workers: int = 1  # colocated
    chunked: bool = True  # colocated: chunk prompts to the budget, or run them whole
    policy: str = "least_loaded"
    first_token: str = "decode"  # noqa: S105 - or "prefill": forwarded early
    transfer: str = "shm"  # or "tcp"
    verify_copies: bool = True  # compare what was copied in shared memory with its source
    page_size: int = 16
    prefill_pages: int = 512
    decode_pages: int = 512
    prefill_budget: int = 256  # prompt tokens per step
    max_running: int = 16
    max_waiting: int = 256  # requests that wait in a worker before it refuses more
    preempted_pages: int = 512  # KV pages of preempted requests in a worker's host memory
    max_recomputes: int = 4  # how often the KV of one beyond that is computed again
    reserve_output_tokens: int = 64  # room kept per request beyond its prompt when reserving
    max_concurrency: int = 64
    max_queue: int = 256
    max_retries: int = 1  # further attempts of a request after one that failed
    max_body_bytes: int = 8 * 1024 * 1024
    client_limits: ClientLimits = ClientLimits()
    heartbeat_s: float = 0.5
    dead_after_s: float = 3.0
    stalled_after_s: float = 15.0
    gap_threshold_s: float = 0.5
    allow_faults: bool = False
    clock_faults: dict[str, ClockFault] = {}  # by instance
    faults: tuple[Fault, ...] = ()  # armed at start
    record: bool = True
    agent_port: int = 0  # where the recording's agent answers; 0: any free one, -1: nowhere
    api_key: str | None = None
    caller_traces: bool = True  # callers' traces are continued, and their sampling decisions kept
    restart: bool = True  # a process that ended is started again; else the server stops
    control: str = "ipc"  # what messages between processes go over
    curve_keys: str | None = None  # folder of keys for ZeroMQ over a network
    deadlines: Deadlines = Deadlines()

    def __post_init__(self) -> None:
        for name, low in (
            ("prefill", 1),
            ("decode", 1),
            ("workers", 1),
            ("threads", 1),
            ("page_size", 1),
            ("prefill_pages", 2),
            ("decode_pages", 2),
            ("prefill_budget", 1),
            ("max_running", 1),
            ("max_waiting", 1),
            ("preempted_pages", 0),
            ("max_recomputes", 0),
            ("max_concurrency", 1),
            ("max_queue", 0),
            ("max_retries", 0),
            ("reserve_output_tokens", 1),
        ):
            value = getattr(self, name)
            if value < low:
                raise StartError(f"{flag(name)} is {value}, expected at least {low}")
            most = MAX_WORKERS if name in {"prefill", "decode", "workers"} else _MOST
            if value > most:
                raise StartError(f"{flag(name)} is {value}, expected at most {most}")
        for name in ("heartbeat_s", "dead_after_s", "stalled_after_s", "gap_threshold_s"):
            value = getattr(self, name)
            if not value > 0:
                raise StartError(f"{flag(name)} is {value}, expected more than 0")
            if value > _MOST_S:
                raise StartError(f"{flag(name)} is {value}, expected at most {_MOST_S:g}")
        for name, choices in (
            ("mode", (PD, COLOCATED)),
            ("policy", ("round_robin", "least_loaded", "prefix_aware")),
            ("first_token", ("decode", "prefill")),
            ("transfer", ("shm", "tcp")),
            ("control", ("ipc", "tcp")),
            ("dtype", ("float32", "bfloat16")),
            ("device", ("cpu", "cuda")),
        ):
            value = getattr(self, name)
            if value not in choices:
                raise StartError(f"{flag(name)} is {value!r}, expected one of {', '.join(choices)}")
        for name in ("run_dir", "host", "model", "served_name", "api_key", "curve_keys"):
            if not is_utf8(getattr(self, name) or ""):  # processes are told their settings in JSON
                raise StartError(f"{flag(name)} is not valid UTF-8")
        if self.api_key == "":
            raise StartError("--api-key is empty: leave it out, or give callers a key to send")
        if self.api_key is not None and not _fits_header(self.api_key):
            raise StartError(
                "--api-key has spaces around it or control characters, which no header carries"
            )
        if self.control == "tcp" and self.curve_keys is None:
            raise StartError(
                "--control tcp needs --curve-keys: every user of this host could send messages"
            )
        if self.clock_faults and not self.allow_faults:
            raise StartError("a clock fault needs --allow-faults")
        if unknown := set(self.clock_faults) - self._may_have_clock_faults():
            raise StartError(
                f"no clock fault for {', '.join(sorted(unknown))}: expected one of "
                f"{', '.join(sorted(self._may_have_clock_faults()))}"
            )
        if self.faults and not self.allow_faults:
            raise StartError("faults need --allow-faults")
        check_at(self.faults, self._may_have_faults())
        if not 0 <= self.port <= 65535:
            raise StartError(f"--port is {self.port}, expected 0 to 65535")
        if not NO_AGENT_HTTP <= self.agent_port <= 65535:
            raise StartError(
                f"--agent-port is {self.agent_port}, expected 0 to 65535, or -1 for none"
            )

    def _may_have_clock_faults(self) -> set[str]:
        """All workers; the gateway's clock is the one that they are compared with."""
        return {
            f"{role}-{number}" for role, count in self._workers.items() for number in range(count)
        }

    def _may_have_faults(self) -> set[str]:
        """Instances and roles of all processes that take messages."""
        return {*self._may_have_clock_faults(), *self._workers, "gateway", "gateway-0"}

    @property
    def _workers(self) -> Mapping[str, int]:
        if self.mode == COLOCATED:
            return {"worker": self.workers}
        transfers = 2 if self.transfer == "tcp" else 1
        return {"prefill": self.prefill, "decode": self.decode, "transfer": transfers}

    @property
    def run_path(self) -> Path:
        return Path(self.run_dir)

    @property
    def rings_path(self) -> Path:
        return self.run_path / "rings"


def _fits_header(key: str) -> bool:
    return key == key.strip() and min(key) >= " " and "\x7f" not in key


class ProcessConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What one process is started with: its identity, its endpoint and those it must know.

    endpoint            ZeroMQ endpoint of its inbox
    gateway_endpoint    the gateway's inbox
    transfer_endpoint   inbox of the transfer process on its host; None in colocated mode
    transfer_address    host:port where this host receives KV over TCP; None with shm
    pool_path           backing file of its KV pool; None for gateway and transfer
    ready_fd            pipe through which it tells the launcher that it serves
    until_closed        the agent: end once everything that was recorded is exported
    follows             whether a process of its name ran before it in this server
    """

    settings: Settings
    role: str
    instance: str
    incarnation: str
    endpoint: str
    gateway_endpoint: str
    transfer_endpoint: str | None = None
    transfer_address: str | None = None
    pool_path: str | None = None
    http_fd: int | None = None  # gateway: listening socket inherited from the launcher
    ready_fd: int | None = None
    until_closed: bool = False
    follows: bool = False
