"""Service-level objectives: the limits that requests are held to. One home for all who use them.

Owns the settings and their checks; knows nothing of how they are measured, drawn or alerted on.
Pure but for `read_slo`, which reads one file.
"""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from pdtrace.errors import PdtraceError

_LEAST_S, _MOST_S = 1e-9, 1e9
"""Times are whole nanoseconds, and no request takes thirty years."""


class SloError(PdtraceError):
    """A setting is out of range, or its file cannot be read; the message names it."""

    code = "bad_slo"


class Slo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is promised. Seconds; objectives are shares of what is counted, between 0 and 1.

    ttft_s               first request byte to first content byte, of a request that streams
    ttft_objective       share of requests that keep it
    token_gap_s          time between two writes of content
    token_gap_objective  share of gaps, pooled over requests, that keep it
    error_objective      share of admitted requests that nobody cancelled and that are completed
    e2e_s                first request byte to last byte of the answer; None: nothing is promised.
                         `pdtrace slo` alone judges it
    e2e_objective        share of completed requests that keep it
    oldest_s             age at which a request in flight is too old for its stage
    oldest_generate_s    the same where the answer is generated: its length is the caller's choice
    """

    ttft_s: float = 1.25
    ttft_objective: float = 0.99
    token_gap_s: float = 0.2
    token_gap_objective: float = 0.99
    error_objective: float = 0.999
    e2e_s: float | None = None
    e2e_objective: float = 0.99
    oldest_s: float = 30.0
    oldest_generate_s: float = 300.0

    def __post_init__(self) -> None:
        limits = ["ttft_s", "token_gap_s", "oldest_s", "oldest_generate_s"]
        for name in limits if self.e2e_s is None else [*limits, "e2e_s"]:
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} is {value!r}; it must be a number of seconds above 0")
            if not _LEAST_S <= value <= _MOST_S:
                raise ValueError(
                    f"{name} is {value!r}; it must be from {_LEAST_S:g} to {_MOST_S:g} seconds"
                )
        for name in ("ttft_objective", "token_gap_objective", "error_objective", "e2e_objective"):
            value = getattr(self, name)
            if not 0 < value < 1:
                raise ValueError(f"{name} is {value!r}; it must be a share between 0 and 1")

    @property
    def thresholds_s(self) -> tuple[float, float]:
        """What has to be an edge of the histograms, so that nothing is guessed between two."""
        return (self.ttft_s, self.token_gap_s)


DEFAULT_SLO = Slo()
_TARGETS = {
    "ttft": "ttft_objective",
    "token_gap": "token_gap_objective",
    "errors": "error_objective",
    "e2e": "e2e_objective",
}


def with_target(slo: Slo, text: str) -> Slo:
    """The same limits with another target: `ttft=0.95`, `errors=99.9%`; `0.95` is that of all but
    `errors`. Raises ValueError."""
    name, _, share = text.rpartition("=")
    name = name.strip()
    if name and name not in _TARGETS:
        raise ValueError(f"{name!r} is no objective; there are {', '.join(_TARGETS)}")
    number = share.strip()
    try:
        # 99.9 / 100 is not quite 0.999: the text is what was meant.
        value = float(f"{number[:-1].strip()}e-2" if number.endswith("%") else number)
    except ValueError as error:
        raise ValueError(f"{text!r} is no target; give NAME=SHARE, such as ttft=0.95") from error
    names = [name] if name else [one for one in _TARGETS if one != "errors"]
    return msgspec.structs.replace(slo, **{_TARGETS[one]: value for one in names})


def read_slo(path: Path) -> Slo:
    """Settings out of a TOML file with the names of `Slo`; what it leaves out is the default.

    Raises SloError.
    """
    try:
        return msgspec.toml.decode(path.read_bytes().decode(), type=Slo)
    except OSError as error:
        raise SloError(f"{path}: {error.strerror or error}") from error
    except RecursionError as error:
        raise SloError(f"{path}: nested too deeply") from error
    except UnicodeDecodeError as error:
        raise SloError(f"{path}: is no UTF-8 text, as TOML is") from error
    except (msgspec.DecodeError, ValueError) as error:
        raise SloError(f"{path}: {error}") from error
