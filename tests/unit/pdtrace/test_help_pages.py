"""Help pages of both programs: no word is cut, at any width of the terminal."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from typer import Typer
from typer.main import get_command
from typer.testing import CliRunner

from pdtrace.cli import app as pdtrace_app
from server.cli import app as server_app
from server.stack.cli import stack_app

PAGES = [
    *((pdtrace_app, name) for name in ("why", "top", "check", "slo", "stages", "agent")),
    *((server_app, name) for name in ("up", "inject", "keys", "demo")),
    *((stack_app, name) for name in ("up", "down", "status")),
]


def words(app: Typer, name: str) -> Iterator[str]:
    """Every option name and every word that the page of a command has to hold."""
    command = get_command(app).commands[name]  # pyright: ignore
    for text in (command.help, command.epilog, *(param.help for param in command.params)):
        yield from re.sub(r"\s+", " ", (text or "").replace("\u2011", "-")).split()
    for param in command.params:
        yield from (opt for opt in (*param.opts, *param.secondary_opts) if opt.startswith("-"))


@pytest.mark.parametrize("columns", [40, 80, 200])
@pytest.mark.parametrize(("app", "name"), PAGES, ids=[name for _, name in PAGES])
def test_no_word_is_cut(app: Typer, name: str, columns: int) -> None:
    result = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": str(columns)})
    assert result.exit_code == 0
    page = set(re.sub(r"\s+", " ", result.stdout).split())
    # A long word with a hyphen in it, no option, may be broken there.
    joined = re.sub(r"-\n\s+", "-", result.stdout)
    page |= set(joined.split())
    assert [word for word in words(app, name) if word not in page] == []
    options = re.findall(r"--[a-z][a-z-]*", result.stdout)
    assert [option for option in options if option.endswith("-")] == []


@pytest.mark.parametrize("app", [pdtrace_app, server_app], ids=["pdtrace", "server"])
def test_list_of_commands_has_whole_sentences(app: Typer) -> None:
    result = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "80"})
    page = " ".join(result.stdout.split())
    for name, command in get_command(app).commands.items():  # pyright: ignore
        sentence = re.split(r"(?<=\.)\s", " ".join((command.help or "").split()))[0]
        assert f"{name} {sentence}".replace("\u2011", "-") in page
