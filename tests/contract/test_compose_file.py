"""`collector/compose.yaml` fits the Compose specification, mounts what is there and says which
versions it runs; what it starts is open to nobody else. No container is started here."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jsonschema_rs
import pytest
import yaml

from pdtrace.slo import DEFAULT_SLO
from server.config import Settings
from server.stack.plan import AGENT_JOB, GATEWAY_JOB, ONE_AGENT_WAIT, Ports
from server.stack.programs import COLLECTOR

TEXT = (COLLECTOR / "compose.yaml").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load(TEXT)
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OF_COLLECTORS = [path for path in COLLECTOR.rglob("*.yaml") if "receivers:" in path.read_text()]
PORTS = Ports()
GRAFANA_PORT = 3000
PUBLISHED = {
    "jaeger": PORTS.jaeger_health,
    "prometheus": PORTS.prometheus,
    "alertmanager": PORTS.alertmanager,
    "grafana": GRAFANA_PORT,
    "server": Settings().port,
}
"""Where each says how it is."""


def variables(text: str) -> dict[str, str]:
    """What is asked of the environment, with defaults: compose's way and the collector's."""
    return dict(re.findall(r"\$\{(?:env:)?(\w+):-([^}]*)\}", text))


def test_compose_file_fits_the_specification() -> None:
    schema = json.loads(
        (files("check_jsonschema") / "builtin_schemas/vendor/compose-spec.json").read_text()
    )
    validator = jsonschema_rs.validator_for(schema)
    assert [error.message for error in validator.iter_errors(COMPOSE)] == []
    wrong = yaml.safe_load(TEXT)
    wrong["services"]["jaeger"]["restarts"] = "always"
    assert not validator.is_valid(wrong)


@pytest.mark.parametrize("name", SERVICES)
def test_files_are_mounted_that_are_there_and_none_can_be_written(name: str) -> None:
    for volume in SERVICES[name].get("volumes", ()):
        filled = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", volume)
        source, _, mode = filled.split(":") if filled.count(":") == 2 else (*filled.split(":"), "")
        if source.startswith("."):
            assert (COLLECTOR / source).exists(), source
            assert mode == "ro", volume
        else:
            assert source in COMPOSE["volumes"]


@pytest.mark.parametrize("name", SERVICES)
def test_images_have_a_version(name: str) -> None:
    service = SERVICES[name]
    build = service.get("build", {}).get("dockerfile_inline", "")
    images = re.findall(r"^FROM (\S+)", build, re.MULTILINE) or [service["image"]]
    for image in images:
        assert re.search(r":v?\d+\.\d+", image), image


@pytest.mark.parametrize("name", SERVICES)
def test_service_tells_how_it_is_where_it_listens(name: str) -> None:
    [url] = re.findall(r"http://[^\s'\"]+", " ".join(SERVICES[name]["healthcheck"]["test"]))
    assert urlsplit(url).hostname == "127.0.0.1"
    assert urlsplit(url).port == PUBLISHED[name]


def test_everything_listens_on_loopback_alone() -> None:
    """On the host's network nothing is published by Docker: it is the programs' own addresses."""
    assert all(service["network_mode"] == "host" for service in SERVICES.values())
    assert not [name for name, service in SERVICES.items() if "ports" in service]
    for name, port in (("prometheus", PORTS.prometheus), ("alertmanager", PORTS.alertmanager)):
        assert f"--web.listen-address=127.0.0.1:{port}" in SERVICES[name]["command"]
    assert "--cluster.listen-address=" in SERVICES["alertmanager"]["command"]
    grafana = SERVICES["grafana"]["environment"]
    address = (grafana["GF_SERVER_HTTP_ADDR"], grafana["GF_SERVER_HTTP_PORT"])
    assert address == ("127.0.0.1", str(GRAFANA_PORT))
    assert grafana["PD_PROMETHEUS_URL"] == f"http://127.0.0.1:{PORTS.prometheus}"
    assert grafana["PD_JAEGER_URL"] == f"http://127.0.0.1:{PORTS.jaeger}"
    assert Settings().host == "127.0.0.1"
    assert not [word for word in SERVICES["server"]["command"] if word.startswith("--host")]
    assert "0.0.0.0" not in TEXT


@pytest.mark.parametrize("path", OF_COLLECTORS, ids=lambda path: path.name)
def test_collectors_listen_on_loopback_unless_told_otherwise(path: Path) -> None:
    text = path.read_text()
    addresses = [
        default
        for default in variables(text).values()
        if re.fullmatch(r"\d+\.\d+\.\d+\.\d+(:\d+)?", default)
    ]
    assert addresses
    assert all(address.startswith("127.0.0.1") for address in addresses)
    for place in re.findall(r"^\s*(?:endpoint|host): (.*)$", text, re.MULTILINE):
        assert place.startswith("${env:PD_"), place


def test_jaeger_is_told_what_it_asks_for() -> None:
    told = {
        name: variables(str(value)) for name, value in SERVICES["jaeger"]["environment"].items()
    }
    asked = variables((COLLECTOR / "jaeger.yaml").read_text())
    assert set(told) <= set(asked)
    assert all(set(used) == {name} for name, used in told.items())
    defaults = {name: used[name] for name, used in told.items()}
    assert defaults == {
        "PD_DECISION_WAIT": ONE_AGENT_WAIT,
        "PD_KEEP_PERCENT": "100",
        "PD_SLO_TTFT_S": f"{DEFAULT_SLO.ttft_s:g}",
        "PD_SLO_TOKEN_GAP_S": f"{DEFAULT_SLO.token_gap_s:g}",
    }


def test_prometheus_is_told_where_the_server_is() -> None:
    targets = json.loads((COLLECTOR / "targets" / f"{GATEWAY_JOB}.json").read_text())
    assert targets == [{"targets": [f"127.0.0.1:{Settings().port}"]}]
    [agent] = json.loads((COLLECTOR / "targets" / f"{AGENT_JOB}.json").read_text())[0]["targets"]
    assert f"--agent-port={agent.split(':')[1]}" in SERVICES["server"]["command"]
    assert "--enable-feature=exemplar-storage" in SERVICES["prometheus"]["command"]
