"""Objectives as programs are told them: by environment variables, and by a file of these.

Owns which variable says what to whom. Boards and rules have the limits written in them instead.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

from pdtrace.agent.buckets import SLO_VARIABLE
from pdtrace.agent.keeping import TOKEN_GAP_VARIABLE, TTFT_VARIABLE
from pdtrace.slo import Slo

GENERATED_VARIABLE = "PD_GENERATED"
"""Docker Compose: the folder whose boards and rules are mounted (`collector/compose.yaml`)."""

_HEADER = """\
# Your objectives, for programs that are told them by their environment. Generated.
#   set -a; . ./slo.env; set +a                      then start server, agents, Jaeger or collector
#   docker compose --env-file slo.env -f .../compose.yaml up -d
"""


def sampling_environment(slo: Slo) -> dict[str, str]:
    """What Jaeger and the collector are told: above these a trace is always kept."""
    return {TTFT_VARIABLE: _seconds(slo.ttft_s), TOKEN_GAP_VARIABLE: _seconds(slo.token_gap_s)}


def server_environment(slo: Slo) -> dict[str, str]:
    """What servers and agents are told: limits are edges of their histograms, and an agent asks to
    keep what missed them."""
    edges = ",".join(map(_seconds, slo.thresholds_s))
    return {SLO_VARIABLE: edges, **sampling_environment(slo)}


def environment_file(slo: Slo, generated: Path) -> str:
    """For a shell and for Docker Compose. `generated`: where boards and rules are."""
    variables: Mapping[str, str] = {
        **server_environment(slo),
        GENERATED_VARIABLE: shlex.quote(str(generated.absolute())),
    }
    lines = (f"{name}={value}\n" for name, value in variables.items())
    return f"{_HEADER}{''.join(lines)}"


def _seconds(value: float) -> str:
    """Never as 1e-05, which not every program reads; a nanosecond is exact enough."""
    text = f"{value:.9f}".rstrip("0")
    return f"{text}0" if text.endswith(".") else text
