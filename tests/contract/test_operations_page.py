"""docs/operations.md names every reason that the gateway knows, on the right side."""

from __future__ import annotations

import re
from pathlib import Path

from server.gateway.retry import RULES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "operations.md"
UNSHOWN = {"invalid_request", "context_length", "cancelled"}
"""Never an end that an operator can do something about."""


def rows() -> dict[str, str]:
    """What happens before the first byte, by reason."""
    section = PAGE.read_text().partition("## Failures and retries\n")[2].partition("\n## ")[0]
    found: dict[str, str] = {}
    for what, before in re.findall(r"^\| (.*?) \| (.*?) \|", section, re.MULTILINE):
        found |= dict.fromkeys(re.findall(r"`([a-z_]+)`", what), before)
    return found


def test_page_says_of_each_reason_whether_another_attempt_follows() -> None:
    page = rows()
    assert set(RULES) - UNSHOWN <= set(page)
    for reason in set(RULES) - UNSHOWN:
        retried = not page[reason].startswith(("4", "5"))
        assert retried is (RULES[reason] is not None), reason
