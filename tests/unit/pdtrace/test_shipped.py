"""`pdtrace export`: what is written, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from pdtrace import shipped
from pdtrace.cli import app
from pdtrace.shipped import Shipped, ShippedError, write


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["export", *arguments])
    return result.exit_code, result.output


def test_boards_are_written_and_named(tmp_path: Path) -> None:
    code, said = run("dashboards", str(tmp_path / "new" / "folder"))
    assert code == 0
    paths = [Path(line) for line in said.splitlines()]
    assert {path.stem for path in paths} == {json.loads(path.read_text())["uid"] for path in paths}


def test_rules_come_in_both_formats(tmp_path: Path) -> None:
    assert run("rules", str(tmp_path))[0] == 0
    assert (tmp_path / "prometheus" / "pdtrace.rules.yml").exists()
    assert (tmp_path / "grafana" / "alerts.yaml").exists()


def test_composed_services_find_their_files_in_an_exported_copy(tmp_path: Path) -> None:
    """Beside them: there is no checkout around it."""
    assert run("collector", str(tmp_path))[0] == 0
    services = yaml.safe_load((tmp_path / "compose.yaml").read_text())["services"]
    mounted = {
        re.sub(r"\$\{\w+:-(.*?)\}", r"\1", volume).split(":")[0]
        for service in services.values()
        for volume in service.get("volumes", ())
    }
    files = {path for path in mounted if "/" in path}
    assert "./generated/boards" in files
    for path in files:
        assert (tmp_path / path).exists(), path
        assert (tmp_path / path).resolve().is_relative_to(tmp_path), path
    checkout = Path(__file__).resolve().parents[3] / "collector" / "compose.yaml"
    assert "../dashboards/generated" in checkout.read_text()


def test_files_that_differ_are_overwritten_on_demand_only(tmp_path: Path) -> None:
    write(Shipped.DASHBOARDS, tmp_path)
    write(Shipped.DASHBOARDS, tmp_path)  # the same again harms nothing
    changed = tmp_path / "pd-slow.json"
    changed.write_text("{}")
    with pytest.raises(ShippedError, match=r"pd-slow\.json would be overwritten and differs"):
        write(Shipped.DASHBOARDS, tmp_path)
    assert changed.read_text() == "{}"
    write(Shipped.DASHBOARDS, tmp_path, replace=True)
    assert changed.read_text() != "{}"


def test_what_cannot_be_written_is_said_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ShippedError, match=r"file.*(exists|directory)"):
        write(Shipped.DASHBOARDS, tmp_path / "file")


def test_installation_without_them_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipped, "_FOLDERS", {Shipped.RULES: ((tmp_path, ""),)})
    with pytest.raises(ShippedError, match="this installation has no rules"):
        write(Shipped.RULES, tmp_path / "out")
