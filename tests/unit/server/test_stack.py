"""The stack's own logic: what is started with which addresses, whose processes are stopped, and how
a server joins. The programs themselves run in the integration tests."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from dashboards.build import GENERATED
from pdtrace.agent.buckets import duration_edges_from
from pdtrace.slo import Slo, read_slo
from server.cli import app as server_app
from server.cli import stack_to_join
from server.errors import StartError
from server.shown_commands import pdtrace, python
from server.stack import lifecycle
from server.stack.cli import next_commands
from server.stack.detached import Identity, is_running, start, stop
from server.stack.joining import add_running_servers, find_stack
from server.stack.lifecycle import StackSettings, start_stack, stop_stack
from server.stack.plan import (
    Ports,
    Sampling,
    free_ports,
    plan_programs,
    plan_targets,
    port_names,
    run_dir_of,
    target_list,
    with_webhook,
)
from server.stack.programs import Programs, find_programs, jaeger_path
from server.stack.state import Running, StackState, boot_id, read_state, write_state
from tests.support.server import is_running as lives

PROGRAMS = Programs(Path("/x/jaeger"), Path("/x/prometheus"), Path("/x/alertmanager"))
SLEEPER = (sys.executable, "-c", "import time; time.sleep(600)")
DEAF = (
    sys.executable,
    "-c",
    "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "print('deaf', flush=True); time.sleep(600)",
)
WAIT_S = 30.0


def wait_until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def test_no_two_programs_share_a_port() -> None:
    handed_out = itertools.chain([5, 5, 6, 5], itertools.count(7))
    ports = free_ports(lambda: next(handed_out))
    assert len({getattr(ports, name) for name in port_names()}) == len(port_names())
    assert Ports().jaeger == 16686


def test_programs_are_told_every_address(tmp_path: Path) -> None:
    ports = free_ports(iter(range(20_000, 20_100)).__next__)
    sampling = Sampling(keep_percent=12.5, decision_wait="660s")
    plan = {one.name: one for one in plan_programs(PROGRAMS, tmp_path, ports, sampling)}
    told = json.dumps([[*one.command, one.environment] for one in plan.values()])
    for name in port_names():
        assert str(getattr(ports, name)) in told, name
    jaeger = plan["jaeger"].environment
    assert (jaeger["PD_KEEP_PERCENT"], jaeger["PD_DECISION_WAIT"]) == ("12.5", "660s")
    assert "--enable-feature=exemplar-storage" in plan["prometheus"].command
    assert all("0.0.0.0" not in word for one in plan.values() for word in one.command)
    # Every variable that is set is one that the file asks for.
    asked = (lifecycle.COLLECTOR / "jaeger.yaml").read_text()
    for name in jaeger:
        assert f"${{env:{name}:-" in asked, name


def test_what_to_do_next_is_for_the_stack_that_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each line is one that a shell takes; `make stack-down` would stop another stack."""
    monkeypatch.chdir(tmp_path)
    state = a_state(Identity(1, 1))
    usual = [shlex.split(line, comments=True) for line in next_commands(Path("run/stack"), state)]
    assert [words[1:] for words in usual] == [
        ["-m", "server", "up"],
        ["-m", "pdtrace", "why", "--slowest", "3", "--from", "http://127.0.0.1:1"],
        ["-m", "server", "stack", "down"],
    ]
    other = [shlex.split(line, comments=True) for line in next_commands(Path("a b"), state)]
    assert [words[1:] for words in other] == [
        ["-m", "server", "up", "--stack", "a b"],
        ["-m", "pdtrace", "why", "--slowest", "3", "--from", "http://127.0.0.1:1"],
        ["-m", "server", "stack", "down", "--dir", "a b"],
    ]
    for words in (*usual, *other):
        assert Path(words[0]).samefile(sys.executable)


def test_commands_are_shown_as_in_the_pages_where_these_are_what_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = tmp_path / ".venv" / "bin"
    environment.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    (environment / "python").touch()
    assert python("-m", "server") == f"{shlex.quote(sys.executable)} -m server"  # another's
    monkeypatch.setattr(sys, "executable", str(environment / "python3"))
    assert python("-m", "server") == ".venv/bin/python -m server"
    assert pdtrace("why", "it's") == """.venv/bin/python -m pdtrace why 'it'"'"'s'"""
    (environment / "pdtrace").touch()
    assert pdtrace("why") == ".venv/bin/pdtrace why"


def test_own_objectives_reach_rules_boards_sampling_and_servers(
    tmp_path: Path, free_stack_ports: Ports
) -> None:
    """One file, given once: to what `stack up` starts, and to servers that join."""
    sleeper = script(tmp_path / "sleeper", "exec sleep 600")
    web = script(tmp_path / "web", "exit 1")
    slo = Slo(ttft_s=2.0, token_gap_s=0.07, error_objective=0.5, oldest_s=1e-5)
    folder = tmp_path / "stack"
    settings = StackSettings(folder=folder, ports=free_stack_ports, sampling=Sampling(slo=slo))
    programs = Programs(jaeger=sleeper, prometheus=web, alertmanager=sleeper)
    with pytest.raises(StartError, match="prometheus ended"):
        start_stack(settings, programs, timeout_s=WAIT_S, progress=lambda _: None)
    assert read_slo(folder / "slo.toml") == slo
    [rules] = [path.read_text() for path in (folder / "rules").iterdir()]
    assert 'le="2.000001"' in rules
    assert 'le="1.25"' not in rules
    assert f"runbook_url: {(folder / 'generated' / 'runbooks').as_uri()}/PD" in rules
    assert (folder / "generated" / "runbooks" / "PDProcessDown.md").exists()
    overview = (folder / "generated" / "boards" / "pd-overview.json").read_text()
    assert overview != (GENERATED / "boards" / "pd-overview.json").read_text()
    jaeger = {one.name: one for one in plan_programs(PROGRAMS, folder, Ports(), settings.sampling)}
    assert jaeger["jaeger"].environment["PD_SLO_TTFT_S"] == "2.0"
    assert jaeger["jaeger"].environment["PD_SLO_TOKEN_GAP_S"] == "0.07"


def test_server_that_joins_measures_what_the_stacks_rules_ask_for(tmp_path: Path) -> None:
    process = start(SLEEPER, environment={}, folder=tmp_path, log=tmp_path / "log")
    try:
        told = {"PDTRACE_SLO_SECONDS": "2.0,0.07"}
        write_state(tmp_path, msgspec.structs.replace(a_state(process), environment=told))
        stack = find_stack(tmp_path)
        assert stack is not None
        environment: dict[str, str] = {}
        stack.measure_alike(environment)
        assert environment == told
        assert {2.000001, 0.07} <= set(duration_edges_from(environment))
        own = {"PDTRACE_SLO_SECONDS": "5"}
        stack.measure_alike(own)
        assert own == {"PDTRACE_SLO_SECONDS": "5"}
    finally:
        stop([process], timeout_s=WAIT_S)


def test_unusable_objectives_are_named_and_nothing_is_started(tmp_path: Path) -> None:
    mine = tmp_path / "slo.toml"
    mine.write_text("ttft = 1.0")
    asked = ["stack", "up", "--dir", str(tmp_path / "stack"), "--slo", str(mine)]
    result = CliRunner().invoke(server_app, asked)
    assert result.exit_code == 2
    assert f"error: {mine}: " in result.stderr
    assert not (tmp_path / "stack").exists()


def test_missing_program_is_named_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDTRACE_JAEGER", str(tmp_path / "nowhere"))
    assert jaeger_path() == tmp_path / "nowhere"
    nobody: Callable[[str], None] = lambda _: None  # noqa: E731
    monkeypatch.setattr("shutil.which", nobody)
    with pytest.raises(
        StartError, match="not installed: jaeger, prometheus, alertmanager; `make stack`"
    ):
        find_programs()


def test_stack_that_was_asked_for_and_is_not_up_is_an_error(tmp_path: Path) -> None:
    asked = ["up", "--stack", str(tmp_path / "none"), "--run-dir", str(tmp_path / "run")]
    result = CliRunner().invoke(server_app, asked)
    assert result.exit_code == 2
    assert "nothing is up in" in result.stderr
    assert "stack up --dir" in result.stderr
    assert not (tmp_path / "run").exists()


def test_server_with_a_run_directory_of_its_own_joins_nothing_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    process = start(SLEEPER, environment={}, folder=tmp_path, log=tmp_path / "log")
    try:
        (tmp_path / "run" / "stack").mkdir(parents=True)
        write_state(tmp_path / "run" / "stack", a_state(process))
        assert stack_to_join(None, tmp_path / "elsewhere") is None
        assert "OTEL_EXPORTER_OTLP_ENDPOINT" not in os.environ
        joined = stack_to_join(None, None)
        assert joined is not None
        assert os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] == "http://127.0.0.1:4318"
        assert joined.jaeger_url == "http://127.0.0.1:1"
    finally:
        os.environ.pop("OTEL_EXPORTER_OTLP_ENDPOINT", None)
        stop([process], timeout_s=WAIT_S)
    assert stack_to_join(None, None) is None


def test_targets_are_lists_that_prometheus_reads(tmp_path: Path) -> None:
    lists = plan_targets(Ports())
    assert json.loads(lists["targets/span-metrics-stack.json"])[0]["targets"] == ["127.0.0.1:8889"]
    assert run_dir_of(lists["targets/span-metrics-stack.json"]) is None
    assert run_dir_of(target_list("::1", 8000, run_dir=tmp_path)) == tmp_path
    assert json.loads(target_list("::1", 8000))[0]["targets"] == ["[::1]:8000"]
    assert run_dir_of("no JSON") is None


def test_webhook_goes_where_there_is_room_for_one() -> None:
    text = (lifecycle.COLLECTOR / "alertmanager.yml").read_text()
    assert with_webhook(text, None) == text
    assert "http://127.0.0.1:5/x" in with_webhook(text, "http://127.0.0.1:5/x")
    with pytest.raises(StartError, match="receivers of its own"):
        with_webhook("receivers: []", "http://127.0.0.1:5/x")


def test_started_process_outlives_signals_to_the_terminal_and_is_stopped(tmp_path: Path) -> None:
    process = start(SLEEPER, environment={}, folder=tmp_path, log=tmp_path / "log")
    assert is_running(process)
    assert os.getsid(process.pid) == process.pid != os.getsid(0)
    assert stop([process], timeout_s=WAIT_S) == []
    assert not is_running(process)


def test_process_that_does_not_listen_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = start(DEAF, environment={}, folder=tmp_path, log=log)
    wait_until(log.read_text, "it is deaf")
    assert stop([process], timeout_s=0.2) == [process]
    wait_until(lambda: not is_running(process), "it is killed")


def test_another_process_with_the_same_pid_is_left_alone(tmp_path: Path) -> None:
    with subprocess.Popen(SLEEPER) as other:
        try:
            somebody = Identity(other.pid, 1)
            assert not is_running(somebody)
            assert stop([somebody], timeout_s=1.0) == []
            assert other.poll() is None
            state = a_state(Identity(other.pid, 1))
            write_state(tmp_path, state)
            assert stop_stack(tmp_path) == ()
            assert other.poll() is None
        finally:
            other.send_signal(signal.SIGKILL)


def a_state(process: Identity, *, boot: str | None = None) -> StackState:
    running = Running(name="jaeger", process=process, url="http://127.0.0.1:1", log="log")
    return StackState(
        programs=(running,),
        otlp="http://127.0.0.1:4318",
        boot_id=boot_id() if boot is None else boot,
        started_at=1.0,
    )


def test_what_was_started_before_a_reboot_does_not_run(tmp_path: Path) -> None:
    process = start(SLEEPER, environment={}, folder=tmp_path, log=tmp_path / "log")
    try:
        assert a_state(process).is_up
        assert not a_state(process, boot="another").is_up
    finally:
        stop([process], timeout_s=WAIT_S)
    assert not a_state(process).is_up


def test_file_that_is_no_state_is_refused(tmp_path: Path) -> None:
    assert read_state(tmp_path) is None
    (tmp_path / "stack.json").write_text("{}")
    with pytest.raises(StartError, match="cannot be read"):
        read_state(tmp_path)


def test_folder_that_cannot_be_made_is_told_in_a_line(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    programs = Programs(*[Path("/bin/true")] * 3)
    for folder in file, file / "stack":
        settings = StackSettings(folder=folder)
        with pytest.raises(StartError, match=f"{folder}: (File exists|Not a directory)"):
            start_stack(settings, programs, timeout_s=1.0, progress=print)


def test_taken_port_is_named_and_nothing_is_started(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ports = free_ports(iter([port, *range(20_200, 20_300)]).__next__)
        with pytest.raises(StartError, match=rf"port {port} \(otlp_grpc\)"):
            start_stack(
                StackSettings(folder=tmp_path, ports=ports),
                PROGRAMS,
                timeout_s=1.0,
                progress=lambda _: None,
            )
    assert read_state(tmp_path) is None


def test_program_that_ends_takes_the_others_with_it(
    tmp_path: Path, free_stack_ports: Ports
) -> None:
    pids = tmp_path / "pids"
    sleeper = script(tmp_path / "sleeper", f"echo $$ >>{pids}; exec sleep 600")
    both = f"while [ $(wc -l <{pids}) -lt 2 ]; do sleep 0.05; done 2>/dev/null"
    ends = script(tmp_path / "ends", f"touch {pids}; {both}; echo no such luck; exit 3")
    programs = Programs(jaeger=sleeper, prometheus=ends, alertmanager=sleeper)
    folder = tmp_path / "stack"
    with pytest.raises(StartError, match="prometheus ended: no such luck"):
        start_stack(
            StackSettings(folder=folder, ports=free_stack_ports),
            programs,
            timeout_s=WAIT_S,
            progress=lambda _: None,
        )
    assert read_state(folder) is None
    # Killed children of this process may be zombies for a moment.
    assert not [pid for pid in map(int, pids.read_text().split()) if lives(pid)]


def test_rules_of_the_same_name_take_the_place_of_the_shipped_ones(
    tmp_path: Path, free_stack_ports: Ports
) -> None:
    """Both would record the same series, each its own values."""
    own, other = tmp_path / "pdtrace.rules.yml", tmp_path / "more.yml"
    own.write_text("groups: [] # own")
    other.write_text("groups: []")
    ends = script(tmp_path / "ends", "exit 3")
    for rules in ((), (other, own)):
        settings = StackSettings(folder=tmp_path / "stack", ports=free_stack_ports, rules=rules)
        with pytest.raises(StartError, match="ended"):
            start_stack(
                settings, Programs(ends, ends, ends), timeout_s=WAIT_S, progress=lambda _: None
            )
        found = {path.name.partition("-")[2]: path.read_text() for path in rules_of(settings)}
        assert len(found) == len(rules_of(settings))
        if rules:
            assert found == {path.name: path.read_text() for path in rules}
        else:
            assert "PDProcessDown" in found["pdtrace.rules.yml"]


def rules_of(settings: StackSettings) -> list[Path]:
    return sorted((settings.folder / "rules").iterdir())


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o700)
    return path


@pytest.fixture
def free_stack_ports() -> Ports:
    def free_port() -> int:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return probe.getsockname()[1]

    return free_ports(free_port)


def test_server_joins_a_stack_that_is_up_and_leaves_it(tmp_path: Path) -> None:
    (tmp_path / "targets").mkdir()
    assert find_stack(tmp_path) is None
    process = start(SLEEPER, environment={}, folder=tmp_path, log=tmp_path / "log")
    try:
        write_state(tmp_path, a_state(process))
        stack = find_stack(tmp_path)
        assert stack is not None
        environment: dict[str, str] = {}
        assert stack.export_here(environment)
        assert environment == {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}
        for said in (
            {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://elsewhere"},
            {"OTEL_SDK_DISABLED": "true"},
            {"OTEL_TRACES_EXPORTER": "none"},
        ):
            before = dict(said)
            assert not stack.export_here(said)
            assert said == before

        dead, alive, run = (tmp_path / name for name in ("dead", "alive", "run"))
        for folder, pid in ((dead, 2**22 + 1), (alive, os.getpid())):
            folder.mkdir()
            (folder / "server.json").write_text(
                json.dumps(
                    {"ready": True, "pid": pid, "url": "http://127.0.0.1:1", "agent_url": None}
                )
            )
        stack.add(dead, url="http://127.0.0.1:1", agent_url=None)
        assert add_running_servers(stack, tmp_path) == ["http://127.0.0.1:1"]
        stack.add(run, url="http://[::1]:8000", agent_url="http://127.0.0.1:9464")
        lists = {
            run_dir_of(path.read_text()): path for path in (tmp_path / "targets").glob("pdtrace-*")
        }
        assert set(lists) == {alive, run}  # who was killed is scraped no more
        stack.remove(run)
        assert len(list((tmp_path / "targets").glob("pdtrace-*"))) == 1
    finally:
        stop([process], timeout_s=WAIT_S)
    assert find_stack(tmp_path) is None
