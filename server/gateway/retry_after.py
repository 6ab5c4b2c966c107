"""How long a client that was refused should wait: from how fast places came free lately.

Owns the rate and the rule. Knows nothing of requests: times are seconds on the monotonic clock,
given by the caller.
"""

from __future__ import annotations

import math
from collections import deque

WINDOW_S = 10
"""How far back completions count."""
MIN_S = 1
MAX_S = 30
GUESS_S = 5
"""What a request is taken to last while none has ended lately: after a start, or in a lull."""


def retry_after_s(waiting: int, per_s: float, places: int) -> int:
    """Whole seconds until the queue will have been served: what waits, at the present rate.

    Between MIN_S, as nobody should come back at once, and MAX_S: a rate of the past says little
    about longer times. Without a rate, as often GUESS_S as the places are filled anew before the
    queue is empty.

    waiting   requests in the queue
    per_s     completions per second
    places    requests that are worked on at once, at least 1
    """
    if waiting <= per_s * MIN_S:
        return MIN_S
    if per_s == 0:
        return min(MAX_S, GUESS_S * math.ceil(waiting / places))
    if waiting >= per_s * MAX_S:
        return MAX_S
    return math.ceil(waiting / per_s)


class DrainRate:
    """Places that came free in the last WINDOW_S seconds, counted by the second."""

    def __init__(self, now_s: float) -> None:
        self._began_s = now_s
        self._counts: deque[tuple[int, int]] = deque(maxlen=WINDOW_S + 1)

    def freed(self, now_s: float) -> None:
        """A place came free."""
        second = int(now_s)
        if self._counts and self._counts[-1][0] == second:
            self._counts[-1] = (second, self._counts[-1][1] + 1)
        else:
            self._counts.append((second, 1))

    def per_s(self, now_s: float) -> float:
        """Mean over the window, or over the time since the start while that is shorter."""
        since_s = max(now_s - WINDOW_S, self._began_s)
        count = sum(count for second, count in self._counts if second + 1 > since_s)
        return count / max(1.0, now_s - since_s)
