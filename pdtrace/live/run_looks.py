"""Looks at a run directory: its agent's while it answers in time, else its rings'.

The agent has read every record since it began, where a ring only keeps the latest. So that nobody
waits for one that is stopped, or believes one that is behind, the rings are read instead, and the
look says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from pdtrace.errors import LiveError
from pdtrace.inflight import Look
from pdtrace.live.address import read_address
from pdtrace.live.looks import DEFAULT_TIMEOUT_S, AgentLooks, LookSource, RingLooks

ASK_S = 1.0
"""An agent has this long to answer."""
MAX_LAG_S = 2.0
"""An agent that is further behind the rings is not believed."""
ASK_AGAIN_S = 10.0
"""An agent that did not answer is left alone for so long."""


class RunLooks:
    """Looks at one run directory. Not thread-safe.

    rings   the looks at its rings; closed with this
    clock   seconds, monotonic
    """

    def __init__(self, rings: RingLooks, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.rings = rings
        self._clock = clock
        self._ask_after_s = -float("inf")
        self._problem: str | None = None

    @property
    def name(self) -> str:
        """The run directory."""
        return self.rings.name

    def look(self) -> Look:
        """What its agent says, else what its rings say, and then why the agent does not."""
        if self._clock() >= self._ask_after_s:
            look, self._problem = self._ask(self.rings.runs[0])
            if look is not None:
                return look
            if self._problem is not None:
                self._ask_after_s = self._clock() + ASK_AGAIN_S
        look = self.rings.look()
        if self._problem is None:
            return look
        return msgspec.structs.replace(look, problems=(self._problem, *look.problems))

    def close(self) -> None:
        """Closes the rings. Idempotent."""
        self.rings.close()

    def _ask(self, run: Path) -> tuple[Look | None, str | None]:
        """The agent's look, or why there is none; neither where there is no agent."""
        address = read_address(run)
        if address is None:
            return None, None
        who = f"the agent of {self.name} (pid {address.pid})"
        try:
            agent = AgentLooks(address.url, timeout_s=ASK_S)
            look = agent.look()
        except LiveError:
            return None, f"{who} does not answer at {address.url}: this was read from the rings"
        if look.pid != address.pid:
            return None, f"{who} is gone: this was read from the rings"
        if look.lag_s > MAX_LAG_S:
            return None, f"{who} is {look.lag_s:.0f} s behind: this was read from the rings"
        return look, None


def open_looks(
    source: str | Path, *others: str | Path, timeout_s: float = DEFAULT_TIMEOUT_S
) -> LookSource:
    """The agent behind an `http://` address, else a run directory's agent or rings; the rings alone
    of several, where requests cross hosts.

    Raises LiveError if there is neither, or several addresses.
    """
    if any("://" in str(one) for one in (source, *others)):
        if others:
            raise LiveError("give one agent's address, or run directories")
        return AgentLooks(str(source), timeout_s=timeout_s)
    rings = RingLooks(source, *others)
    return rings if others else RunLooks(rings)


def run_of_agent(look: Look, name: str) -> str:
    """The run directory behind an agent's look. `name`: where it answers, for people.

    Raises LiveError if it has none, or one that cannot be seen from here.
    """
    if look.run_dir is None:
        raise LiveError(f"{name}: writes no run directory; `pdtrace top --from {name}` asks it")
    if not Path(look.run_dir).is_dir():
        raise LiveError(
            f"{name}: writes to {look.run_dir}, which is not on this host: run this there"
        )
    return look.run_dir
