"""The publicly reported faults that tests are marked with, by group.

@pytest.mark.case("CAN-02")
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

CASES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "context propagation": (
            *("CTX-01", "CTX-03", "CTX-05", "CTX-08", "CTX-09", "CTX-10", "CTX-12", "CTX-16"),
        ),
        "span loss": ("API-09", "CAN-10", "EXP-03", "EXP-05"),
        "clocks": ("CLK-01", "CLK-04", "CLK-06", "CLK-08"),
        "ids": ("ID-01", "ID-05", "ID-06"),
        "export": ("EXP-01", "EXP-02", "EXP-06", "EXP-09", "EXP-10"),
        "configuration": ("CFG-01", "CFG-03", "CFG-04", "CFG-06"),
        "metrics": ("MET-01", "MET-02", "MET-05", "MET-06", "MET-07"),
        "dashboards": ("DSH-01", "DSH-02", "DSH-03", "DSH-04"),
        "alerting": ("ALR-01", "ALR-02"),
        "HTTP-SSE API": ("API-01", "API-02", "API-04", "API-06", "API-08", "API-13", "API-14"),
        "cancellation": ("CAN-02", "CAN-03", "CAN-06", "CAN-08"),
        "failure of worker": (
            *(
                "FAIL-03",
                "FAIL-05",
                "FAIL-08",
                "FAIL-10",
                "FAIL-12",
                "FAIL-13",
                "FAIL-15",
                "FAIL-18",
            ),
        ),
        "KV leak": ("LEAK-03", "LEAK-05"),
        "transfer stall": ("XFER-01", "XFER-02", "XFER-04", "XFER-07", "XFER-08", "XFER-11"),
        "scheduling starvation": ("SCH-01", "SCH-02", "SCH-04", "SCH-07"),
        "trace file parsing": (
            "PAR-01",
            "PAR-02",
            "PAR-03",
            "PAR-17",
            "PAR-20",
            "PAR-22",
            "PAR-33",
        ),
        "packaging": ("PKG-01",),
    }
)
OF_SERVING = frozenset(
    case
    for group in (
        *("HTTP-SSE API", "cancellation", "failure of worker", "KV leak", "transfer stall"),
        "scheduling starvation",
    )
    for case in CASES[group]
)
"""Those behind which a server must be as if nothing had happened: `tests.support.aftermath`."""
