"""Command lines that cannot be understood, of both programs: one clear line and exit code 2."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer import Typer
from typer.main import get_command
from typer.testing import CliRunner

from pdtrace.cli import app as pdtrace_app
from server.cli import app as server_app
from server.config import MAX_WORKERS

PROGRAMS = {"pdtrace": pdtrace_app, "server": server_app}
NUMBERS = re.compile(r"\b(?:int|float)\b")


def refused(app: Typer, arguments: Sequence[str]) -> str:
    """The one line that is said of a command line, without what it begins with."""
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1, result.stderr
    assert "Value error" not in result.stderr
    assert "Input should" not in result.stderr
    begin = "pdtrace: " if app is pdtrace_app else "error: "
    assert result.stderr.startswith(begin)
    return result.stderr.removeprefix(begin).rstrip("\n")


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command below `command`, with the words that call it."""
    inner = getattr(command, "commands", None)
    if inner is None:
        yield path, command
        return
    for name, one in inner.items():
        yield from commands(one, (*path, name))


def options(kinds: re.Pattern[str]) -> list[Any]:
    """Program, words and name of each option whose type on the help page is one of `kinds`."""
    return [
        pytest.param(program, path, name, id=f"{program} {' '.join(path)} {name}")
        for program, app in PROGRAMS.items()
        for path, command in commands(get_command(app))
        for parameter in command.params
        if (name := max(parameter.opts, key=len)).startswith("--")
        and not getattr(parameter, "is_flag", False)
        and kinds.search(str(parameter.type_descriptor.annotation))
    ]


OF_NUMBERS = options(NUMBERS)
OF_PATHS = options(re.compile(r"\bPath\b"))
OF_CHOICES = options(re.compile(r"<enum '|\bAim\b"))


def test_there_are_options_of_each_kind() -> None:
    assert len(OF_NUMBERS) > 40
    assert len(OF_PATHS) > 8
    assert len(OF_CHOICES) > 8


@pytest.mark.parametrize("given", ["", "x", "\x1b[31m"])
@pytest.mark.parametrize(("program", "path", "name"), OF_NUMBERS)
def test_number_that_is_none_is_named_with_its_option(
    program: str, path: tuple[str, ...], name: str, given: str
) -> None:
    said = refused(PROGRAMS[program], [*path, f"{name}={given}"])
    assert re.match(rf"{re.escape(f'{name} {given!r}')} is no (whole )?number; see ", said), said
    assert said.endswith(f"{' '.join(path)} --help")


@pytest.mark.parametrize(("program", "path", "name"), OF_CHOICES)
def test_choice_that_is_none_is_told_with_those_that_are(
    program: str, path: tuple[str, ...], name: str
) -> None:
    said = refused(PROGRAMS[program], [*path, f"{name}=nonsense"])
    assert re.match(rf"{name} 'nonsense' is not one of '\w+', '\w+'", said), said


@pytest.mark.parametrize("shape", ["{}=", "{} "])
@pytest.mark.parametrize(("program", "path", "name"), OF_PATHS)
def test_empty_path_is_not_the_working_directory(
    program: str, path: tuple[str, ...], name: str, shape: str
) -> None:
    needed = ["out"] if path in {("tokenizer",), ("keys",)} else []
    needed += ["--rings", "r"] if path == ("agent",) and name != "--rings" else []
    given = [shape.format(name)] if "=" in shape else [name, ""]
    said = refused(PROGRAMS[program], [*path, *needed, *given])
    assert said.startswith(f"{name} is empty: give a path; see "), said


def test_path_of_the_working_directory_may_be_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(pdtrace_app, ["export", "dashboards", ".", "--grafana", ""])
    assert result.exit_code == 0, result.output
    assert list(tmp_path.glob("*.json"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["export"], "missing argument 'WHAT'"),
        (["export", "rules"], "missing argument 'DIR'"),
        (["export", "nonsense", "d"], "WHAT 'nonsense' is not one of 'dashboards', 'rules'"),
        (["export", "", "d"], "WHAT '' is not one of 'dashboards', 'rules', 'collector'"),
        (["export", "rules", ""], "DIR is empty: give a path"),
        (["export", "rules", "d", "e"], "got unexpected extra argument(s) (e)"),
        (["export", "--nonsense"], "no such option: --nonsense"),
        (["export", "rules", "d", "--grafana", "\udcff"], "cannot be what links begin with"),
        (["why", "--slowest"], "option '--slowest' requires an argument"),
        (["why", "--limit=0"], "--limit '0' must be 1 or more"),
        (["check", "--timeout=inf"], "--timeout 'inf' must be 86400 or less"),
        (["top", "--interval=1e300"], "--interval '1e300' must be 86400 or less"),
        (["top", "--once", "--from", ""], "--from is empty: leave it out, or give"),
        (["why", "--from="], "--from is empty: leave it out, or give"),
        (["slo", "--gap-form="], "--gap-form '' is not one of 'pooled', 'requests'"),
        (["agent"], "missing option '--rings'"),
        (["nonsense"], "no such command 'nonsense'"),
        (["--nonsense"], "no such option: --nonsense"),
        (["why", "--from", "x" * 5_000], "File name too long"),
        (["top", "--once", "--from", "x" * 5_000], "File name too long"),
    ],
)
def test_wrong_command_line_of_pdtrace(arguments: list[str], said: str) -> None:
    assert said in refused(pdtrace_app, arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nonsense"], "no such command 'nonsense'"),
        (["stack", "nonsense"], "no such command 'nonsense'; see python -m server stack --help"),
        (["keys"], "missing argument 'DIR'"),
        (["keys", ""], "DIR is empty: give a path"),
        (["inject", ""], "the faults are empty"),
        (["inject", "--timeout=nan"], "--timeout 'nan' must be 86400 or less"),
        (["up", "--start-timeout=-1"], "--start-timeout '-1' must be 0 or more"),
        (["up", "--prefill", "9" * 20], f"expected at most {MAX_WORKERS}"),
        (["up", "--threads", "9" * 20], "expected at most 9223372036854775807"),
        (["up", "--gap-threshold-s=inf"], "--gap-threshold-s is inf, expected at most 1e+09"),
        (["up", "--api-key", ""], "--api-key is empty"),
        (["stack", "up", "--decision-wait", "soon"], "--decision-wait 'soon' is no duration"),
        (["stack", "up", "--decision-wait", "0s"], "--decision-wait '0s' is no duration"),
        (["stack", "up", "--webhook", "http://me:hush@"], "--webhook 'http://' is no address"),
        (["stack", "up", "--webhook", "mail"], "--webhook 'mail' is no address"),
        (["stack", "up", "--timeout=inf"], "--timeout 'inf' must be 86400 or less"),
    ],
)
def test_wrong_command_line_of_the_server(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    line = refused(server_app, arguments)
    assert said in line
    assert "hush" not in line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("app", PROGRAMS.values(), ids=PROGRAMS)
def test_no_command_at_all_shows_the_list(app: Typer) -> None:
    result = CliRunner().invoke(app, [])
    assert result.exit_code == 2
    assert "Commands:" in result.output


def test_objectives_that_are_no_text_are_named(tmp_path: Path) -> None:
    file = tmp_path / "slo.toml"
    file.write_bytes(b"\xff\xfe")
    assert (
        refused(pdtrace_app, ["slo", "--slo", str(file)]) == f"{file}: is no UTF-8 text, as TOML is"
    )
