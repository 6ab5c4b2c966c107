"""Transfer and workers: how busy, how full and how wrong each worker and each path is."""

from __future__ import annotations

from dashboards import colours, links, names, queries
from dashboards import variables as v
from dashboards.boards import against_baseline, pieces
from dashboards.rules.alerts import IDLE_EACH, SILENT_S, WAITING_EACH
from dashboards.sdk import (
    BYTES_S,
    EMPTY_WHERE,
    PERCENT,
    REQUESTS_S,
    SECONDS,
    SHORT,
    TOKENS_S,
    Board,
    Panel,
    Query,
    Row,
    bars,
    legends,
    lines,
    states,
)
from pdtrace.inflight import ProcessState
from pdtrace.slo import Slo
from pdtrace.stages import Role

PAIR = ("source", "destination")
PAIR_LEGEND = "{{source}} → {{destination}}"


def board(slo: Slo) -> Board:
    del slo
    return Board(
        uid=links.WORKERS,
        title="PD transfer and workers",
        description="Which worker, pool or path is full, slow or failing?",
        variables=v.everywhere(),
        rows=(
            Row(title="Now: is each process moving?", panels=_moving()),
            Row(title="How busy", panels=_busy()),
            Row(title="How full: KV pages", panels=_full()),
            Row(title="From worker to worker", panels=_paths()),
        ),
    )


def _of_workers(metric: str) -> str:
    return queries.series(metric, v.BY_ROLE, v.BY_WORKER)


def _moving() -> tuple[Panel, ...]:
    return (
        bars(
            "Since the loop last went round",
            "How long ago each process's loop last went round, read from its ring: an idle one "
            "goes round four times a second. It grows while a process is stopped.",
            "processes that ended, and whether the loop did anything useful: see standing still. "
            "Model does not apply.",
            SECONDS,
            Query(
                expr=queries.highest(_of_workers(names.PROGRESS_AGE), ("role", "instance")),
                legend="{{instance}}",
            ),
            steps=((None, colours.GOOD), (2, colours.WARN), (10, colours.BAD)),
            links=(links.worker(links.STAGES),),
            width=8,
        ),
        lines(
            "Requests held by worker",
            f"Requests that each process holds, in any state. {EMPTY_WHERE}transfer alone is "
            "chosen: it has copies.",
            "which they are: `pdtrace top`. Model does not apply.",
            SHORT,
            Query(
                expr=queries.total(_of_workers(names.IN_FLIGHT), ("instance",)),
                legend="{{instance}}",
            ),
            links=(links.worker(links.STAGES),),
            width=8,
            table=False,
            reaches=1,
        ),
        _standing(),
    )


def _standing() -> Panel:
    owner = ("role", "instance")
    silent = queries.highest(_of_workers(names.PROGRESS_AGE), owner)
    running = queries.total(_of_workers(names.RUNNING), owner)
    passes = queries.number(_of_workers(names.STEPS), owner, queries.RATE)
    idle = f"{running} > bool 0 and {passes} == 0"
    texts = {
        "0": ("moving", colours.STATES[ProcessState.ALIVE.value]),
        "1": ("batch stands still", colours.STATES[ProcessState.STALLED.value]),
        "2": ("loop stands still", colours.STATES[ProcessState.LOST.value]),
    }
    return states(
        "Standing still",
        f"Each process over time: moving, its loop silent for more than {SILENT_S} s, or requests "
        "in its batch and no forward pass in the window.",
        "processes that ended: see processes on PD overview. Model does not apply.",
        Query(
            expr=f"2 * ({silent} > bool {SILENT_S}) > 0 or {idle} or 0 * {silent}",
            legend="{{instance}}",
        ),
        texts,
        width=8,
    )


def _busy() -> tuple[Panel, ...]:
    numbers = {
        "waiting": names.WAITING,
        "reserving": names.RESERVING,
        "transferring": names.TRANSFERRING,
        "copy jobs": names.COPY_JOBS,
    }
    queues = " or ".join(
        f'label_replace({total}, "queue", "{queue}", "", "")'
        for queue, total in (
            (queue, queries.total(_of_workers(metric), ("instance",)))
            for queue, metric in numbers.items()
        )
    )
    return (
        lines(
            "Running batch by worker",
            f"Requests in the running batch at this moment. {EMPTY_WHERE}no chosen worker has one.",
            "how long a step takes with them. Model does not apply.",
            SHORT,
            Query(
                expr=queries.total(_of_workers(names.RUNNING), ("instance",)), legend="{{instance}}"
            ),
            links=(links.worker(links.STAGES),),
            width=8,
            table=False,
            reaches=1,
        ),
        lines(
            "Batch size by worker",
            f"Mean requests per forward pass. {EMPTY_WHERE}no chosen worker has a model.",
            "the spread behind a mean. Model does not apply, and role only through worker.",
            SHORT,
            Query(
                expr=queries.mean(names.STEP_BATCH, v.BY_WORKER, by=("kind", "instance")),
                legend="{{instance}} {{kind}}",
            ),
            links=(links.worker(links.STAGES),),
            width=8,
            table=False,
        ),
        lines(
            "Forward pass by worker",
            f"p99 of the time of a forward pass, of all of them. {EMPTY_WHERE}no chosen worker has "
            "a model.",
            "which requests were in it. Model does not apply, and role only through worker.",
            SECONDS,
            Query(
                expr=queries.quantile(
                    0.99, names.STEP_DURATION, v.BY_WORKER, by=("kind", "instance")
                ),
                legend="{{instance}} {{kind}}",
            ),
            links=(links.worker(links.STAGES),),
            width=8,
            table=False,
        ),
        lines(
            "Tokens per second",
            "Tokens of served requests: prompts, answers, and prompt tokens found in a cache.",
            "tokens of requests that failed or are in flight. Model, role and worker do not apply.",
            TOKENS_S,
            Query(expr=queries.per_second(names.GATEWAY_TOKENS, ("type",)), legend="{{type}}"),
            width=8,
            table=False,
        ),
        lines(
            "Time per output token by model",
            "Quantiles of (last minus first write) / (tokens - 1), of streams.",
            "single gaps: see gap between tokens on PD overview. Role and worker do not apply.",
            SECONDS,
            *pieces.p50_and_p99(
                names.GATEWAY_TPOT,
                v.BY_MODEL,
                model=names.MODEL,
            ),
            shades=pieces.quantile_shades(),
            width=8,
        ),
        lines(
            "CPU that recording takes",
            "Part of one core that each process spends on recording.",
            "what the process itself takes: no metric of this project has CPUs and GPUs; a node or "
            "GPU exporter does. Model does not apply.",
            PERCENT,
            Query(
                expr=queries.highest(_of_workers(names.RECORDING_SHARE), ("instance",)),
                legend="{{instance}}",
            ),
            links=(links.worker(links.STAGES),),
            width=8,
            table=False,
        ),
        lines(
            "Queues by worker",
            "Requests that wait for a place in the batch, for pages or the other leg, or for their "
            "KV, and copy jobs in the transfer process. They overlap, so they are not stacked. "
            f"{EMPTY_WHERE}no chosen worker has one.",
            "the gateway's queue: open requests by stage has it. Model does not apply.",
            SHORT,
            Query(expr=queues, legend="{{instance}} {{queue}}"),
            links=(links.worker(links.STAGES),),
            reaches=1,
        ),
        _pools(),
    )


def _pools() -> Panel:
    def each(role: Role, stages: tuple[str, ...]) -> str:
        waiting = queries.total(queries.series(names.OPEN, queries.any_of("stage", stages)))
        alive = queries.series(
            names.PROCESS_STATE,
            queries.equal("role", role.value),
            queries.equal("state", ProcessState.ALIVE.value),
        )
        return f"{waiting} / {queries.total(alive)}"

    return lines(
        "Requests waiting for each worker of a pool",
        "How many requests wait for prefill, and how many for decode, by the workers of the pool "
        f"that are alive. One pool above the red line, {WAITING_EACH:g}, and the other below the "
        f"blue one, {IDLE_EACH:g}, is out of balance.",
        "which worker they wait for, and the gateway's queue. Model, role and worker do not apply.",
        SHORT,
        *(
            Query(expr=each(role, stages), legend=role.value)
            for role, stages in pieces.POOLS.items()
        ),
        steps=((None, "transparent"), (IDLE_EACH, colours.CALM), (WAITING_EACH, colours.BAD)),
        width=12,
        reaches=1,
    )


def _full() -> tuple[Panel, ...]:
    return (
        pieces.kv_pages("KV pages by worker and state", width=24),
        lines(
            "KV pages of all chosen workers",
            f"Pages by state. They add up to the pools, so they are stacked. {EMPTY_WHERE}no "
            "chosen worker has a pool.",
            "pages held back from reuse, which are in no state. Model does not apply.",
            SHORT,
            Query(expr=queries.total(_of_workers(names.KV_PAGES), ("state",)), legend="{{state}}"),
            colours=colours.KV,
            stacked=True,
        ),
        _held_back(),
    )


def _held_back() -> Panel:
    owner = ("role", "instance")
    held = queries.highest(_of_workers(names.KV_HELD), owner)
    busy = queries.highest(names.IN_FLIGHT, owner)
    accounted = queries.total(
        f"{_of_workers(names.KV_PAGES)} or {_of_workers(names.KV_HELD)}", owner
    )
    capacity = queries.highest(_of_workers(names.KV_CAPACITY), owner)
    return lines(
        "KV pages held back",
        "Pages that are not reused because a transfer may still touch them, those of a worker "
        "without a request once more by themselves, and pages that are in no state at all. What is "
        "left when nothing is in flight leaks. "
        f"{EMPTY_WHERE}no chosen worker has a pool.",
        "whose they were: `pdtrace why`. Model does not apply.",
        SHORT,
        Query(expr=held, legend="{{instance}} held back"),
        Query(expr=f"{held} and {busy} == 0", legend="{{instance}} held back while idle"),
        Query(expr=f"{capacity} - {accounted}", legend="{{instance}} unaccounted"),
        links=(links.worker(links.STAGES),),
        reaches=1,
    )


def _paths() -> tuple[Panel, ...]:
    transfer = queries.equal("stage", "transfer")
    outcomes = "{{prefill}} → {{decode}} {{outcome}}"
    return (
        lines(
            "KV bytes per second by pair",
            "Bytes of finished copies per second.",
            "the bandwidth while a copy runs: most of the time none does. Model, role and worker "
            "do not apply.",
            BYTES_S,
            Query(expr=queries.per_second(names.COPY_BYTES, PAIR), legend=PAIR_LEGEND),
            width=8,
            table=False,
        ),
        lines(
            "Bandwidth of a copy by pair",
            "Bytes per second of copying: of the time in which copies ran.",
            "time in the copies' queue. Model, role and worker do not apply.",
            BYTES_S,
            Query(
                expr=f"{queries.per_second(names.COPY_BYTES, PAIR)} "
                f"/ {queries.per_second(f'{names.COPY_DURATION}_sum', PAIR)}",
                legend=PAIR_LEGEND,
            ),
            width=8,
            table=False,
        ),
        lines(
            "Failed hand-overs by pair",
            "Attempts that ended in the hand-over of KV, in the window.",
            "why: pd.outcome.reason of the attempt in its trace. Model, role and worker do not "
            "apply.",
            SHORT,
            Query(expr=queries.number(names.COPY_FAILURES, PAIR, queries.RATE), legend=PAIR_LEGEND),
            steps=((None, "transparent"), (1, colours.BAD)),
            stacked=True,
            bars=True,
            links=(links.slow_in("transfer"),),
            width=8,
            table=False,
            reaches=1,
        ),
        lines(
            "KV transfer by pair",
            "p99 of what was left of the transfer when the prompt's compute had ended. Points lead "
            "to traces.",
            "copies beside compute, which cost no time. Model, role and worker do not apply.",
            SECONDS,
            Query(
                expr=queries.quantile(0.99, names.PAIR_STAGE_DURATION, transfer, by=PAIR),
                legend=PAIR_LEGEND,
                exemplar=True,
            ),
            links=(links.slow_in("transfer"),),
            width=12,
        ),
        lines(
            "Single copies by pair",
            "p99 of one copy of KV.",
            "how many a request needs, and their queue. Model, role and worker do not apply.",
            SECONDS,
            Query(expr=queries.quantile(0.99, names.COPY_DURATION, by=PAIR), legend=PAIR_LEGEND),
            width=12,
        ),
        against_baseline.by_pair(),
        lines(
            "Requests by pair and outcome",
            "Finished requests per second by the pair that served them last.",
            "requests that were never given a pair, and attempts before the last. Model, role and "
            "worker do not apply.",
            REQUESTS_S,
            Query(
                expr=queries.per_second(names.BY_PAIR, ("prefill", "decode", "outcome")),
                legend=outcomes,
            ),
            shades=legends(outcomes, "outcome", colours.OUTCOMES),
            width=12,
        ),
    )
