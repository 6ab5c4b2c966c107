"""What becomes of alerts while a test runs: at Prometheus, and at a webhook behind Alertmanager."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.support.real_stack import RealStack, Webhook

_POLL_S = 0.25
INACTIVE = "inactive"


@dataclass(slots=True)
class Life:
    """One alert, by its labels: the states that Prometheus told, each where it began."""

    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    states: list[str] = field(default_factory=list[str])

    def is_about(self, name: str, labels: Mapping[str, str]) -> bool:
        return self.labels["alertname"] == name and labels.items() <= self.labels.items()


@dataclass(slots=True)
class AlertWatch:
    """Every alert that was seen, since the watch began."""

    webhook: Webhook
    lives: dict[frozenset[tuple[str, str]], Life] = field(
        default_factory=dict[frozenset[tuple[str, str]], Life]
    )

    def of(self, name: str, **labels: str) -> list[Life]:
        """The alerts of this name that have these labels, among others."""
        return [life for life in list(self.lives.values()) if life.is_about(name, labels)]

    def begun(self) -> Counter[frozenset[tuple[str, str]]]:
        """How often each alert has begun to fire, by its labels; those that never did are left
        out."""
        times = {key: life.states.count("firing") for key, life in list(self.lives.items())}
        return +Counter(times)

    def has_been(self, state: str, name: str, **labels: str) -> bool:
        return any(state in life.states for life in self.of(name, **labels))

    def delivered(self, status: str, name: str, **labels: str) -> list[dict[str, Any]]:
        """What the webhook was told with this status, `firing` or `resolved`."""
        return [
            alert
            for alert in self.webhook.alerts(name)
            if alert["status"] == status and labels.items() <= alert["labels"].items()
        ]

    def lacks(self, name: str, labels: Mapping[str, str], *, waits: bool) -> list[str]:
        """Which steps of pending → firing → told → inactive → told are missing, of the alert that
        came farthest.

        waits   it has to hold for a while: without, it is never pending
        """
        lives = self.of(name, **labels)
        return min((self._lacks(life, waits) for life in lives), key=len, default=["never seen"])

    def _lacks(self, life: Life, waits: bool) -> list[str]:
        states, told = life.states, self._told(life)
        way = ["pending", "firing", INACTIVE] if waits else ["firing", INACTIVE]
        steps = {
            " → ".join(way): any(states[at : at + len(way)] == way for at in range(len(states))),
            "the webhook knows that it fires": "firing" in told,
            "the webhook knows that it is resolved": "resolved" in told,
        }
        seen = f"(states {states}, told {told})"
        return [f"{step} {seen}" for step, done in steps.items() if not done]

    def _told(self, life: Life) -> list[str]:
        alerts = self.webhook.alerts(life.labels["alertname"])
        return [alert["status"] for alert in alerts if alert["labels"] == life.labels]

    def note(self, alerts: list[dict[str, Any]]) -> None:
        """What Prometheus tells now."""
        active = {frozenset(alert["labels"].items()): alert for alert in alerts}
        for key, alert in active.items():
            life = self.lives.setdefault(key, Life(alert["labels"], alert["annotations"]))
            _add(life.states, alert["state"])
        for key, life in self.lives.items():
            if key not in active:
                _add(life.states, INACTIVE)


def _add(states: list[str], state: str) -> None:
    if states[-1:] != [state]:
        states.append(state)


@contextlib.contextmanager
def watched_alerts(stack: RealStack, webhook: Webhook) -> Generator[AlertWatch]:
    """Look four times a second, until leaving."""
    watch = AlertWatch(webhook)
    over = threading.Event()
    failed: list[Exception] = []

    def look() -> None:
        while not over.wait(_POLL_S):
            try:
                watch.note(stack.get("prometheus", "/api/v1/alerts")["data"]["alerts"])
            except Exception as error:
                failed.append(error)
                return

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield watch
    finally:
        over.set()
        thread.join()
    assert not failed, failed
