"""One running server whose recording the benchmark switches, and what its processes use.

Owns the server, an agent for each way to record, and the reading of processor time. An agent runs
while its arm does and stands still (SIGSTOP) otherwise: what it has not done when its window ends
it does in its next one, so that no other window pays for it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks.switched_process import ARMS, Arm, Word, rings_path, words_of
from pdtrace.ring.reader import RingReader
from server import children
from server.config import NO_AGENT_HTTP, Settings
from server.launch import Launcher, thread_limits
from server.plan import agent_config
from server.process import AGENT

_START_S = 180.0
_SWITCH_S = 60.0
_STOP_S = 20.0
_STILL_S = 0.1
RINGS_OF: Mapping[Arm, Arm | None] = {
    Arm.OFF: None,
    Arm.ON: Arm.ON,
    Arm.TIMED: Arm.ON,
    Arm.EXPORT: Arm.EXPORT,
}
"""Whose rings, and so whose agent, each arm has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Used:
    """Totals since the start, CPU nanoseconds unless said otherwise.

    serving   of the processes that serve: gateway, prefill, transfer, decode
    engine    of that, the model's forward passes
    agents    of both agents
    calls     recording calls that were timed, `calls_ns` what they took
    busy_s    of all processors, by whomever; `wall_s` the clock
    """

    serving: int
    engine: int
    agents: int
    calls: int
    calls_ns: int
    busy_s: float
    wall_s: float


class SwitchedServer:
    """Made by `running`. Switch while no request is in flight."""

    def __init__(self, launcher: Launcher, arms: Path, agents: Mapping[Arm, children.Child]):
        self.url = launcher.url
        self.model = launcher.model_name
        self._arms = arms
        self._agents = agents
        self._pids = [child.pid for child in launcher.supervisor.children]
        self._words = [words_of(path) for path in arms.glob("*.words")]
        self._readers = {
            arm: [RingReader(path) for path in sorted(rings_path(arms, arm).iterdir())]
            for arm in agents
        }
        if not len(self._pids) == len(self._words) == len(self._readers[Arm.ON]):
            raise SystemExit(f"not every process of the server records: see {arms}")

    def switch(self, arm: Arm) -> None:
        """Every process and the agents are in `arm` when this returns."""
        for of, agent in self._agents.items():
            agent.process.send_signal(signal.SIGCONT if RINGS_OF[arm] is of else signal.SIGSTOP)
        (self._arms / "arm").write_text(arm)
        for pid in self._pids:
            os.kill(pid, signal.SIGUSR1)
        end_s = time.monotonic() + _SWITCH_S
        while any(words[Word.ARM] != 1 + ARMS.index(arm) for words in self._words):
            if time.monotonic() > end_s:
                raise SystemExit(f"the server did not switch to {arm!r} within {_SWITCH_S:.0f} s")
            time.sleep(0.002)

    def used(self) -> Used:
        return Used(
            serving=sum(map(_cpu_ns, self._pids)),
            engine=self._sum(Word.ENGINE_NS),
            agents=sum(_cpu_ns(agent.pid) for agent in self._agents.values()),
            calls=self._sum(Word.CALLS),
            calls_ns=self._sum(Word.CALLS_NS),
            busy_s=_busy_s(),
            wall_s=time.perf_counter(),
        )

    def settle(self) -> dict[Arm, int]:
        """Wait until nothing more is recorded; records since the last call, by whose rings they
        are in. The gateway is done with a request a moment after its client."""
        written = dict.fromkeys(self._readers, 0)
        more = True
        while more:
            time.sleep(_STILL_S)
            more = False
            for arm, readers in self._readers.items():
                count = sum(len(reader.read()) for reader in readers)
                written[arm] += count
                more = more or count > 0
        return written

    def _sum(self, word: Word) -> int:
        return sum(words[word] for words in self._words)


@contextlib.contextmanager
def running(folder: Path, *, endpoint: str) -> Generator[SwitchedServer]:
    """A server with the default model and the default settings, ready and off.

    folder    for everything that it writes
    endpoint  where the agent of `EXPORT` sends OTLP

    Raises SystemExit when it does not start.
    """
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        del os.environ[name]  # the agents have their own
    settings = Settings(
        run_dir=str(folder / "server"), port=0, record=False, agent_port=NO_AGENT_HTTP
    )
    launcher = Launcher.prepare(settings)
    launcher.supervisor.module = "benchmarks.switched_process"
    arms = launcher.run_dir.path / "arms"
    agents: dict[Arm, children.Child] = {}
    try:
        for arm in (Arm.ON, Arm.EXPORT):
            rings_path(arms, arm).mkdir(parents=True)
        launcher.start()
        launcher.wait_until_ready(timeout_s=_START_S, progress=lambda _: None)
        for arm, environment in (
            (Arm.ON, {}),
            (Arm.EXPORT, {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint}),
        ):
            agents[arm] = _start_agent(launcher, arms / arm, environment)
        yield SwitchedServer(launcher, arms, agents)
    finally:
        launcher.stop()
        launcher.close()
        children.stop(list(agents.values()), timeout_s=_STOP_S)


def _start_agent(launcher: Launcher, path: Path, environment: Mapping[str, str]) -> children.Child:
    """The agent as a server starts it, for the rings in `path`."""
    settings = msgspec.structs.replace(launcher.settings, run_dir=str(path), agent_port=0)
    config = path / "agent-config.json"
    config.write_bytes(
        msgspec.json.encode(agent_config(settings, endpoint=launcher.run_dir.endpoint))
    )
    return children.spawn(
        instance=AGENT,
        role=AGENT,
        config=config,
        log=path / "agent.log",
        environment={**thread_limits(settings.threads), **environment},
    )


def _cpu_ns(pid: int) -> int:
    """What the threads of a process have run."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            total += int((task / "schedstat").read_text().split()[0])
    return total


def _busy_s() -> float:
    """Time of all processors that was neither idle nor waited for a disk."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields)
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
