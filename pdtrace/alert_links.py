"""Where alerts lead: the annotations `dashboard` and `runbook_url` of the alert rules. Pure.

Rules are generated with paths: in Grafana, and in the folder that holds the rules' folders, where
`pdtrace export rules` puts the pages. Whoever reads alerts elsewhere says where Grafana and the
pages are, and gets rules with whole addresses. Owns these two forms; knows nothing else of what is
in a rule file.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

DASHBOARD, RUNBOOK = "dashboard", "runbook_url"
RUNBOOKS = "runbooks"
"""Folder of the pages, beside the folders of the rules."""

_UNFIT = re.compile(r"[\s{}\x00-\x1f\x7f\ud800-\udfff]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """What links of alerts begin with.

    grafana   such as https://grafana.example
    runbooks  where the pages are, an address or a path

    Raises ValueError for what could not stand in a rule file.
    """

    grafana: str = ""
    runbooks: str = RUNBOOKS

    def __post_init__(self) -> None:
        for name, given in (("grafana", self.grafana), ("runbooks", self.runbooks)):
            if _UNFIT.search(given) or (name == "runbooks" and not given):
                raise ValueError(
                    f"--{name} {given!r} cannot be what links begin with: give an address or a "
                    "path without spaces and braces, such as https://HOST/PATH"
                )

    def panel(self, path: str) -> str:
        """A panel's address by its path in Grafana, which may have templates in it."""
        return f"{self.grafana.rstrip('/')}{path}"

    def runbook(self, alert: str) -> str:
        """The address of an alert's page."""
        return f"{self.runbooks.rstrip('/')}/{alert}.md"


PATHS = Places()
"""As generated."""

_PANEL = re.compile(rf"^(\s*{DASHBOARD}: )(/d/.*)$", re.MULTILINE)
_PAGE = re.compile(rf"^(\s*{RUNBOOK}: ){RUNBOOKS}/(\w+)\.md$", re.MULTILINE)


def placed(rules: str, places: Places) -> str:
    """A rule file as it is generated, with other places."""
    if places.grafana:
        rules = _PANEL.sub(lambda at: f"{at[1]}{json.dumps(places.panel(at[2]))}", rules)
    if places.runbooks != RUNBOOKS:
        rules = _PAGE.sub(lambda at: f"{at[1]}{json.dumps(places.runbook(at[2]))}", rules)
    return rules
