"""Every publicly reported fault of the groups that are done has a test that names it, and a test
with a server ends with a look at what is left of it."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest

from tests.support.cases import CASES, OF_SERVING

TESTS = Path(__file__).resolve().parents[1]


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


# -- after each of them ---------------------------------------------------------------------------

SERVER = "RunningServer"
"""Who is given one has it looked at by `tests/integration/conftest.py`."""
LOOKS = frozenset({"assert_recovered", "assert_recorded", "check_recovered", "gateway_under_test"})
"""What looks at servers that a test has started itself, or at what is left of them."""
ALONE = frozenset({"test_worker_whose_gateway_was_never_there_stops_and_says_so"})
"""Tests of one process that ends: nothing is left that could be asked."""
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def unlooked_at(module: str) -> list[str]:
    """Tests of serving cases, in this source, behind which nobody looks whether all is well."""
    functions = {
        node.name: node for node in ast.walk(ast.parse(module)) if isinstance(node, _Function)
    }
    return [
        name
        for name, function in functions.items()
        if name.startswith("test_")
        and is_of_serving(function)
        and not is_looked_at(name, functions)
    ]


def is_of_serving(function: _Function) -> bool:
    return any(
        isinstance(mark, ast.Call)
        and ast.unparse(mark.func) == "pytest.mark.case"
        and any(isinstance(each, ast.Constant) and each.value in OF_SERVING for each in mark.args)
        for mark in function.decorator_list
    )


def is_looked_at(name: str, functions: Mapping[str, _Function]) -> bool:
    """Whether a test gets a server, or it, its fixtures or what they call look at theirs."""
    seen: set[str] = set()
    to_see = [name]
    while to_see:
        seen.add(name := to_see.pop())
        function = functions[name]
        given = {
            arg.arg: ast.unparse(arg.annotation or ast.Constant(0)) for arg in arguments(function)
        }
        if name.startswith("test_") and SERVER in given.values():
            return True
        called = {
            ast.unparse(node.func) for node in ast.walk(function) if isinstance(node, ast.Call)
        }
        if called & LOOKS:
            return True
        to_see += (functions.keys() & (called | given.keys())) - seen
    return False


def arguments(function: _Function) -> list[ast.arg]:
    return [*function.args.args, *function.args.kwonlyargs]


@pytest.mark.parametrize(
    "path", sorted((TESTS / "integration").glob("test_*.py")), ids=lambda p: p.name
)
def test_servers_of_cases_are_looked_at_afterwards(path: Path) -> None:
    assert set(unlooked_at(path.read_text())) <= ALONE


@pytest.mark.parametrize(
    ("arguments", "body", "is_found"),
    [
        ("", "with running_server(path) as server: ask(server)", True),
        ("", "with running_server(path) as server: assert_recovered(server)", False),
        ("server: RunningServer", "ask(server)", False),
        ("told: Told", "assert told", True),
        ("looked: Told", "assert looked", False),
    ],
)
def test_a_test_that_looks_at_nothing_is_found(arguments: str, body: str, is_found: bool) -> None:
    module = f"""
def told(): tell()
def looked(): tell(); look()
def look(): assert_recovered(server)
@pytest.mark.case("CAN-02")
def test_it({arguments}):
    {body}
"""
    assert unlooked_at(module) == (["test_it"] if is_found else [])
