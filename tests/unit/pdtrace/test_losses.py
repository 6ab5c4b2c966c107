"""The book of losses: totals that outlast agents and ring files."""

from __future__ import annotations

from pathlib import Path

import msgspec

from pdtrace.clock import ClockAnchor
from pdtrace.ring.layout import Counter, RingIdentity
from pdtrace.ring.losses import (
    KINDS,
    MAX_GONE,
    MAX_OPEN_IDS,
    STATE_NAME,
    LossBook,
    Losses,
    WriterEnd,
    read_losses,
)
from pdtrace.stages import Role


def identity(instance: str = "decode-0", *, made_ns: int = 5) -> RingIdentity:
    return RingIdentity(
        role=Role.DECODE,
        instance=instance,
        pid=7,
        host_id="h",
        host_name="h",
        boot_id="b",
        anchor=ClockAnchor(monotonic_ns=1, wall_ns=made_ns),
        service_name="pd-decode",
    )


def header(**counts: int) -> dict[Counter, int]:
    return {Counter[name.upper()]: count for name, count in counts.items()}


def test_totals_go_on_over_agents() -> None:
    book = LossBook()
    book.begin("a.ring", identity())
    book.count("a.ring", missed=3, torn=1)
    book.header("a.ring", header(dropped=2, shed_waits=5))
    kept = msgspec.json.decode(msgspec.json.encode(book.losses(late=4, requests=10)), type=Losses)

    later = LossBook(kept)
    later.begin("a.ring", identity())
    later.count("a.ring", missed=4)
    later.header("a.ring", header(dropped=6, shed_waits=5))
    losses = later.losses(late=1, requests=2)
    ring = losses.rings["a.ring"]
    assert (ring.missed, ring.torn, ring.dropped, ring.shed_waits) == (7, 1, 6, 5)
    assert (losses.late, losses.requests) == (5, 12)
    assert losses.by_instance() == {
        ("decode", "decode-0"): {
            **dict.fromkeys(KINDS, 0),
            "missed": 7,
            "torn": 1,
            "dropped": 6,
            "shed_waits": 5,
        }
    }


def test_ring_made_again_under_a_name_is_another_one_and_the_first_still_counts() -> None:
    book = LossBook()
    book.begin("a.ring", identity(made_ns=5))
    book.count("a.ring", missed=3)
    book.begin("a.ring", identity(made_ns=6))
    assert book.losses().rings["a.ring"].missed == 0
    book.count("a.ring", missed=1)
    assert book.losses().by_instance()["decode", "decode-0"]["missed"] == 4


def test_how_a_writer_ended_and_what_it_had_open_is_said_once() -> None:
    book = LossBook()
    book.begin("a.ring", identity())
    book.ended("a.ring", WriterEnd.LOST, 99, [f"req-{n}" for n in range(40)])
    # A restarted agent reads the end again, when most of these are over.
    again = LossBook(book.losses())
    again.begin("a.ring", identity())
    again.ended("a.ring", WriterEnd.LOST, 500, ["req-3"])
    ring = again.losses().rings["a.ring"]
    assert (ring.ended, ring.ended_unix_ns, ring.open_requests) == (WriterEnd.LOST, 99, 40)
    assert ring.open_ids == tuple(f"req-{n}" for n in range(MAX_OPEN_IDS))


def test_unreadable_ring_has_its_reason_until_it_can_be_read() -> None:
    book = LossBook()
    book.unreadable("a.ring", "a.ring has ring format 9, this pdtrace reads format 2")
    assert book.is_unreadable("a.ring")
    assert book.losses().by_instance() == {}, "nobody knows whose it is"
    assert "format 9" in book.losses().sentences()[0]
    book.begin("a.ring", identity())
    assert not book.is_unreadable("a.ring")
    assert book.losses().sentences() == []


def test_what_files_and_exporters_did_not_take_is_said() -> None:
    assert LossBook().losses(lines_lost=315, spans_dropped=2, requests=9, late=4).sentences() == [
        "315 requests that could not be written to the files",
        "2 spans that no exporter sends",
    ]


def test_totals_stay_small_and_exact_however_many_rings_there_were() -> None:
    book = LossBook()
    for number in range(500):
        name = f"decode-{number % 3}-{number}.ring"
        book.begin(name, identity(f"decode-{number % 3}", made_ns=number))
        book.count(name, missed=1)
        book.tidy({name})
    losses = book.losses()
    assert len(losses.rings) <= MAX_GONE + 1
    assert len(losses.earlier) == 3
    assert sum(kinds["missed"] for kinds in losses.by_instance().values()) == 500


def test_sentences_name_instance_kind_and_number() -> None:
    book = LossBook()
    book.begin("a.ring", identity())
    book.count("a.ring", missed=3)
    book.header("a.ring", header(errors=1))
    assert book.losses(unnamed=2).sentences() == [
        "decode-0: 3 records overwritten before they were read, 1 recording calls that failed",
        "2 marks whose request is not known",
    ]
    assert LossBook().losses().sentences() == []


def test_losses_are_read_from_the_run_directory(tmp_path: Path) -> None:
    book = LossBook()
    book.begin("a.ring", identity())
    book.count("a.ring", torn=2)
    state = {"version": 1, "rings": {}, "losses": book.losses()}
    (tmp_path / STATE_NAME).write_bytes(msgspec.json.encode(state))
    assert read_losses(tmp_path) == book.losses()


def test_losses_that_cannot_be_read_are_a_problem_and_no_error(tmp_path: Path) -> None:
    assert "no agent has written" in str(read_losses(tmp_path).problem)
    (tmp_path / STATE_NAME).write_text("{ damaged")
    assert "is damaged" in str(read_losses(tmp_path).problem)
    (tmp_path / STATE_NAME).unlink()
    (tmp_path / STATE_NAME).mkdir()
    [sentence] = read_losses(tmp_path).sentences()
    assert "cannot be read (Is a directory)" in sentence
    # A state from before losses were kept.
    (tmp_path / STATE_NAME).rmdir()
    (tmp_path / STATE_NAME).write_text('{"version": 1, "rings": {}}')
    assert read_losses(tmp_path) == Losses()


def test_counters_that_no_process_can_have_reached_are_damage_and_no_losses() -> None:
    book = LossBook()
    book.begin("a.ring", identity())
    book.header("a.ring", header(dropped=9280510877422232908, errors=1))
    losses = book.losses()
    assert losses.rings["a.ring"].counts()["dropped"] == 0
    [said] = losses.sentences()
    assert said == (
        "a.ring: its header is damaged: it counts 9280510877422232908 records that could not be "
        "written"
    )
