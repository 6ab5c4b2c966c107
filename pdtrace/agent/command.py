"""The agent: one process per host that turns rings into spans, files, OTLP, metrics and answers.

Owns the command, its options, and what is wired to the loop (`pdtrace.agent.loop`). An agent may
lag or die without disturbing serving.

    python -m pdtrace.agent --rings DIR [--out DIR] [--http HOST:PORT] [--until-closed] [--json] …

With `--out`, spans go to `<out>/traces/spans-*.jsonl`, the state and what is known to be lost to
`<out>/agent-state.json`, and with `--http` the address to `<out>/agent.json`.
Whether spans are exported is decided by the OTEL_* variables (`pdtrace.export.settings`).
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import resource
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pdtrace.agent.buckets import duration_edges_from
from pdtrace.agent.judging import RollingJudge
from pdtrace.agent.keeping import limits_from
from pdtrace.agent.loop import Agent, AgentConfig, AgentError
from pdtrace.agent.summary import AgentSummary
from pdtrace.agent.tails import DEFAULT_KEEP_RINGS
from pdtrace.analysis.sources import RINGS_FOLDER, resolve_run
from pdtrace.errors import PdtraceError
from pdtrace.export.settings import plan_from_env
from pdtrace.live.stuck import StuckPolicy, parse_deadlines
from pdtrace.ring.losses import STATE_NAME
from pdtrace.stopping import Stop, StopFlag, stop_on_signals

if TYPE_CHECKING:
    from pdtrace.agent.endpoint import AgentHttp
    from pdtrace.agent.metrics import AgentMetrics

__all__ = [
    "STATE_NAME",
    "Agent",
    "AgentConfig",
    "AgentError",
    "AgentSummary",
    "HttpConfig",
    "RollingJudge",
    "agent_command",
    "agent_config",
    "allow_many_files",
    "collect_garbage_rarely",
    "http_config",
    "main",
    "prepare_process",
    "run_agent",
]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpConfig:
    """Where the agent answers (`pdtrace.agent.endpoint`).

    bind      HOST:PORT, port 0 for a free one
    any_host  allow an address that is not loopback
    """

    bind: str = "127.0.0.1:0"
    any_host: bool = False


def run_agent(
    rings: str | Path,
    *,
    out: str | Path | None = None,
    until_closed: bool = False,
    stop: Stop | None = None,
    config: AgentConfig | None = None,
    http: HttpConfig | None = None,
) -> AgentSummary:
    """Runs an agent with verdicts and the exporters that the OTEL_* variables ask for.

    Returns when `stop` is set or, with `until_closed`, when every ring is finished. Logs one INFO
    line at the end. Raises AgentError, SinkError, ExportConfigError and HttpError before anything
    is read or written.
    """
    _refuse_other_rings(Path(rings))
    export = plan_from_env()
    if export is None and out is None and http is None:
        _log.warning("spans go nowhere: give --out DIR, or set OTEL_EXPORTER_OTLP_ENDPOINT")
    metrics = None if http is None else _metrics()
    judge = RollingJudge()
    agent = Agent(rings, out=out, export=export, judge=judge, metrics=metrics, config=config)
    if metrics is not None:
        judge.told = metrics.owned
    endpoint: AgentHttp | None = None
    try:
        if http is not None and metrics is not None:
            endpoint = _answer(agent, metrics, http, None if out is None else Path(out))
        agent.run(stop or StopFlag(), until_closed=until_closed)
    finally:
        summary = agent.close()
        if endpoint is not None:
            endpoint.close()
    _log.info("agent done: %s", summary.line())
    return summary


def _refuse_other_rings(rings: Path) -> None:
    """A directory that is not there yet may come; but where a server's runs are, theirs are meant.

    Raises AgentError.
    """
    run = resolve_run(rings.parent)
    if rings.exists() or run == rings.parent or not (run / RINGS_FOLDER).is_dir():
        return
    raise AgentError(
        f"{rings}: no such directory, but the newest run in {rings.parent} has one: "
        f"give --rings {run / RINGS_FOLDER} --out {run}"
    )


def agent_command(
    rings: str | Path,
    *,
    out: str | Path | None = None,
    until_closed: bool = False,
    as_json: bool = False,
    config: AgentConfig | None = None,
    http: HttpConfig | None = None,
) -> int:
    """`pdtrace agent`: runs until SIGTERM or SIGINT; returns the exit code.

    0 after an orderly end, 2 with one line on stderr when it cannot start. With `as_json` the
    totals are printed as one JSON object at the end. Call it from the main thread.
    """
    prepare_process()
    stop = StopFlag()
    try:
        with stop_on_signals(stop):
            summary = run_agent(
                rings, out=out, until_closed=until_closed, stop=stop, config=config, http=http
            )
    except PdtraceError as error:
        print(f"pdtrace agent: {error}", file=sys.stderr)
        return 2
    if as_json:
        print(msgspec.json.encode(summary).decode(), flush=True)
    return 0


def prepare_process() -> None:
    """For whoever calls `run_agent` in a process that does nothing else."""
    collect_garbage_rarely()
    allow_many_files()


def collect_garbage_rarely() -> None:
    """For a process that does nothing but this: spans die by their reference counts, and to look
    for cycles among them takes an eighth of its time."""
    gc.set_threshold(50_000, 10, 10)


def allow_many_files() -> None:
    """A ring of each process is open: as many files as this user may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def agent_config(
    *,
    stuck_factor: float | None = None,
    stuck_share: float | None = None,
    stuck_floor_s: float | None = None,
    deadlines: Iterable[str] = (),
    keep_rings: int | None = None,
) -> AgentConfig:
    """The configuration that command-line options ask for; None is the default.

    deadlines  `STAGE=SECONDS` each

    Raises AgentError for values out of range.
    """
    given = {"factor": stuck_factor, "share": stuck_share, "floor_s": stuck_floor_s}
    stuck = {name: value for name, value in given.items() if value is not None}
    keep_rings = DEFAULT_KEEP_RINGS if keep_rings is None else keep_rings
    try:
        if keep_rings < 0:
            raise ValueError(f"keep-rings is {keep_rings}; it must be 0 or more")
        policy = StuckPolicy(**stuck, deadlines=parse_deadlines(deadlines))
    except ValueError as error:
        raise AgentError(str(error)) from error
    return AgentConfig(stuck=policy, keep_rings=keep_rings, slo=limits_from(os.environ))


def http_config(bind: str | None, *, any_host: bool = False) -> HttpConfig | None:
    """Where to answer; None: nowhere."""
    return None if bind is None else HttpConfig(bind=bind, any_host=any_host)


def _metrics() -> AgentMetrics:
    # prometheus_client comes with the package; an agent without it still does everything else.
    try:
        from pdtrace.agent.metrics import AgentMetrics  # noqa: PLC0415
    except ImportError as error:
        raise AgentError(
            f"--http cannot be served: {error}. Install it (pip install prometheus-client), or "
            "leave --http off"
        ) from error
    return AgentMetrics(duration_edges_from(os.environ))


def _answer(agent: Agent, metrics: AgentMetrics, http: HttpConfig, out: Path | None) -> AgentHttp:
    from pdtrace.agent.endpoint import AgentHttp  # noqa: PLC0415
    from pdtrace.agent.metrics import AgentNumbers, Exposition  # noqa: PLC0415

    def numbers() -> AgentNumbers:
        return AgentNumbers(
            summary=agent.summary(),
            losses=agent.losses(),
            dropped=agent.dropped(),
            lag_s=agent.lag_s,
            poll_age_s=agent.poll_age_s,
        )

    exposition = Exposition(metrics, agent.look, numbers)
    return AgentHttp(
        http.bind,
        look=agent.look,
        metrics=exposition.render,
        health=agent.health,
        any_host=http.any_host,
        out=out,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m pdtrace.agent`."""
    default = StuckPolicy()
    parser = argparse.ArgumentParser(
        prog="pdtrace agent",
        description="Tail the rings of one host; write and export the spans of finished requests.",
    )
    option = parser.add_argument
    option("--rings", required=True, metavar="DIR", help="directory of ring files")
    option("--out", metavar="DIR", help="run directory for traces/ and the state")
    option(
        "--http",
        metavar="HOST:PORT",
        help="answer /inflight, /metrics and /health there, such as 127.0.0.1:0 for a free port",
    )
    option("--http-any", action="store_true", help="allow an address that is not loopback")
    option(
        "--deadline",
        action="append",
        default=[],
        metavar="STAGE=SECONDS",
        help="when the server itself gives a stage up; once for each stage",
    )
    option(
        "--stuck-share",
        type=float,
        metavar="PART",
        help=f"part of its deadline above which a stage is stuck (default {default.share})",
    )
    option(
        "--stuck-factor",
        type=float,
        metavar="TIMES",
        help=f"times its p99 above which a stage is stuck (default {default.factor})",
    )
    option(
        "--stuck-floor",
        type=float,
        metavar="SECONDS",
        help=f"no stage is stuck before (default {default.floor_s})",
    )
    option(
        "--keep-rings",
        type=int,
        metavar="N",
        help=f"finished rings to keep, the newest (default {DEFAULT_KEEP_RINGS})",
    )
    option("--until-closed", action="store_true", help="exit when every ring is finished")
    option("--json", action="store_true", help="print the totals as JSON at the end")
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        config = agent_config(
            stuck_factor=given.stuck_factor,
            stuck_share=given.stuck_share,
            stuck_floor_s=given.stuck_floor,
            deadlines=given.deadline,
            keep_rings=given.keep_rings,
        )
    except AgentError as error:
        print(f"pdtrace agent: {error}", file=sys.stderr)
        return 2
    return agent_command(
        given.rings,
        out=given.out,
        until_closed=given.until_closed,
        as_json=given.json,
        config=config,
        http=http_config(given.http, any_host=given.http_any),
    )
