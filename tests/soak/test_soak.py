"""A short soak with faults, and a steady one without. `make soak` does the first for longer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak.answers import End
from tests.soak.report import Report
from tests.soak.run import Scenario, run_soak
from tests.soak.serve import soak_settings
from tests.soak.traffic import Habits

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

SEED = 20
LIMIT_S = 300.0


def soak(scenario: Scenario) -> Report:
    lines: list[str] = []
    report = run_soak(scenario, lines.append)
    assert report.failures() == [], "\n".join([*lines, str(report.document())])
    return report


@pytest.mark.case("LEAK-05")
def test_minute_of_faults_leaves_nothing_behind(tmp_path: Path) -> None:
    """Also 30 % of the clients leave at random times."""
    report = soak(
        Scenario(settings=soak_settings(tmp_path / "run"), seconds=60, seed=SEED, every_s=3)
    )
    ends = {request.end for request in report.requests}
    assert {End.COMPLETED, End.DROPPED} <= ends
    assert len({each.kind for each in report.happened}) >= 5
    assert sum(report.pages_leaked.values()) == 0


@pytest.mark.case("LEAK-03")
@pytest.mark.case("XFER-11")
def test_thousand_normal_requests_fail_never_and_leave_nothing_behind(tmp_path: Path) -> None:
    """Steadily, below what the server could do: a few at a time, of which none has to wait."""
    report = soak(
        Scenario(
            settings=soak_settings(tmp_path / "run"),
            seconds=LIMIT_S,
            requests=1000,
            seed=SEED,
            every_s=None,
            habits=Habits(rate=100.0, at_once=6, drop_share=0.0),
        )
    )
    assert len(report.requests) >= 1000
    assert set(report.outcomes) == {"completed"}
    assert [series for series in report.ignored if "unknown" in series] == []
    for instance, after in report.after.items():
        before = report.before[instance]
        assert after.threads <= before.threads + 1, instance
        assert after.files <= before.files + 8, instance  # whom it had not met before
        assert after.rss_bytes <= before.rss_bytes + (24 << 20), instance
