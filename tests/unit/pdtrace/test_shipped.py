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


def links(folder: Path, annotation: str) -> list[str]:
    """Of every alert in both files, as the programs read them."""
    prometheus = yaml.safe_load((folder / "prometheus" / "pdtrace.rules.yml").read_text())
    grafana = yaml.safe_load((folder / "grafana" / "alerts.yaml").read_text())
    return [
        rule["annotations"][annotation]
        for document in (prometheus, grafana)
        for group in document["groups"]
        for rule in group["rules"]
        if "record" not in rule
    ]


def test_alerts_lead_to_the_pages_that_are_written_beside_them(tmp_path: Path) -> None:
    assert run("rules", str(tmp_path))[0] == 0
    urls = links(tmp_path, "runbook_url")
    assert len(urls) == 2 * len(set(urls)) > 40
    for url in urls:
        assert (tmp_path / url).read_text().startswith(f"# {Path(url).stem}\n")
    assert {path.name for path in (tmp_path / "runbooks").iterdir()} == {
        Path(url).name for url in urls
    }


@pytest.mark.parametrize("base", ["https://wiki.example/pd", "https://wiki.example/pd/", "/srv"])
def test_alerts_lead_where_grafana_and_the_pages_are_said_to_be(tmp_path: Path, base: str) -> None:
    beside, elsewhere = tmp_path / "beside", tmp_path / "elsewhere"
    run("rules", str(beside))
    code, said = run("rules", str(elsewhere), "--runbooks", base, "--grafana", "http://g.example/")
    assert code == 0, said
    assert links(elsewhere, "runbook_url") == [
        f"{base.rstrip('/')}/{Path(url).name}" for url in links(beside, "runbook_url")
    ]
    assert links(elsewhere, "dashboard") == [
        f"http://g.example{path}" for path in links(beside, "dashboard")
    ]
    for name in ("prometheus/pdtrace.rules.yml", "grafana/alerts.yaml"):
        one, other = ((folder / name).read_text().splitlines() for folder in (beside, elsewhere))
        changed = {a.split(":")[0].strip() for a, b in zip(one, other, strict=True) if a != b}
        assert changed == {"runbook_url", "dashboard"}


@pytest.mark.parametrize("base", ["", "two words", "{{ $labels.job }}", "https://a\nb: c"])
def test_base_that_could_not_stand_in_a_rule_is_refused(tmp_path: Path, base: str) -> None:
    code, said = run("rules", str(tmp_path / "out"), "--runbooks", base)
    assert code == 2
    assert "give an address or a path" in " ".join(said.split())
    assert not (tmp_path / "out").exists()


def test_only_rules_have_links_of_alerts(tmp_path: Path) -> None:
    code, said = run("dashboards", str(tmp_path), "--runbooks", "/srv")
    assert code == 2
    assert "dashboards hold no links of alerts" in said


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
    assert (tmp_path / "generated" / "runbooks" / "PDProcessDown.md").exists()
    checkout = Path(__file__).resolve().parents[3] / "collector" / "compose.yaml"
    assert "../dashboards/generated" in checkout.read_text()


@pytest.mark.parametrize("what", list(Shipped))
def test_links_of_exported_pages_lead_to_what_is_exported(tmp_path: Path, what: Shipped) -> None:
    """There is no checkout around them: what is elsewhere is named, and no link."""
    assert run(what, str(tmp_path / "in" / "deep"))[0] == 0
    for page in tmp_path.rglob("*.md"):
        for target in re.findall(r"\]\(([^)\s]*)\)", page.read_text()):
            file = (page.parent / target.partition("#")[0]).resolve()
            assert "://" in target or (file.is_relative_to(tmp_path) and file.exists()), target
    if what is Shipped.COLLECTOR:
        text = (tmp_path / "in" / "deep" / "README.md").read_text()
        assert "what checks it: `docs/stack.md`. " in text
        assert "Metrics: `docs/agent.md`, `docs/metrics.md`." in text


def test_links_to_what_is_exported_beside_a_page_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    (source / "sub" / "b.md").write_text("[up](../a.md#x) [out](../../c.md) [far](https://x.y/z)")
    (source / "a.md").write_text("[b](sub/b.md) [`c`](../c.md#part) [here](#part)")
    monkeypatch.setattr(shipped, "_FOLDERS", {Shipped.RULES: ((source, "into"),)})
    written = {str(path): content.decode() for path, content in shipped.files(Shipped.RULES)}
    assert written == {
        "into/a.md": "[b](sub/b.md) `c` [here](#part)",
        "into/sub/b.md": "[up](../a.md#x) `out` [far](https://x.y/z)",
    }


def test_prometheus_finds_its_rules_in_an_exported_copy(tmp_path: Path) -> None:
    """A pattern that matches nothing is no error to Prometheus: it would run without rules."""
    assert run("collector", str(tmp_path))[0] == 0
    patterns = yaml.safe_load((tmp_path / "prometheus.yml").read_text())["rule_files"]
    found = [path.name for pattern in patterns for path in tmp_path.glob(pattern)]
    assert found == ["pdtrace.rules.yml"]


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
