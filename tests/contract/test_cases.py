"""Every publicly reported fault of the groups that are done has a test that names it."""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]

CASES = {
    "context propagation": (
        *("CTX-01", "CTX-03", "CTX-05", "CTX-08", "CTX-09", "CTX-10", "CTX-12", "CTX-16"),
    ),
    "span loss": ("API-09", "CAN-10", "EXP-03", "EXP-05"),
    "clocks": ("CLK-01", "CLK-04", "CLK-06", "CLK-08"),
    "ids": ("ID-01", "ID-05", "ID-06"),
    "export": ("EXP-01", "EXP-02", "EXP-06", "EXP-09", "EXP-10"),
    "configuration": ("CFG-01", "CFG-03", "CFG-04", "CFG-06"),
    "metrics": ("MET-02",),
    "HTTP-SSE API": ("API-01", "API-02", "API-04", "API-06", "API-08", "API-13", "API-14"),
    "cancellation": ("CAN-02", "CAN-03", "CAN-06", "CAN-08"),
    "failure of worker": (
        *("FAIL-03", "FAIL-05", "FAIL-08", "FAIL-10", "FAIL-12", "FAIL-13", "FAIL-15", "FAIL-18"),
    ),
    "KV leak": ("LEAK-03", "LEAK-05"),
    "transfer stall": ("XFER-01", "XFER-02", "XFER-04", "XFER-07", "XFER-08", "XFER-11"),
    "scheduling starvation": ("SCH-01", "SCH-02", "SCH-04", "SCH-07"),
    "packaging": ("PKG-01",),
}


@cache
def marked_cases() -> dict[str, set[str]]:
    """Case id → tests (or modules) that carry its mark."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "case"
            ):
                for argument in node.args:
                    if isinstance(argument, ast.Constant):
                        found[str(argument.value)].add(path.name)
    return found


@pytest.mark.parametrize(("group", "case"), [(g, c) for g, ids in CASES.items() for c in ids])
def test_case_is_tested(group: str, case: str) -> None:
    assert marked_cases().get(case), f"no test of the group {group} is marked with {case}"


def test_marks_name_known_cases() -> None:
    known = {case for cases in CASES.values() for case in cases}
    assert set(marked_cases()) <= known
