"""The alerts: one list, out of which both formats are written.

Owns when an alert fires and where it leads; those of what the agents cannot tell of themselves are
in `telemetry`.
"""

from __future__ import annotations

from dataclasses import replace

from dashboards import links, names, queries
from dashboards import variables as v
from dashboards.boards.pieces import GENERATE, POOLS
from dashboards.rules import recordings as rec
from dashboards.rules import telemetry
from dashboards.rules.alert import Alert, Severity
from dashboards.rules.timing import NOMINAL, Timing
from pdtrace.alert_links import PATHS, Places
from pdtrace.inflight import ProcessState
from pdtrace.slo import Slo
from pdtrace.stages import Role

PAGE_BURNS = (("1h", "5m", 14.4), ("6h", "30m", 6.0))
TICKET_BURNS = (("1d", "2h", 3.0), ("3d", "6h", 1.0))
"""Long window, short window, burn rate: 2, 5, 10 and 10 % of a budget of 30 days (the SRE
workbook's table)."""

LEAST_FINISHED = 20
"""Fewer requests than this need no span metrics."""
LEAST_RECENT, LEAST_BEFORE = 5, 20
"""Fewer of a stage than this, in the recent window and in its baseline, are no mean."""
STALLED_TIMES = 5
STALLED_ABOVE_S = 0.1
"""A stage is stalled when its mean is so many times its baseline, and so much above it."""
LEAST_SLOW = 3
"""Longer than STALLED_ABOVE_S: one request alone can move a mean."""
STALLING_SHARE, STALLING_LEAST = 0.1, 5

SILENT_S = 20
"""How long a process that lives may go without its loop going round. Longer than the gateway takes
to give it no requests (`stalled_after_s`): PDProcessDown, which mutes it, is there first."""
WAITING_EACH, IDLE_EACH = 2.0, 0.25
"""Requests that wait for each worker of a pool: too many, and next to none."""
STARTING = "10m"
"""How long a new process may take until it is ready: it loads its model."""
LAG_S, POLL_AGE_S = 5, 10
INCOMPLETE_SHARE, LEAST_INCOMPLETE = 0.01, 2


def alerts(slo: Slo, timing: Timing = NOMINAL, places: Places = PATHS) -> tuple[Alert, ...]:
    """Every alert."""
    made = (
        *_burns(slo, timing),
        _stage_by_worker(timing),
        _stage_by_pair(timing),
        _stalling(timing),
        _oldest(slo, timing),
        *_processes(timing),
        _balance(timing),
        _transfers(timing),
        _leaks(timing),
        *_telemetry(timing),
        *telemetry.alerts(slo, timing),
    )
    return tuple(replace(alert, places=places) for alert in made)


# -- users -----------------------------------------------------------------------------------------

_BURN_NAMES = {"ttft": "PDTtft", "token_gap": "PDTokenGap", "errors": "PDError"}
_MODEL = f"{{{{ $labels.{names.MODEL} }}}}"


def _burns(slo: Slo, timing: Timing) -> list[Alert]:
    made: list[Alert] = []
    for objective in rec.objectives(slo):
        for kind, severity, burns, hold in (
            ("Fast", Severity.PAGE, PAGE_BURNS, "2m"),
            ("Slow", Severity.TICKET, TICKET_BURNS, "15m"),
        ):
            rates = " or ".join(f"{rate:g} times over {long}" for long, _, rate in burns)
            made.append(
                Alert(
                    name=f"{_BURN_NAMES[objective.key]}BudgetBurn{kind}",
                    expr="\nor\n".join(_burn(objective, *burn) for burn in burns),
                    severity=severity,
                    hold=timing.hold(hold),
                    keep=timing.hold("5m"),
                    summary=f"{_MODEL} uses up its budget for {objective.title} "
                    + ("in days" if kind == "Fast" else "within the month"),
                    description=f"{objective.promise} More miss it than the budget allows: "
                    f"{rates}.",
                    board=links.OVERVIEW,
                    panel=rec.burn_panel(objective),
                    chosen=((v.MODEL, _MODEL),),
                )
            )
    return made


def _burn(objective: rec.Objective, long: str, short: str, rate: float) -> str:
    """Both windows burn, and not with a handful of misses. The short one ends the alert soon."""
    slo = queries.equal("slo", objective.key)
    limit = f"{rate:g} * {objective.budget:g}"
    missed = queries.series(rec.error_ratio(long), slo)
    return (
        f"({missed} > {limit}"
        f"\n  and {queries.series(rec.error_ratio(short), slo)} > {limit}"
        f"\n  and {missed} * {queries.series(rec.events(long), slo)} >= "
        f"{_at_least(objective.least_missed)})"
    )


def _at_least(count: int) -> str:
    """A limit for a count that is worked out: it is a little more or less than a whole number."""
    return f"{count - 0.5:g}"


# -- stages ----------------------------------------------------------------------------------------


def _above_baseline(mean: str, baseline: str) -> str:
    return f"{mean} > {STALLED_TIMES} * {baseline}\n  and {mean} - {baseline} > {STALLED_ABOVE_S:g}"


def _enough(histogram: str, by: tuple[str, ...], timing: Timing) -> str:
    count = f"{histogram}_count"
    recent = queries.number(count, by, timing.window(rec.RECENT))
    baseline, age = timing.window(rec.BASELINE), timing.window(rec.BASELINE_AGE)
    before = queries.total(f"increase({count}[{baseline}] offset {age})", by)
    short = queries.equal("le", queries.edge_label(STALLED_ABOVE_S))
    within = queries.number(
        queries.series(f"{histogram}_bucket", short), by, timing.window(rec.RECENT)
    )
    on = f"on ({', '.join(by)})"
    return (
        f"  and {on} {recent} >= {_at_least(LEAST_RECENT)}\n"
        f"  and {on} {recent} - {within} >= {_at_least(LEAST_SLOW)}\n"
        f"  and {on} {before} >= {_at_least(LEAST_BEFORE)}"
    )


def _stage_by_worker(timing: Timing) -> Alert:
    by = ("stage", "role", "instance")
    return Alert(
        name="PDStageStalledOnWorker",
        expr=f"{_above_baseline(rec.STAGE_MEAN, rec.STAGE_BASELINE)}\n"
        f"{_enough(names.STAGE_DURATION, by, timing)}",
        severity=Severity.TICKET,
        hold=timing.hold("2m"),
        keep=timing.hold("5m"),
        summary="{{ $labels.stage }} takes much longer than usual on {{ $labels.instance }}",
        description=f"Its mean over {rec.RECENT} is more than {STALLED_TIMES} times that of the "
        f"{rec.BASELINE} before, on this worker, and {STALLED_ABOVE_S:g} s above it.",
        board=links.STAGES,
        panel="Stages slower than usual by worker",
        stage="{{ $labels.stage }}",
        worker="{{ $labels.instance }}",
        chosen=((v.WORKER, "{{ $labels.instance }}"),),
    )


def _stage_by_pair(timing: Timing) -> Alert:
    by = ("stage", "source", "destination")
    return Alert(
        name="PDStageStalledOnPair",
        expr=f"{_above_baseline(rec.PAIR_MEAN, rec.PAIR_BASELINE)}\n"
        f"{_enough(names.PAIR_STAGE_DURATION, by, timing)}",
        severity=Severity.TICKET,
        hold=timing.hold("2m"),
        keep=timing.hold("5m"),
        summary="{{ $labels.stage }} takes much longer than usual from {{ $labels.source }} to "
        "{{ $labels.destination }}",
        description=f"Its mean over {rec.RECENT} is more than {STALLED_TIMES} times that of the "
        f"{rec.BASELINE} before, for this pair, and {STALLED_ABOVE_S:g} s above it.",
        board=links.WORKERS,
        panel="Hand-overs slower than usual by pair",
        stage="{{ $labels.stage }}",
        worker="{{ $labels.destination }}",
        chosen=((v.WORKER, "{{ $labels.destination }}"),),
    )


def _stalling(timing: Timing) -> Alert:
    window = timing.window("5m")
    stalls = queries.number(names.STALLS, ("stage",), window)
    finished = queries.number(names.FINISHED, (), window)
    return Alert(
        name="PDRequestsStalling",
        expr=f"{stalls} >= {_at_least(STALLING_LEAST)}\n"
        f"  and {stalls} / scalar({finished}) > {STALLING_SHARE:g}",
        severity=Severity.TICKET,
        hold=timing.hold("2m"),
        keep=timing.hold("5m"),
        summary="Many requests stall in {{ $labels.stage }}",
        description=f"The verdict on more than {STALLING_SHARE:.0%} of the requests that finished "
        "within 5m names this stage: it exceeded its own baseline, scaled to their tokens.",
        board=links.STAGES,
        panel="Share of requests that stall by stage",
        stage="{{ $labels.stage }}",
    )


def _oldest(slo: Slo, timing: Timing) -> Alert:
    generate = queries.equal("stage", GENERATE)
    others = f'stage!="{GENERATE}"'
    on_worker, anywhere = names.OPEN_OLDEST_BY_WORKER, names.OPEN_OLDEST

    def too_old(metric: str) -> str:
        return (
            f"{queries.series(metric, others)} > {slo.oldest_s:g} "
            f"or {queries.series(metric, generate)} > {slo.oldest_generate_s:g}"
        )

    blamed = f'label_replace({too_old(on_worker)}, "worker", "$1", "instance", "(.+)")'
    return Alert(
        name="PDOldestRequestTooOld",
        # Where no worker is known to have to end the stage, by stage alone.
        expr=f"{blamed}\nor\n(({too_old(anywhere)})\n  unless on (stage) ({too_old(on_worker)}))",
        severity=Severity.PAGE,
        hold=timing.hold("1m"),
        keep=timing.hold("1m"),
        summary="A request has been in {{ $labels.stage }} for too long"
        "{{ with $labels.worker }} on {{ . }}{{ end }}",
        description=f"Older in its stage than {slo.oldest_s:g} s ({slo.oldest_generate_s:g} s in "
        f"{GENERATE}). Such a request has no trace yet.",
        board=links.STAGES,
        panel="Oldest open request by stage and worker",
        stage="{{ $labels.stage }}",
    )


# -- processes -------------------------------------------------------------------------------------


def _processes(timing: Timing) -> tuple[Alert, ...]:
    owner = ("role", "instance")
    silent = queries.highest(names.PROGRESS_AGE, owner)
    running = queries.total(names.RUNNING, owner)
    steps = queries.number(names.STEPS, owner, timing.window("2m"))
    lost = queries.highest(
        queries.series(names.PROCESS_STATE, queries.equal("state", ProcessState.LOST.value)), owner
    )
    ready = names.PROCESS_READY
    starting = timing.window(STARTING)
    was_ready = queries.highest(f"max_over_time({ready}[{starting}])", owner)
    was_there = queries.highest(f"{ready} offset {starting}", owner)
    return (
        Alert(
            name="PDWorkerNotProgressing",
            expr=f"{silent} > {SILENT_S}\nor\n({running} > 0 and {steps} == 0)",
            severity=Severity.PAGE,
            hold=timing.hold("1m"),
            keep=timing.hold("2m"),
            summary="{{ $labels.instance }} is up and does not progress",
            description=f"Its loop has not gone round for more than {SILENT_S} s, or it has "
            "requests in its batch and made no forward pass for 2m.",
            board=links.WORKERS,
            panel="Standing still",
            worker="{{ $labels.instance }}",
            chosen=((v.WORKER, "{{ $labels.instance }}"),),
        ),
        Alert(
            name="PDProcessDown",
            expr=f"{lost} == 1\nor\n(min by (role, instance) ({ready}) == 0\n"
            # One that is new has yet to load its model.
            f"  unless ({was_ready} == 0 unless {was_there}))",
            severity=Severity.PAGE,
            hold=timing.hold("1m"),
            keep=timing.hold("3m"),
            summary="{{ $labels.instance }} is lost or not ready",
            description="It was killed and nothing took its place, or the gateway gives it no "
            f"requests. A new one has {STARTING} to become ready; one that was told to stop is not "
            "missed.",
            board=links.OVERVIEW,
            panel="Processes",
            worker="{{ $labels.instance }}",
            chosen=((v.WORKER, "{{ $labels.instance }}"),),
        ),
    )


def _balance(timing: Timing) -> Alert:
    """Requests queue for one pool while the other has next to none."""
    window = timing.window("5m")

    def each(stages: tuple[str, ...], role: Role) -> str:
        queued = queries.series(names.OPEN, queries.any_of("stage", stages))
        waiting = queries.total(f"avg_over_time({queued}[{window}])")
        alive = queries.series(
            names.PROCESS_STATE,
            queries.equal("role", role.value),
            queries.equal("state", ProcessState.ALIVE.value),
        )
        return f"{waiting} / {queries.total(alive)}"

    prefill, decode = (each(POOLS[role], role) for role in (Role.PREFILL, Role.DECODE))

    def short_of(full: str, idle: str, stage: str) -> str:
        condition = f"{full} > {WAITING_EACH:g} and {idle} < {IDLE_EACH:g}"
        return f'label_replace({condition}, "stage", "{stage}", "", "")'

    return Alert(
        name="PDPoolsOutOfBalance",
        expr=f"{short_of(prefill, decode, 'prefill.queue')}\nor\n"
        f"{short_of(decode, prefill, 'decode.reserve')}",
        severity=Severity.TICKET,
        hold=timing.hold("10m"),
        keep=timing.hold("5m"),
        summary="Requests queue in {{ $labels.stage }} and none for the other pool",
        description=f"On average over 5m more than {WAITING_EACH:g} requests wait for each worker "
        f"of one pool, and less than {IDLE_EACH:g} for each of the other.",
        board=links.WORKERS,
        panel="Requests waiting for each worker of a pool",
        stage="{{ $labels.stage }}",
    )


# -- KV --------------------------------------------------------------------------------------------


def _transfers(timing: Timing) -> Alert:
    failures = queries.number(names.COPY_FAILURES, ("source", "destination"), timing.window("10m"))
    return Alert(
        name="PDTransferFailing",
        expr=f"{failures} > 0",
        severity=Severity.TICKET,
        hold=timing.hold("0s"),
        keep=timing.hold("5m"),
        summary="KV does not arrive from {{ $labels.source }} at {{ $labels.destination }}",
        description="Within 10m at least one attempt ended in the hand-over of its KV.",
        board=links.WORKERS,
        panel="Failed hand-overs by pair",
        stage="transfer",
        worker="{{ $labels.destination }}",
        chosen=((v.WORKER, "{{ $labels.destination }}"),),
    )


def _leaks(timing: Timing) -> Alert:
    window = timing.window("10m")
    owner = ("role", "instance")
    kept_back = queries.highest(f"min_over_time({names.KV_HELD}[{window}])", owner)
    idle = queries.highest(f"max_over_time({names.IN_FLIGHT}[{window}])", owner)
    accounted = queries.total(f"{names.KV_PAGES} or {names.KV_HELD}", owner)
    capacity = queries.highest(names.KV_CAPACITY, owner)
    return Alert(
        name="PDKvLeaking",
        expr=f"min_over_time(({capacity} - {accounted})[{window}:]) > 0\nor\n"
        f"({kept_back} > 0 and {idle} == 0)",
        severity=Severity.TICKET,
        hold=timing.hold("2m"),
        keep=timing.hold("0s"),
        summary="{{ $labels.instance }} keeps KV pages that no request holds",
        description="For 10m some of its pages were neither free nor used, reserved, cached or "
        "held back; or it held no request for 10m and pages were still held back.",
        board=links.WORKERS,
        panel="KV pages held back",
        worker="{{ $labels.instance }}",
        chosen=((v.WORKER, "{{ $labels.instance }}"),),
    )


# -- telemetry -------------------------------------------------------------------------------------


def _telemetry(timing: Timing) -> tuple[Alert, ...]:
    def job(name: str) -> str:
        return queries.series(names.UP, queries.equal("job", name))

    jobs = (job(name) for name in (names.AGENT_JOB, names.GATEWAY_JOB))
    by_job = "\nor\n".join(f"{up} == 0\nor\nabsent({up})" for up in jobs)
    window = timing.window("10m")
    finished = queries.number(names.FINISHED, (), window)
    root_calls = queries.series(names.SPAN_CALLS, *names.ROOT)
    # A rate does not see what a series begins with: after a start that may be all there is.
    arrived = (
        f"sum (rate({root_calls}[{window}])) > 0 "
        f"or count ({root_calls} unless {root_calls} offset {window}) > 0"
    )
    dropped = queries.number(names.AGENT_DROPPED, ("instance", "reason"), window)
    unwritten = queries.number(names.AGENT_LINES_LOST, ("instance",), window)
    faults = queries.number(names.AGENT_ERRORS, ("instance",), window)
    missed = queries.number(
        queries.series(names.AGENT_RECORDS, queries.any_of("what", ("missed", "torn"))),
        ("instance", "what"),
        window,
    )
    incomplete, ended = (
        queries.number(name, ("instance",), window)
        for name in (names.AGENT_INCOMPLETE, names.AGENT_REQUESTS)
    )
    return (
        Alert(
            name="PDTelemetryAbsent",
            expr=by_job,
            severity=Severity.PAGE,
            hold=timing.hold("2m"),
            keep=timing.hold("0s"),
            summary="No metrics of {{ $labels.job }}"
            "{{ with $labels.instance }} at {{ . }}{{ end }}",
            description="Prometheus cannot scrape it, or knows no such target. Every other alert "
            "is blind there.",
            board=links.OVERVIEW,
            panel="Telemetry",
        ),
        Alert(
            name="PDSpanMetricsMissing",
            expr=f"{finished} > {LEAST_FINISHED} unless ({arrived})",
            severity=Severity.TICKET,
            hold=timing.hold("5m"),
            keep=timing.hold("0s"),
            summary="Requests finish, and no span metrics say so",
            description="The agents count finished requests and the collector's span metrics have "
            "had none for 10m: traces do not arrive.",
            board=links.OVERVIEW,
            panel="Finished and traced requests",
        ),
        Alert(
            name="PDSpansLost",
            expr="\nor\n".join(f"{lost} > 0" for lost in (dropped, unwritten, missed, faults)),
            severity=Severity.TICKET,
            hold=timing.hold("0s"),
            keep=timing.hold("5m"),
            summary="The agent {{ $labels.instance }} loses spans or records",
            description="Within 10m spans were dropped, requests could not be written, records "
            "were overwritten before they were read, or a fault of the agent cost some.",
            board=links.OVERVIEW,
            panel="What the agents lost",
        ),
        Alert(
            name="PDRequestsIncomplete",
            expr=f"{incomplete} >= {_at_least(LEAST_INCOMPLETE)} "
            f"and {incomplete} / {ended} > {INCOMPLETE_SHARE:g}",
            severity=Severity.TICKET,
            hold=timing.hold("2m"),
            keep=timing.hold("5m"),
            summary="Traces of the agent {{ $labels.instance }} lack something",
            description=f"Some marks of more than {INCOMPLETE_SHARE:.0%} of the requests that "
            "finished within 10m are missing. Verdicts on them are uncertain.",
            board=links.OVERVIEW,
            panel="Incomplete requests",
        ),
        Alert(
            name="PDAgentLagging",
            expr=f"{names.AGENT_LAG} > {LAG_S}\nor\n{names.AGENT_POLL_AGE} > {POLL_AGE_S}",
            severity=Severity.TICKET,
            hold=timing.hold("2m"),
            keep=timing.hold("0s"),
            summary="The agent {{ $labels.instance }} is behind",
            description=f"It has not read the rings to their end for more than {LAG_S} s, or its "
            f"loop has not gone round for {POLL_AGE_S} s. What it shows is old.",
            board=links.OVERVIEW,
            panel="How far the agents are behind",
        ),
    )
