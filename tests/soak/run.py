"""One soak from beginning to end.

Owns the order: serve, learn the right answers while nothing is wrong, load, make mischief, stop
making it, wait until all is at rest, look, stop the server, read the recording.
"""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec

from pdtrace import semconv as a
from pdtrace.analysis.sources import read_source
from pdtrace.spans import Trace
from pdtrace.stages import ROOT_SPAN
from server.config import Settings
from tests.soak.answers import End, Ended
from tests.soak.culprit import Culprit
from tests.soak.load import Plan
from tests.soak.mischief import Mischief, kind_of, next_mischief
from tests.soak.report import Happened, Report
from tests.soak.traffic import Habits, Question, questions
from tests.soak.watch import Use, use_of_server
from tests.support import aftermath
from tests.support.completions import Ask, ask
from tests.support.server import ROOT, RunningServer

STOP_S = 120.0
MARGIN_S = 30.0
"""How much longer than its last deadline a request, or a page, may take on a busy machine."""
RECOVERY_S = 60.0
"""How long after the end of all faults clients wait for an answer behind the last one."""
PROGRESS_S = 5.0
OF_CLOCKS = frozenset({"clock", "marks", "durations", "order", "bounds", "unexplained"})
"""Rules of `pdtrace check` that compare times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A soak.

    seconds    how long the load goes on
    requests   it goes on no longer than until so many are over
    every_s    mean time between two faults; None: nothing goes wrong
    seed       of all chances but those of the machine
    """

    settings: Settings
    seconds: float
    requests: int | None = None
    seed: int
    every_s: float | None = 4.0
    habits: Habits = field(default_factory=Habits)

    @property
    def stuck_s(self) -> float:
        return self.settings.deadlines.request_s + MARGIN_S


def run_soak(scenario: Scenario, say: Callable[[str], None]) -> Report:
    """Raises AssertionError when the server does not even start or serve in peace.

    say   told of the progress, a line at a time
    """
    asked = [_ask_of(question) for question in questions()]
    run_dir = scenario.settings.run_path
    with _server(scenario.settings) as server:
        with ThreadPoolExecutor(4) as pool:
            texts = list(pool.map(partial(_text, server), asked))
        aftermath.wait_idle(server)
        before = _at_rest(server)
        known = [
            msgspec.structs.replace(question, text=text)
            for question, text in zip(questions(), texts, strict=True)
        ]
        say(f"{server.url}, {run_dir}, seed {scenario.seed}")
        with _Load(_plan(scenario, server, known)) as load:
            culprit = Culprit(run_dir, load.tell)
            made = _make_mischief(scenario, load, culprit, say)
            say("no more faults; waiting for the last answers")
            _await_recovery(load, made)
            load.finish(scenario.stuck_s + MARGIN_S)
        ended = load.ended
        not_idle: list[str] = []
        try:
            aftermath.wait_idle(server, timeout_s=scenario.settings.deadlines.await_kv_s + MARGIN_S)
        except AssertionError as error:
            not_idle.append(str(error))
        report = Report(
            seed=scenario.seed,
            seconds=scenario.seconds,
            run_dir=str(run_dir),
            requests=ended,
            happened=[_with_recovery(at_s, each, ended) for at_s, each in made],
            gateway_ends_s=culprit.gateway_ends_s,
            not_idle=not_idle,
            pages_leaked=aftermath.pages_leaked(server),
            damage=aftermath.damage(server),
            ignored=aftermath.ignored(server),
            wrong_afterwards=_ask_again(server, asked, texts),
            before=before,
            after=_at_rest(server),
            load_errors=load.errors,
        )
        say("stopping the server")
        report.exit_code = server.stop()
    say("reading the recording")
    ends = _traced(run_dir)
    report.traced = frozenset(ends)
    report.without_end = [request_id for request_id, outcome in ends.items() if not outcome]
    report.unexplained = _unexplained(run_dir, culprit.wrong_clocks)
    return report


def _plan(scenario: Scenario, server: RunningServer, known: Sequence[Question]) -> Plan:
    return Plan(
        url=server.url,
        model=server.model,
        seed=scenario.seed,
        stuck_s=scenario.stuck_s,
        habits=scenario.habits,
        questions=tuple(known),
    )


def _make_mischief(
    scenario: Scenario, load: _Load, culprit: Culprit, say: Callable[[str], None]
) -> list[tuple[float, Mischief]]:
    """Until the time is up: one fault after the other, and a line now and then."""
    chance = random.Random(scenario.seed)
    made: list[tuple[float, Mischief]] = []
    begun_s = time.monotonic()
    end_s = begun_s + scenario.seconds
    # What goes wrong last still has an answer behind it.
    last_s = end_s - min(10.0, scenario.seconds / 6)
    next_s = float("inf")
    if scenario.every_s is not None:
        next_s = begun_s + chance.uniform(0.5, 1.5) * scenario.every_s
    spoken_s = begun_s
    try:
        while (now_s := time.monotonic()) < end_s and load.is_running:
            if scenario.requests is not None and len(load.ended) >= scenario.requests:
                break
            culprit.go_on()
            if next_s <= now_s < last_s:
                assert scenario.every_s is not None
                mischief = next_mischief(chance, culprit.instances())
                made.append((time.monotonic(), mischief))
                culprit.do(mischief)
                next_s = now_s + chance.uniform(0.5, 1.5) * scenario.every_s
            if now_s >= spoken_s + PROGRESS_S:
                spoken_s = now_s
                say(_progress(now_s - begun_s, scenario.seconds, load.ended, made))
            time.sleep(0.05)
    finally:
        culprit.stop()
    return made


def _await_recovery(load: _Load, made: Sequence[tuple[float, Mischief]]) -> None:
    """Let clients go on asking until one has an answer behind the last fault: a process that died
    again and again comes back the later, and later still on a slow machine."""
    end_s = time.monotonic() + RECOVERY_S
    while made and load.is_running and time.monotonic() < end_s:
        at_s, mischief = made[-1]
        if _with_recovery(at_s, mischief, list(load.ended)).recovery_s is not None:
            return
        time.sleep(0.1)


def _progress(
    now_s: float, of_s: float, ended: Sequence[Ended], made: Sequence[tuple[float, Mischief]]
) -> str:
    counts = Counter(str(request.end) for request in ended)
    numbers = ", ".join(f"{counts[end]} {end}" for end in End if counts[end])
    last = f"; {len(made)} faults, the last: {made[-1][1]}" if made else ""
    return f"{now_s:4.0f} of {of_s:.0f} s: {len(ended)} requests ({numbers}){last}"


def _with_recovery(at_s: float, mischief: Mischief, ended: Sequence[Ended]) -> Happened:
    answered = [
        request.ended_s - at_s
        for request in ended
        if request.begun_s >= at_s and request.end is End.COMPLETED
    ]
    return Happened(
        at_s=at_s,
        kind=kind_of(mischief),
        what=str(mischief),
        recovery_s=min(answered, default=None),
    )


def _ask_of(question: Question) -> Ask:
    return Ask(prompt=question.prompt, max_tokens=question.max_tokens)


def _text(server: RunningServer, each: Ask) -> str:
    answer = ask(server, each)
    assert answer.status == 200, f"in peace a request failed with {answer.status}: {answer.body}"
    return answer.text


def _ask_again(server: RunningServer, asked: Sequence[Ask], texts: Sequence[str]) -> list[str]:
    """Every question once more: what is not answered as in the beginning."""
    wrong: list[str] = []
    for each, text in zip(asked, texts, strict=True):
        answer = ask(server, each)
        if answer.status != 200:
            wrong.append(f"status {answer.status}: {answer.body}")
        elif answer.text != text:
            wrong.append(f"got {answer.text!r}, expected {text!r}")
    return wrong


def _at_rest(server: RunningServer) -> dict[str, Use]:
    return dict(use_of_server(server.run_dir, server.process.pid))


def _traced(run_dir: Path) -> dict[str, str]:
    """Outcome of every request in the recording, by its id; empty where none was recorded."""
    return {
        str(span.attributes[a.REQUEST_ID.key]): str(span.attributes.get(a.OUTCOME.key, ""))
        for trace in read_source(run_dir).traces
        for span in trace.spans
        if span.attributes.get(a.SPAN.key) == ROOT_SPAN
    }


def _unexplained(run_dir: Path, wrong_clocks: set[int]) -> list[str]:
    """Rules that the recording breaks without a cause in it. Of requests that met a process whose
    clock was set no order of times is expected."""

    def met_a_wrong_clock(trace: Trace) -> bool:
        pids = {span.resource.attributes.get("process.pid") for span in trace.spans}
        return not pids.isdisjoint(wrong_clocks)

    allowed = {*aftermath.EXPLAINED, aftermath.NAMED}
    found = aftermath.unexplained(
        aftermath.check_report(run_dir, lambda trace: not met_a_wrong_clock(trace)),
        allowed=allowed,
    )
    if wrong_clocks:
        found += aftermath.unexplained(
            aftermath.check_report(run_dir, met_a_wrong_clock),
            allowed={*allowed, *OF_CLOCKS, "requests"},  # perhaps none has met it
        )
    return found


# -- processes ------------------------------------------------------------------------------------


@contextlib.contextmanager
def _server(settings: Settings) -> Generator[RunningServer]:
    """Stopped, or killed with all its children, on leaving."""
    run_dir = settings.run_path
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    config = run_dir.with_name(f"{run_dir.name}.settings.json")
    errors = run_dir.with_name(f"{run_dir.name}.stderr")
    config.write_bytes(msgspec.json.encode(settings))
    with errors.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.soak.serve", str(config)],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, f"the server did not start: {errors.read_text()}"
        yield RunningServer(process, run_dir, msgspec.json.decode(line))
    finally:
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=STOP_S)
        if process.poll() is None:
            process.kill()  # the children die with it
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


class _Load:
    """The load's process, and what it has said so far. Use as a context manager."""

    def __init__(self, plan: Plan) -> None:
        self.ended: list[Ended] = []
        self.errors = ""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.soak.load"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._threads = [threading.Thread(target=self._read), threading.Thread(target=self._hear)]
        for thread in self._threads:
            thread.start()
        self.tell(msgspec.json.encode(plan).decode())

    def __enter__(self) -> _Load:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for thread in self._threads:
            thread.join()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def tell(self, words: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(words + "\n")
            self._process.stdin.flush()

    def finish(self, timeout_s: float) -> None:
        """Begin nothing more; wait until every client has left."""
        self.tell("stop")
        try:
            code = self._process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.errors += f"not finished after {timeout_s:.0f} s"
            return
        if code != 0:
            self.errors += f"exit code {code}"

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.ended.append(msgspec.json.decode(line, type=Ended))

    def _hear(self) -> None:
        assert self._process.stderr is not None
        self.errors += self._process.stderr.read()
