"""The gateway's time has one home."""

from __future__ import annotations

import ast
from pathlib import Path

import server.gateway
from pdtrace.testing import FakeClock
from server.gateway.now import Now

PACKAGE = Path(server.gateway.__file__).parent


def test_units() -> None:
    clock = FakeClock()
    now = Now(clock)
    clock.advance(ms=1500)
    assert now.ns() == clock.monotonic_ns()
    assert now.s() == clock.monotonic_ns() / 1e9
    assert now.unix_s() == int(clock.wall_ns() / 1e9)


def test_no_other_module_of_the_gateway_reads_a_clock() -> None:
    """Or a test with a fake clock would run on two."""
    readers = {
        path.name
        for path in PACKAGE.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.Import) and any(name.name == "time" for name in node.names))
        or (isinstance(node, ast.ImportFrom) and node.module in ("time", "datetime"))
        or (isinstance(node, ast.Attribute) and node.attr in ("monotonic_ns", "wall_ns"))
    }
    assert readers == {"now.py"}
