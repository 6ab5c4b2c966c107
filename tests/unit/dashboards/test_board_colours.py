"""Colours on the boards: the same thing has the same one everywhere, and what is drawn together can
be told apart."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from dashboards import build, colours, names
from dashboards.boards import pieces

BOARDS = build.boards()
PLACE = re.compile(r"\{\{(\w+)\}\}")
GRAFANA = {
    "red": "#F2495C",
    "orange": "#FF9830",
    "yellow": "#FADE2A",
    "green": "#73BF69",
    "blue": "#5794F2",
}
"""Grafana's colours by name, dark theme."""

BY_LABEL: Mapping[str, Mapping[str, str]] = {
    "stage": {stage: colours.STAGES[stage] for stage in pieces.STALLING},
    names.SPAN_STALL_STAGE: {stage: colours.STAGES[stage] for stage in pieces.STALLING},
    "outcome": colours.OUTCOMES,
    "state": colours.KV,
}
"""Label in a legend → what its values are coloured by."""

APART = 20.0
"""Least distance of two colours that mean different things in one panel: a step that is seen in a
thin line (in CIELAB, where 2 is just noticed side by side)."""
STAGES_APART = 12.0
"""Of two stages: two dozen of them cannot be further apart. Neighbours in the chain are."""


def panels() -> Iterator[dict[str, Any]]:
    for board in BOARDS.values():
        for one in board["panels"]:
            if one["type"] in {"timeseries", "bargauge"}:
                yield one


def overrides(one: dict[str, Any]) -> Iterator[tuple[dict[str, str], dict[str, str]]]:
    """Matcher and colour."""
    for override in one["fieldConfig"]["overrides"]:
        for item in override["properties"]:
            if item["id"] == "color":
                yield override["matcher"], item["value"]


def colours_of(one: dict[str, Any], series: str) -> list[str]:
    """What Grafana would give a series of this name."""
    return [colour["fixedColor"] for matcher, colour in overrides(one) if matches(matcher, series)]


def matches(matcher: dict[str, str], series: str) -> bool:
    if matcher["id"] == "byName":
        return matcher["options"] == series
    assert matcher["id"] == "byRegexp"
    slashed = re.fullmatch("/(.*)/", matcher["options"])
    assert slashed is not None, matcher
    return re.search(slashed[1], series) is not None


def by_value(one: dict[str, Any]) -> bool:
    """A bar whose colour says how much it is, and its text which stage."""
    return one["type"] == "bargauge" and "The colour says how" in one["description"]


def composed() -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    for one in panels():
        for target in one["targets"]:
            for label in PLACE.findall(target["legendFormat"]):
                if label in BY_LABEL and not by_value(one):
                    yield one["title"], target["legendFormat"], label, one


LEGENDS = list(composed())


@pytest.mark.parametrize(
    ("title", "legend", "label", "one"), LEGENDS, ids=lambda v: v if isinstance(v, str) else ""
)
def test_a_label_has_its_colours_in_every_legend(
    title: str, legend: str, label: str, one: dict[str, Any]
) -> None:
    left_out = {"free"} if 'state!="free"' in one["targets"][0]["expr"] else set[str]()
    for value, colour in BY_LABEL[label].items():
        series = PLACE.sub("decode-0", legend.replace(f"{{{{{label}}}}}", value))
        if value not in left_out:
            assert colours_of(one, series) == [colour], f"{title}: {series}"


def test_legends_of_all_kinds_were_looked_at() -> None:
    assert len(LEGENDS) > 15
    assert {"{{stage}}", "{{stage}} · {{instance}}", "{{stage}} · {{reason}}"} <= {
        legend for _, legend, _, _ in LEGENDS
    }
    assert {label for _, _, label, _ in LEGENDS} == set(BY_LABEL)


def test_several_series_of_one_stage_are_shades_and_one_is_the_colour_itself() -> None:
    for one in panels():
        for matcher, colour in overrides(one):
            wanted = {"byName": "fixed", "byRegexp": "shades"}[matcher["id"]]
            assert colour["mode"] == wanted, one["title"]


def test_the_dominant_stage_and_the_share_of_time_have_the_stages_colours() -> None:
    titles = {title for title, _, label, _ in LEGENDS if "stage" in label}
    assert {
        "Share of all time by stage",
        "Requests by dominant stage",
        "Requests by dominant stage (span metrics)",
        "Waits by worker",
        "Time waited by reason",
        "Reported as stuck",
    } <= titles


# -- can it be told apart --------------------------------------------------------------------------


def lab(colour: str) -> tuple[float, float, float]:
    """CIELAB of `#rrggbb`, D65."""
    red, green, blue = (_linear(int(colour[at : at + 2], 16) / 255) for at in (1, 3, 5))
    x = (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.95047
    y = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    z = (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.08883
    fx, fy, fz = (_cube(one) for one in (x, y, z))
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


def _linear(part: float) -> float:
    return part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4


def _cube(part: float) -> float:
    return part ** (1 / 3) if part > 0.008856 else 7.787 * part + 16 / 116


def distance(one: str, other: str) -> float:
    pairs = zip(lab(one), lab(other), strict=True)
    return sum((left - right) ** 2 for left, right in pairs) ** 0.5


STAGE_OF = {colour: stage for stage, colour in colours.STAGES.items()}


def limits(one: dict[str, Any]) -> set[str]:
    """Colours of the thresholds that are drawn as lines."""
    defaults = one["fieldConfig"]["defaults"]
    if defaults.get("custom", {}).get("thresholdsStyle", {}).get("mode", "off") == "off":
        return set()
    steps = defaults["thresholds"]["steps"]
    return {GRAFANA[step["color"]] for step in steps if step["color"] != "transparent"}


def identities(one: dict[str, Any]) -> set[str]:
    """Colours that say what a series is."""
    return {colour["fixedColor"] for _, colour in overrides(one)} & {
        *STAGE_OF,
        *colours.QUANTILES.values(),
        colours.WHOLE,
        colours.CALM_LINE,
    }


def least_of(one: str, other: str) -> float:
    return STAGES_APART if one in STAGE_OF and other in STAGE_OF else APART


@pytest.mark.parametrize("uid", BOARDS)
def test_what_a_panel_draws_together_can_be_told_apart(uid: str) -> None:
    looked_at = 0
    for one in BOARDS[uid]["panels"]:
        if one["type"] != "timeseries":
            continue
        said, lines = identities(one), limits(one)
        pairs = [*itertools.combinations(sorted(said), 2), *itertools.product(said, lines)]
        for left, right in pairs:
            apart = distance(left, right)
            known = f"{STAGE_OF.get(left, left)} and {STAGE_OF.get(right, right)}"
            assert apart >= least_of(left, right), f"{one['title']}: {known} are {apart:.0f} apart"
        looked_at += len(pairs)
    assert looked_at > 0


def test_neighbours_in_the_chain_can_be_told_apart() -> None:
    chain = [colours.STAGES[stage.name] for stage in pieces.CHAIN]
    for left, right in itertools.pairwise(chain):
        assert distance(left, right) >= APART, f"{STAGE_OF[left]} and {STAGE_OF[right]}"


def test_distances_are_those_of_the_eye() -> None:
    assert distance("#ffffff", "#000000") == pytest.approx(100, abs=0.1)
    assert distance("#FF9830", "#ff8700") < APART  # p99 and decode.generate were these
    assert distance("#0087ff", "#5f87ff") < STAGES_APART  # and gateway's route and dispatch these
