"""What the terminal shows: a golden view, honest bars, and no id that steers the terminal."""

from __future__ import annotations

import io
import random
import re
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from pdtrace import semconv as a
from pdtrace.analysis.sources import Problems, Recording
from pdtrace.analysis.timeline import UNEXPLAINED, Timeline, build_timeline
from pdtrace.analysis.verdict import Verdict, judge_all
from pdtrace.check import check_recording
from pdtrace.duration import seconds_text
from pdtrace.spans import AttrValue, Event, Trace
from pdtrace.stages import CHAINS, STAGES, Mode, Outcome
from pdtrace.terminal.palette import COLOURS, LETTERS
from pdtrace.terminal.render import check_view, clean, stages_view, summary_table, why_view
from pdtrace.terminal.waterfall import LABEL_WIDTH, draw
from tests.support.copies import replace
from tests.support.pd_traces import HEALTHY_S, Story, noisy, retried


def shown(view: RenderableType, width: int = 100, *, encoding: str = "utf-8") -> str:
    """Plain text without trailing blanks."""
    buffer = io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="\n")
    console = Console(file=buffer, width=width, highlight=False, markup=False, emoji=False)
    console.print(view)
    buffer.flush()
    raw = buffer.buffer
    assert isinstance(raw, io.BytesIO)
    text = raw.getvalue().decode(encoding)
    return "\n".join(line.rstrip() for line in text.splitlines())


def judged(story: Story, peers: int = 12) -> tuple[Timeline, Verdict]:
    usual = [
        replace(Story(request_id=f"peer-{i}"), start_s=float(i), prompt_tokens=100 + i % 2)
        for i in range(peers)
    ]
    timelines = [build_timeline(s.trace()) for s in (*usual, story)]
    return timelines[-1], judge_all(timelines)[-1]


def stalled() -> Story:
    waits = {
        "decode.reserve": {
            a.WAIT_REASON.key: "kv_pages",
            a.WAIT_NEEDED.key: 12,
            a.WAIT_FREE.key: 3,
            a.WAIT_BLOCKER.key: "req-17",
        }
    }
    return Story(request_id="req-23", waits=waits, gap_s=0.2).stalled("decode.reserve", 1.5)


GOLDEN = """\
req-23 stalled in decode.reserve: 1.50 s instead of the usual 2.00 ms; the excess is 58 %
of the request. Needed 12 KV pages, 3 free; behind req-17. Without this excess it would
have taken 1.08 s instead of 2.58 s.
Decode KV is full: add decode workers or pages, or cap max_tokens.

completed, HTTP 200 · pd · prefill-0 → decode-0
took 2.58 s · TTFT 1.68 s · TPOT 29.0 ms · 100 tokens in, 32 out
trace d3f55dcbdb6f98a141ef96f5186c28c8 · 2025-10-09 08:53:20.000 UTC

          0              500 ms          1 s            1.5 s           2 s
          ┼──────────────┼───────────────┼──────────────┼───────────────┼─────────────────
gateway   I                                                   t                          E
prefill   b░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░QP███
transfer                                                     C
decode    K░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░    nZ░░░░░░G████████████████████
          ▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔▔ decode.reserve 1.50 s

   stage                   time   share                        usual     above
I  gateway.ingest       4.00 ms   0.2 %                      3.98 ms  +19.9 µs
W  gateway.queue         500 µs  <0.1 %                       500 µs
R  gateway.route        20.0 µs  <0.1 %                      20.0 µs
D  gateway.dispatch      150 µs  <0.1 %                       150 µs
d  hop.dispatch          600 µs  <0.1 %                       600 µs
K  decode.reserve        1.50 s  58.3 %  ━━━━━━━━━━          2.00 ms   +1.50 s  ◀
p  hop.publish           700 µs  <0.1 %                       700 µs
Q  prefill.queue        30.0 ms   1.2 %                      30.0 ms
P  prefill.compute       120 ms   4.7 %  ━                    119 ms   +597 µs
T  transfer             8.00 ms   0.3 %                      8.00 ms
n  hop.notice           6.00 ms   0.2 %                      6.00 ms
B  decode.queue         4.00 ms   0.2 %                      4.00 ms
F  decode.first          200 µs  <0.1 %                       200 µs
t  hop.token            1.00 ms  <0.1 %                      1.00 ms
G  decode.generate       899 ms  34.9 %  ━━━━━━
Z    decode.gap          200 ms   7.8 %  ━                       0 s   +200 ms
     the rest            699 ms  27.1 %  ━━━━━                699 ms
E  gateway.finish       2.00 ms   0.1 %                      2.00 ms
   unexplained              0 s   0.0 %
   total                 2.58 s   100 %
b  prefill.bootstrap     1.50 s  beside
C  transfer.copy        5.33 ms  beside
usual: median of 12 other completed requests, scaled to its tokens; confidence high

Waits
  decode.reserve from 5.27 ms for 1.50 s: needed 12 KV pages, 3 free; behind req-17

Gaps between tokens
  200 ms at 1.69 s: no cause was recorded
"""

GOLDEN_ASCII_LANES = """\
          0            500 ms        1 s          1.5 s         2 s
          +------------+-------------+------------+-------------+---------------
gateway   I                                            t                       E
prefill   b........................................QP===
transfer                                               C
decode    K........................................    GZ....G==================
          ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^ decode.reserve 1.50 s

"""


def test_view_of_a_stalled_request() -> None:
    assert shown(why_view(*judged(stalled()), width=90), 90) + "\n" == GOLDEN


def test_lanes_in_ascii() -> None:
    text = shown(why_view(*judged(stalled()), width=80, ascii_only=True), 80, encoding="ascii")
    lanes = text.splitlines()
    first = next(i for i, line in enumerate(lanes) if line.startswith("          0"))
    assert "\n".join(lanes[first : first + 8]) + "\n" == GOLDEN_ASCII_LANES


@pytest.mark.parametrize("width", [80, 100, 120, 200])
@pytest.mark.parametrize("mode", list(Mode))
def test_views_fit_their_width(width: int, mode: Mode) -> None:
    rng = random.Random(2)
    stories = [noisy(f"req-{i}", rng, mode) for i in range(8)]
    stories[3] = stories[3].stalled("decode.gap", 2.0)
    timelines = [build_timeline(story.trace()) for story in stories]
    for timeline, verdict in zip(timelines, judge_all(timelines), strict=True):
        text = shown(why_view(timeline, verdict, width=width), width)
        assert max(map(len, text.splitlines())) <= min(width, 120)
        rows = [line for line in text.splitlines() if "█" in line]
        assert rows, text


@pytest.mark.parametrize("width", [50, 60, 66, 72, 80, 120])
def test_names_and_numbers_are_never_cut(width: int) -> None:
    timeline, verdict = judged(stalled())
    text = shown(why_view(timeline, verdict, width=width), width)
    table = text[text.index("gateway.ingest") :]
    assert "…" not in table[: table.index("total")]
    for part in timeline.parts:
        row = next(line for line in table.splitlines() if part.name in line)
        assert seconds_text(part.ns) in row
    summary = shown(summary_table([(timeline, verdict)], width=width), width)
    assert "…" not in summary
    assert {"req-23", "decode.reserve"} <= set(summary.split())


def test_table_shows_every_stage_and_sums_to_the_whole() -> None:
    timeline, verdict = judged(stalled())
    text = shown(why_view(timeline, verdict, width=100))
    for part in timeline.parts:
        assert any(
            part.name in line and seconds_text(part.ns) in line for line in text.splitlines()
        )
    total = next(line for line in text.splitlines() if line.split()[:1] == ["total"])
    assert total.split("  ")[-1].strip() == "100 %"
    assert seconds_text(timeline.total_ns) in total


def test_unexplained_time_is_drawn_and_told() -> None:
    trace = Story().stalled("transfer", 1.0).trace()
    spans = tuple(span for span in trace.spans if not span.name.startswith("transfer"))
    timeline = build_timeline(replace(trace, spans=spans))
    (verdict,) = judge_all([timeline])
    text = shown(why_view(timeline, verdict, width=100))
    assert "no stage" in text
    assert "missing_stage: a completed request lacks transfer" in text
    assert "not covered by any stage (missing: transfer)" in text


def test_doubts_stand_beside_the_verdict() -> None:
    timeline, verdict = judged(stalled(), peers=2)
    text = shown(why_view(timeline, verdict, width=100, notes=["The end of x is missing."]))
    assert "confidence low" in text
    assert "Compared with only 2 requests" in text
    assert "The end of x is missing." in text


def test_time_that_another_stage_owns_is_told() -> None:
    text = shown(why_view(*judged(Story().stalled("hop.token", 0.2)), width=100))
    expected = "counted for hop.token, which ran at the same time: decode.generate 201 ms"
    assert expected in text


def test_request_that_ended_early_shows_where() -> None:
    story = replace(stalled(), outcome=Outcome.TIMED_OUT, reason="deadline", ends_in="transfer")
    text = shown(why_view(*judged(story), width=100))
    assert "req-23 timed out (deadline) in transfer: 8.00 ms in that stage," in text
    assert "timed_out (deadline), HTTP 504" in text
    assert "prefill.compute" in text
    assert "decode.generate" not in text.split("What this")[0].split("usual")[1]


def test_trace_without_spans_has_a_view() -> None:
    timeline = build_timeline(replace(Story().trace(), spans=()))
    (verdict,) = judge_all([timeline])
    assert "no stage was recorded" in shown(why_view(timeline, verdict, width=80))


def test_ids_cannot_steer_the_terminal() -> None:
    evil = "req\x1b[31m\x07\x9b2J\u202e\u200b\r\n\ud800[bold]x[/bold]:smile:"
    timeline, verdict = judged(replace(stalled(), request_id=evil))
    text = shown(why_view(timeline, verdict, width=120), 120)
    assert not any(char in text for char in "\x1b\x07\x9b\u202e\u200b\r\ud800")
    assert "req\\x1b[31m\\x07\\x9b2J\\u202e\\u200b\\x0d\\x0a\\ud800[bold]x[/bold]:smile:" in (
        text.replace("\n", "")
    )


@given(st.text())
def test_cleaned_text_is_printable_and_bounded(text: str) -> None:
    assert all(char.isprintable() for char in clean(text, 50))
    assert len(clean(text, 50)) <= 50


def test_colours_are_written_only_for_terminals_that_take_them() -> None:
    buffer = io.StringIO()
    view = why_view(*judged(stalled()), width=100)
    Console(file=buffer, width=100, force_terminal=True, color_system="truecolor").print(view)
    assert "\x1b[" in buffer.getvalue()
    assert "\x1b[" not in shown(view)


def test_every_stage_has_its_own_letter_and_colour() -> None:
    names = {stage.name for stage in STAGES} | {UNEXPLAINED}
    assert set(LETTERS) == set(COLOURS) == names
    assert len(set(LETTERS.values())) == len(names)
    assert len(set(COLOURS.values())) == len(names)


def test_every_stage_is_drawn_in_some_lane() -> None:
    for mode in Mode:
        lengths = dict.fromkeys(HEALTHY_S, 0.1)
        timeline = build_timeline(Story(mode=mode, lengths_s=lengths, gap_s=0.5).trace())
        waterfall = draw(timeline, width=200, ascii_only=False, point_at=None)
        drawn = {run.stage for lane in waterfall.lanes for run in lane.runs}
        expected = {part.name for part in timeline.parts} - {UNEXPLAINED, "hop.publish"}
        if mode is not Mode.COLOCATED:
            expected -= {"transfer"}  # shown as its queue and copy
            expected |= {"transfer.queue", "transfer.copy"}
        assert expected | {"decode.gap"} <= drawn | {"hop.dispatch"}


@settings(max_examples=60, deadline=None)
@given(st.integers(10, 240), st.integers(0, 10**6), st.booleans())
def test_lanes_are_exactly_as_wide_as_the_axis(width: int, seed: int, ascii_only: bool) -> None:
    story = noisy("r", random.Random(seed)).stalled("decode.gap", seed / 1e6)
    waterfall = draw(
        build_timeline(story.trace()), width=width, ascii_only=ascii_only, point_at="transfer"
    )
    for lane in waterfall.lanes:
        assert sum(len(run.text) for run in lane.runs) == waterfall.cells
        assert len(lane.label) < LABEL_WIDTH
    assert len(waterfall.ticks[1]) == waterfall.cells
    assert len(waterfall.ticks[0]) <= waterfall.cells
    if waterfall.pointer:
        assert len(waterfall.pointer[1]) <= waterfall.cells


def test_attempts_are_marked_on_their_own_lane() -> None:
    waterfall = draw(build_timeline(retried()), width=100, ascii_only=False, point_at=None)
    assert waterfall.lanes[0].label == "attempt"
    assert "".join(run.text for run in waterfall.lanes[0].runs).split() == ["1", "2"]


def test_summary_has_a_line_per_request() -> None:
    rng = random.Random(9)
    stories = [noisy(f"req-{i}", rng) for i in range(6)] + [stalled()]
    timelines = [build_timeline(story.trace()) for story in stories]
    text = shown(summary_table(list(zip(timelines, judge_all(timelines), strict=True))))
    lines = text.splitlines()
    assert len(lines) == 8
    assert "decode.reserve" in lines[-1]
    assert "needed 12 KV pages, 3 free; behind req-17" in lines[-1]
    assert all("not stalled" in line for line in lines[1:-1])


def test_check_view_marks_what_is_broken() -> None:
    trace = Story().trace()
    cut = replace(trace, spans=tuple(s for s in trace.spans if s.name != "transfer"))
    recording = Recording(
        source="x", traces=(cut,), files=1, lines=1, spans=len(cut.spans), problems=Problems()
    )
    report = check_recording(recording)
    text = shown(check_view(report))
    assert f"1 of {len(report.rules)} rules is broken: stages." in text
    [line] = [line for line in text.splitlines() if line.startswith("✗")]
    assert re.search(r"^✗  stages +completed requests have every stage +1 +1$", line)
    assert "stages: req-1: a completed request lacks transfer" in text
    assert shown(check_view(check_recording(recording), ascii_only=True), encoding="ascii")


def test_stages_view_names_every_stage_with_meaning_and_advice() -> None:
    text = " ".join(shown(stages_view()).split())
    for stage in STAGES:
        assert stage.name in text
    assert "Waits for KV pages on the decode worker" in text


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (0, "0 s"),
        (7, "7.00 ns"),
        (999, "999 ns"),
        (12_345, "12.3 µs"),
        (999_999, "1.00 ms"),
        (123_456_789, "123 ms"),
        (999_950_000, "1.00 s"),
        (3_400_000_000, "3.40 s"),
        (12_345_000_000, "12.3 s"),
        (1_234_000_000_000, "1,234 s"),
        (-5_000_000, "-5.00 ms"),
    ],
)
def test_durations_have_three_digits_and_the_unit_that_fits(ns: int, text: str) -> None:
    assert seconds_text(ns) == text


def with_attributes(trace: Trace, name: str, attributes: Mapping[str, AttrValue]) -> Trace:
    spans = tuple(
        replace(s, attributes={**s.attributes, **attributes}) if s.name == name else s
        for s in trace.spans
    )
    return replace(trace, spans=spans)


def view_of(trace: Trace, width: int = 100) -> str:
    timeline = build_timeline(trace)
    [verdict] = judge_all([timeline])
    return shown(why_view(timeline, verdict, width=width), width)


def test_gaps_are_told_with_cause_blocker_and_step() -> None:
    gap: dict[str, AttrValue] = {
        a.GAP_CAUSE.key: "interfering_prefill",
        a.GAP_CAUSE_SECONDS.key: 0.15,
        a.STEP_NUMBER.key: 42,
        a.WAIT_BLOCKER.key: "req-17",
        a.TOKEN_INDEX.key: 5,
    }
    text = view_of(with_attributes(Story(gap_s=0.2).trace(), "decode.gap", gap), 120)
    assert "before token 5: a prompt ran in the same worker: req-17 (step 42); that is" in text
    assert "150 ms of the 200 ms gap, 75 %" in " ".join(text.split())
    assert "decode.gap from" not in text  # not told twice


def test_attempts_are_told_with_the_reason_of_the_retry() -> None:
    trace = retried()
    first = next(s for s in trace.spans if s.name == "attempt")
    ended: dict[str, AttrValue] = {
        a.OUTCOME.key: "lost",
        a.OUTCOME_REASON.key: "process_lost",
        a.OUTCOME_BY.key: "prefill-0",
        a.OUTCOME_STAGE.key: "transfer",
    }
    spans = tuple(
        replace(s, attributes={**s.attributes, **ended}) if s is first else s for s in trace.spans
    )
    text = view_of(replace(trace, spans=spans))
    assert "\nAttempts\n" in text
    assert "lost with prefill-0 in transfer (process_lost)" in " ".join(text.split())


def test_steps_are_told_with_the_slowest() -> None:
    steps: dict[str, AttrValue] = {
        a.STEPS.key: 31,
        a.STEP_SLOWEST_NUMBER.key: 7,
        a.STEP_SLOWEST_SECONDS.key: 0.05,
    }
    text = view_of(with_attributes(Story().trace(), "decode.generate", steps))
    assert "decode.generate: 31 forward passes, the slowest took 50.0 ms (step 7)" in text


def test_stuck_report_is_told() -> None:
    event = Event(
        name="pd.stuck",
        time_ns=0,
        attributes={a.STUCK_SECONDS.key: 6.0, a.STUCK_AFTER_SECONDS.key: 5.0},
    )
    trace = Story(request_id="slow").stalled("transfer", 9.0).trace()
    spans = tuple(
        replace(s, events=(replace(event, time_ns=s.start_ns + 6_000_000_000),))
        if s.name == "transfer"
        else s
        for s in trace.spans
    )
    text = view_of(replace(trace, spans=spans))
    assert "\nReported as stuck\n  transfer at 6.16 s: 6.00 s old, more than 5.00 s\n" in text


def test_what_the_recording_lacks_stands_beside_the_conclusion() -> None:
    lacking: dict[str, AttrValue] = {a.INCOMPLETE.key: "decode-0 lost 123 records"}
    text = view_of(with_attributes(Story().trace(), "chat smol", lacking))
    head = text.split("\n\n")[0]
    assert "The recorder of decode-0 lost 123 records while this request was open." in head


@pytest.mark.parametrize("reason", ["worker_lost", "deadline"])
def test_worker_that_gave_no_sign_any_more_is_not_drawn_at_work(reason: str) -> None:
    """From its last sign on; a request that merely timed out was worked on until then."""
    story = replace(stalled(), outcome=Outcome.FAILED, reason=reason, ends_in="decode.generate")
    known: dict[str, AttrValue] = {a.OUTCOME_REASON.key: reason}
    text = view_of(with_attributes(story.trace(), "decode.generate", known))
    lane = next(line for line in text.splitlines() if line.startswith("decode  "))
    assert bool(re.search(r"▒{5,}✗$", lane)) is (reason == "worker_lost")
    assert bool(re.search(r"█{5,}$", lane)) is (reason == "deadline")
    assert "(lost)" not in text


def test_missing_stages_are_said_once_in_one_line() -> None:
    trace = Story().trace()
    cut = replace(
        trace, spans=tuple(s for s in trace.spans if s.name not in {"hop.notice", "decode.queue"})
    )
    text = view_of(cut)
    assert "missing_stage: a completed request lacks hop.notice, decode.queue\n" in text
    assert text.count("hop.notice") == 1
    lacking: dict[str, AttrValue] = {a.INCOMPLETE.key: "no decode.queue; no completed mark"}
    text = view_of(with_attributes(cut, "chat smol", lacking))
    assert "\nThe recording lacks 2 stages: hop.notice, decode.queue.\n" in text
    assert "\nThe recording lacks something: no completed mark.\n" in text
    assert "missing_stage" not in text
    assert text.count("hop.notice") == 1


def test_every_letter_in_the_picture_stands_in_the_table() -> None:
    for mode in Mode:
        for stage in ("decode.reserve", "transfer", "prefill.compute", "decode.generate"):
            chain = {s.name for s in CHAINS[mode]}
            story = Story(mode=mode, gap_s=0.01, preempted_s=0.02)
            story = story.stalled(stage, 5.0) if stage in chain else story
            text = view_of(story.trace())
            picture, table = text.split("\n\n")[2:4]
            lanes = [line[LABEL_WIDTH:] for line in picture.splitlines()[2:] if "▔" not in line]
            letters = {char for lane in lanes for char in lane if char.isalpha()}
            named = {line[0] for line in table.splitlines() if line[0] != " "}
            assert letters <= named, (mode, stage, text)


def test_lost_stage_is_doubtful_only_from_where_its_process_last_went_round() -> None:
    story = replace(
        Story().stalled("decode.generate", 9.0),
        outcome=Outcome.FAILED,
        reason="worker_lost",
        ends_in="decode.generate",
    )
    known: dict[str, AttrValue] = {a.OUTCOME_REASON.key: "worker_lost"}
    timeline = build_timeline(with_attributes(story.trace(), "decode.generate", known))
    [visit] = timeline.visits_of("decode.generate")
    begin_ns = timeline.started_unix_ns
    assert visit.instance is not None

    def doubtful(instance: str, *last_signs: int) -> int:
        waterfall = draw(
            timeline, width=110, ascii_only=True, point_at=None, last_signs={instance: last_signs}
        )
        [lane] = [lane for lane in waterfall.lanes if lane.label == "decode"]
        return sum(run.text.count("?") for run in lane.runs)

    whole = doubtful("decode-9", begin_ns + visit.end_ns)  # another process's
    assert whole > 50
    halfway_ns = begin_ns + (visit.begin_ns + visit.end_ns) // 2
    assert doubtful(visit.instance, halfway_ns, begin_ns) == pytest.approx(whole / 2, abs=2)
    # The one that was started in its place lived longer.
    assert doubtful(visit.instance, begin_ns + 100 * timeline.total_ns) == whole
