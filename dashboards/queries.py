"""PromQL pieces: one function for each shape, so that it is written right once.

Knows nothing of panels and alerts. A window is `RATE` in a panel and a fixed duration in a rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client.utils import floatToGoString

from pdtrace.agent.buckets import edge_of

RATE = "$__rate_interval"
"""At least four scrapes, and more when a wide range is looked at."""
RANGE = "$__range"
"""All that the board shows."""


def series(metric: str, *matchers: str) -> str:
    """`metric{matchers}`; empty matchers are left out, so that an optional part may be none."""
    given = ",".join(matcher for matcher in matchers if matcher)
    return f"{metric}{{{given}}}" if given else metric


def any_of(label: str, values: Iterable[str]) -> str:
    """Matcher: one of these values. Dots are escaped: stages have them."""
    return f'{label}=~"{"|".join(value.replace(".", "[.]") for value in values)}"'


def equal(label: str, value: str) -> str:
    return f'{label}="{value}"'


def chosen(label: str, variable: str) -> str:
    """Matcher: what the board's variable says; All is `.*`."""
    return f'{label}=~"${variable}"'


def named(expr: str, label: str, otherwise: str) -> str:
    """The same, where series without this label are called `otherwise` by it, so that each has a
    name in a legend."""
    return f'label_replace({expr}, "{label}", "{otherwise}", "{label}", "")'


def _by(by: Sequence[str]) -> str:
    return f" by ({', '.join(by)})" if by else ""


def total(expr: str, by: Sequence[str] = ()) -> str:
    return f"sum{_by(by)} ({expr})"


def highest(expr: str, by: Sequence[str] = ()) -> str:
    return f"max{_by(by)} ({expr})"


def per_second(selector: str, by: Sequence[str] = (), window: str = RATE) -> str:
    """Rate of a counter, summed."""
    return total(f"rate({selector}[{window}])", by)


def number(selector: str, by: Sequence[str] = (), window: str = RANGE) -> str:
    """How much a counter grew within the window, summed."""
    return total(f"increase({selector}[{window}])", by)


def quantile(
    q: float, histogram: str, *matchers: str, by: Sequence[str] = (), window: str = RATE
) -> str:
    """A quantile over all series of the group. No data, not a number, where nothing was observed:
    never 0."""
    buckets = per_second(series(f"{histogram}_bucket", *matchers), ("le", *by), window)
    return f"histogram_quantile({q}, {buckets})"


def mean(histogram: str, *matchers: str, by: Sequence[str] = (), window: str = RATE) -> str:
    """Mean of what was observed within the window; not a number where nothing was."""
    sums = per_second(series(f"{histogram}_sum", *matchers), by, window)
    counts = per_second(series(f"{histogram}_count", *matchers), by, window)
    return f"{sums} / {counts}"


def share(part: str, whole: str, by: Sequence[str] = (), window: str = RATE) -> str:
    """What part of the growth of the counter `whole` is `part`'s."""
    return f"{per_second(part, by, window)} / {per_second(whole, by, window)}"


def share_above(
    threshold_s: float,
    histogram: str,
    *matchers: str,
    by: Sequence[str] = (),
    window: str = RATE,
) -> str:
    """Share of observations above a threshold, which has to be an edge of the histogram."""
    kept = per_second(
        series(f"{histogram}_bucket", *matchers, equal("le", edge_label(threshold_s))), by, window
    )
    counts = per_second(series(f"{histogram}_count", *matchers), by, window)
    return f"1 - {kept} / {counts}"


def edge_label(threshold_s: float) -> str:
    """The `le` that stands for a threshold, as it is exposed."""
    return floatToGoString(edge_of(float(threshold_s)))
