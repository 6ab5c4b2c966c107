"""A process's clock made to look like another host's, or set while it runs, for tests.

Owns the fault's syntax and the clock that it makes; knows nothing of what reads it. Only a server
started with `--allow-faults` takes one.

    --clock-fault decode-0:offset_s=5,drift_ppm=50,step_s=0.3,step_after_s=4,host=host-b
"""

from __future__ import annotations

import math

import msgspec

from pdtrace.clock import SYSTEM_CLOCK, Clock
from server.errors import StartError

MAX_SHIFT_S = 1e6
MAX_DRIFT_PPM = 1e5
_NS_PER_S = 1e9


class ClockFault(msgspec.Struct, frozen=True, kw_only=True):
    """How far a process's clocks, monotonic and wall, are off.

    offset_s       seconds ahead from the start on
    drift_ppm      millionths by which it runs fast
    step_s         seconds by which it is set forward, once; below 0: for which it stands still, as
                   CLOCK_MONOTONIC never runs backwards
    step_after_s   when that is, seconds after the process's start
    host           host id under which the process records
    """

    offset_s: float = 0.0
    drift_ppm: float = 0.0
    step_s: float = 0.0
    step_after_s: float = 0.0
    host: str = "shifted-host"

    def __post_init__(self) -> None:
        for name, value, most in (
            ("offset_s", self.offset_s, MAX_SHIFT_S),
            ("drift_ppm", self.drift_ppm, MAX_DRIFT_PPM),
            ("step_s", self.step_s, MAX_SHIFT_S),
            ("step_after_s", self.step_after_s, MAX_SHIFT_S),
        ):
            if not (math.isfinite(value) and abs(value) <= most):
                raise StartError(f"clock fault: {name} is {value}, the limit is {most:g}")
        if self.step_after_s < 0:
            raise StartError(f"clock fault: step_after_s is {self.step_after_s}, below 0")
        if not self.host:
            raise StartError("clock fault: the host has no name")


class ShiftedClock:
    """The system's clock as `fault` shifts it. Starts when it is made."""

    def __init__(self, fault: ClockFault, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._fault = fault
        self._begin_ns = clock.monotonic_ns()
        self._offset_ns = round(fault.offset_s * _NS_PER_S)
        self._step_ns = round(fault.step_s * _NS_PER_S)
        self._step_at_ns = self._begin_ns + round(fault.step_after_s * _NS_PER_S)

    def monotonic_ns(self) -> int:
        now_ns = self._clock.monotonic_ns()
        return now_ns + self._shift_ns(now_ns)

    def wall_ns(self) -> int:
        return self._clock.wall_ns() + self._shift_ns(self._clock.monotonic_ns())

    def _shift_ns(self, now_ns: int) -> int:
        drift_ns = round((now_ns - self._begin_ns) * self._fault.drift_ppm / 1e6)
        step_ns = 0
        if now_ns >= self._step_at_ns:
            step_ns = max(self._step_ns, self._step_at_ns - now_ns)
        return self._offset_ns + drift_ns + step_ns


class SettableClock:
    """`clock` as it was set while it ran. Any thread may read it; one sets it."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._set = (0, 0)  # how far it is ahead, and what it does not fall behind

    def shift(self, seconds: float) -> None:
        """Set it forward. Below 0: let it stand still for as long, as CLOCK_MONOTONIC never runs
        backwards."""
        now_ns = self.monotonic_ns()
        self._set = (self._set[0] + round(seconds * _NS_PER_S), now_ns)

    def monotonic_ns(self) -> int:
        ahead_ns, least_ns = self._set
        return max(self._clock.monotonic_ns() + ahead_ns, least_ns)

    def wall_ns(self) -> int:
        now_ns = self._clock.monotonic_ns()
        ahead_ns, least_ns = self._set
        return self._clock.wall_ns() + max(ahead_ns, least_ns - now_ns)


def make_clock(fault: ClockFault | None, *, settable: bool = False) -> Clock:
    """The clock of a process: the system's own unless `fault` shifts it or it is to be settable."""
    clock = SYSTEM_CLOCK if fault is None else ShiftedClock(fault)
    return SettableClock(clock) if settable else clock


def parse_clock_faults(options: list[str]) -> dict[str, ClockFault]:
    """Instance → fault, from `INSTANCE:KEY=VALUE,…`. Raises StartError."""
    faults: dict[str, ClockFault] = {}
    keys = {field.name: field for field in msgspec.structs.fields(ClockFault)}
    for option in options:
        instance, _, rest = option.partition(":")
        values: dict[str, str] = {}
        for item in filter(None, (part.strip() for part in rest.split(","))):
            key, _, value = item.partition("=")
            if key not in keys or key in values:
                raise StartError(
                    f"clock fault {option!r}: got {item!r}, expected each of "
                    f"{', '.join(f'{name}=' for name in keys)} at most once"
                )
            values[key] = value
        if not instance or not values or instance in faults:
            raise StartError(f"clock fault {option!r}: expected INSTANCE:KEY=VALUE,... once each")
        try:
            faults[instance] = msgspec.convert(values, ClockFault, strict=False)
        except msgspec.ValidationError as error:
            raise StartError(f"clock fault {option!r}: {error}") from error
    return faults
