from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from server import children
from server.children import Child, explain_crash, explain_start_failure
from server.config import ProcessConfig, Settings, flag
from server.errors import StartError
from server.injection.fault import Pause
from server.launch import Launcher, thread_limits
from server.listening import is_ready, listen, reachable_host
from server.plan import agent_config, plan_processes, pool_bytes, successor
from server.process import load_config, main


def plan(settings: Settings) -> dict[str, ProcessConfig]:
    ports = iter(range(9000, 9100))
    processes = plan_processes(
        settings,
        endpoint=lambda name: f"ipc:///sock/{name}",
        pools=Path("/pools"),
        http_fd=7,
        free_port=lambda: next(ports),
    )
    return {process.instance: process for process in processes}


def test_pd_server_has_one_transfer_process_that_both_sides_use() -> None:
    processes = plan(Settings(prefill=2, decode=2))
    assert list(processes) == [
        "transfer-0",
        "prefill-0",
        "prefill-1",
        "decode-0",
        "decode-1",
        "gateway-0",
    ]
    workers = [p for p in processes.values() if p.role in {"prefill", "decode"}]
    assert {p.transfer_endpoint for p in workers} == {"ipc:///sock/transfer-0"}
    assert {p.transfer_address for p in workers} == {None}
    assert len({p.pool_path for p in workers}) == 4
    assert processes["gateway-0"].http_fd == 7
    assert {p.http_fd for p in workers} == {None}


def test_tcp_transfer_gives_each_side_its_own_transfer_process() -> None:
    processes = plan(Settings(transfer="tcp"))
    assert processes["prefill-0"].transfer_endpoint == "ipc:///sock/transfer-0"
    assert processes["decode-0"].transfer_endpoint == "ipc:///sock/transfer-1"
    assert processes["decode-0"].transfer_address == processes["transfer-1"].transfer_address
    assert processes["transfer-0"].transfer_address != processes["transfer-1"].transfer_address


def test_colocated_server_has_no_transfer_process() -> None:
    assert list(plan(Settings(mode="colocated", workers=2))) == [
        "worker-0",
        "worker-1",
        "gateway-0",
    ]


def test_incarnations_differ_between_processes_and_starts() -> None:
    seen = [p.incarnation for _ in range(2) for p in plan(Settings()).values()]
    assert len(set(seen)) == len(seen)


def test_successor_is_found_where_the_one_before_was_and_shares_nothing_with_it() -> None:
    before = plan(Settings(transfer="tcp"))["decode-0"]
    after = successor(before)
    assert after.incarnation != before.incarnation
    assert after.pool_path is not None and before.pool_path is not None
    assert Path(after.pool_path).parent == Path(before.pool_path).parent
    assert after.pool_path != before.pool_path != successor(after).pool_path
    assert after == msgspec.structs.replace(
        before, incarnation=after.incarnation, pool_path=after.pool_path, follows=True
    )


def test_successor_does_not_suffer_the_faults_of_the_one_before() -> None:
    fault = Pause(at="decode-0", ms=1)
    before = plan(Settings(allow_faults=True, faults=(fault,)))["decode-0"]
    assert before.settings.faults == (fault,)
    assert successor(before).settings.faults == ()


def test_successor_of_a_process_without_a_pool_has_none() -> None:
    gateway = successor(plan(Settings())["gateway-0"])
    assert (gateway.pool_path, gateway.http_fd) == (None, 7)


def test_only_the_gateway_is_told_the_api_key() -> None:
    settings = Settings(prefill=2, api_key="secret")
    agent = agent_config(settings, endpoint=lambda name: f"ipc:///sock/{name}")
    processes = {**plan(settings), "agent": agent}
    told = {name for name, config in processes.items() if config.settings.api_key is not None}
    assert told == {"gateway-0"}
    again = {name: successor(config) for name, config in processes.items()}
    assert {name for name, config in again.items() if config.settings.api_key} == told
    assert {c.settings.prefill for c in processes.values()} == {2}


def test_plans_survive_their_file(tmp_path: Path) -> None:
    for config in plan(Settings(transfer="tcp", api_key="secret")).values():
        path = tmp_path / config.instance
        path.write_bytes(msgspec.json.encode(config))
        assert load_config(path) == config


def test_pool_bytes_count_every_worker() -> None:
    one = pool_bytes(Settings(model="fake", prefill_pages=10, decode_pages=20))
    assert pool_bytes(Settings(model="fake", prefill_pages=10, decode_pages=20, decode=2)) == (
        one * 50 // 30
    )
    colocated = Settings(model="fake", mode="colocated", workers=3, decode_pages=10)
    assert pool_bytes(colocated) == one


def test_busy_port_is_named() -> None:
    with (
        listen("127.0.0.1", 0) as first,
        pytest.raises(StartError, match=r"port \d+ on 127\.0\.0\.1 cannot be used \(Address alre"),
    ):
        listen("127.0.0.1", first.getsockname()[1])


def test_unknown_host_is_named() -> None:
    with pytest.raises(StartError, match="no-such-host"):
        listen("no-such-host.invalid", 0)


def test_is_ready_is_false_without_a_server() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        assert not is_ready("127.0.0.1", probe.getsockname()[1])


@pytest.mark.parametrize(
    ("host", "expected"), [("0.0.0.0", "127.0.0.1"), ("::", "::1"), ("10.0.0.1", "10.0.0.1")]
)
def test_reachable_host(host: str, expected: str) -> None:
    assert reachable_host(host) == expected


def test_thread_limits_cover_the_numeric_libraries() -> None:
    environment = thread_limits(3)
    assert environment["OMP_NUM_THREADS"] == environment["MKL_NUM_THREADS"] == "3"


def test_prepare_refuses_a_missing_model_before_it_makes_anything(tmp_path: Path) -> None:
    settings = Settings(model=str(tmp_path / "nope.gguf"), run_dir=str(tmp_path / "run"), port=0)
    with pytest.raises(ValueError, match=r"no model at .*nope\.gguf"):
        Launcher.prepare(settings)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["run_dir", "host", "model", "served_name", "api_key"])
def test_settings_that_are_no_utf8_are_refused_by_name(name: str) -> None:
    with pytest.raises(StartError, match=f"^{flag(name)} is not valid UTF-8$"):
        msgspec.structs.replace(Settings(), **{name: os.fsdecode(b"name-\xff")})


@pytest.mark.parametrize(
    "name", ["heartbeat_s", "dead_after_s", "stalled_after_s", "gap_threshold_s"]
)
@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_times_that_are_not_positive_are_refused_by_name(name: str, seconds: float) -> None:
    with pytest.raises(StartError, match=f"^{flag(name)} is .*, expected more than 0$"):
        msgspec.structs.replace(Settings(), **{name: seconds})


def test_prepare_refuses_a_taken_agent_port_before_it_makes_anything(tmp_path: Path) -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        settings = Settings(model="fake", run_dir=str(tmp_path / "run"), port=0, agent_port=port)
        with pytest.raises(StartError, match=f"port {port} .* choose another with --agent-port"):
            Launcher.prepare(settings)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("changes", [{"agent_port": -1}, {"record": False}])
def test_agent_answers_nowhere_without_a_port_or_a_recording(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    settings = Settings(model="fake", run_dir=str(tmp_path / "run"), port=0, **changes)
    launcher = Launcher.prepare(settings)
    try:
        assert launcher.agent_url is None
        assert launcher.state().agent_url is None
    finally:
        launcher.close()


def test_prepare_resolves_port_and_model_name(tmp_path: Path) -> None:
    launcher = Launcher.prepare(Settings(model="fake", run_dir=str(tmp_path / "run"), port=0))
    try:
        assert launcher.settings.port > 0
        assert launcher.settings.served_name == "fake"
        assert launcher.url == f"http://127.0.0.1:{launcher.settings.port}"
        assert launcher.settings.agent_port > 0
        assert launcher.agent_url == f"http://127.0.0.1:{launcher.settings.agent_port}"
    finally:
        launcher.close()
    assert launcher.run_dir.pools is not None
    assert not launcher.run_dir.pools.exists()


def test_processes_that_cannot_be_started_are_one_clear_error(tmp_path: Path) -> None:
    launcher = Launcher.prepare(Settings(model="fake", run_dir=str(tmp_path / "run"), port=0))
    launcher.run_dir.config("agent").mkdir()
    try:
        with pytest.raises(
            StartError, match=r"cannot start agent in .*/run: Is a directory\. Make"
        ):
            launcher.start()
    finally:
        launcher.close()


def test_state_hides_the_api_key(tmp_path: Path) -> None:
    launcher = Launcher.prepare(
        Settings(model="fake", run_dir=str(tmp_path / "run"), port=0, api_key="hunter2")
    )
    try:
        assert "hunter2" not in str(launcher.state())
    finally:
        launcher.close()


def child_running(code: str, log: Path, role: str = "decode") -> Child:
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-u", "-c", code], stdout=file, stderr=subprocess.STDOUT
        )
    return Child(f"{role}-0", role, process, log)


def wait_for_output(child: Child) -> None:
    deadline = time.monotonic() + 60
    while not child.log_tail() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert child.log_tail()


def test_stop_ends_a_process_that_takes_sigterm(tmp_path: Path) -> None:
    child = child_running("import signal; print('up'); signal.pause()", tmp_path / "log")
    wait_for_output(child)
    assert children.stop([child], timeout_s=20) == []
    assert child.exit_code == -signal.SIGTERM


def test_stop_continues_a_stopped_process(tmp_path: Path) -> None:
    child = child_running("import signal; print('up'); signal.pause()", tmp_path / "log")
    wait_for_output(child)
    os.kill(child.pid, signal.SIGSTOP)
    assert children.stop([child], timeout_s=20) == []


def test_a_child_runs_the_module_that_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "another_entry.py").write_text("import sys; print(*sys.argv[1:])")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    config = tmp_path / "config.json"
    child = children.spawn(
        instance="decode-0",
        role="decode",
        config=config,
        log=tmp_path / "log",
        environment={},
        module="another_entry",
    )
    assert child.process.wait(timeout=60) == 0
    assert child.log_tail() == [f"{config} --parent {os.getpid()}"]


IGNORES_SIGTERM = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print('up')
while True:
    signal.pause()
"""


def test_stop_kills_a_process_that_ignores_sigterm_once_its_time_is_up(tmp_path: Path) -> None:
    child = child_running(IGNORES_SIGTERM, tmp_path / "log")
    wait_for_output(child)
    assert children.stop([child], timeout_s=0.2) == [child]
    assert child.describe_exit() == f"decode-0 (pid {child.pid}) was killed by SIGKILL"


def test_stop_in_a_hurry_does_not_wait(tmp_path: Path) -> None:
    child = child_running(IGNORES_SIGTERM, tmp_path / "log")
    wait_for_output(child)
    begin = time.monotonic()
    assert children.stop([child], timeout_s=60, hurry=lambda: True) == [child]
    assert time.monotonic() - begin < 30


def test_a_stop_and_a_continuation_are_each_noticed_once(tmp_path: Path) -> None:
    child = child_running("import signal; print('up'); signal.pause()", tmp_path / "log")
    wait_for_output(child)
    assert child.take_stop_change() is None
    os.kill(child.pid, signal.SIGSTOP)
    assert wait_for_change(child) is True
    assert child.take_stop_change() is None
    os.kill(child.pid, signal.SIGCONT)
    assert wait_for_change(child) is False
    children.kill([child])
    assert child.take_stop_change() is None


def wait_for_change(child: Child) -> bool | None:
    deadline = time.monotonic() + 60
    while (change := child.take_stop_change()) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    return change


def test_start_failure_is_the_childs_own_line(tmp_path: Path) -> None:
    code = "import sys; print('noise'); print('error: no such page size'); sys.exit(2)"
    child = child_running(code, tmp_path / "log")
    child.process.wait(timeout=60)
    assert explain_start_failure(child) == "decode-0: no such page size"


def test_crash_shows_how_it_ended_and_the_end_of_the_log(tmp_path: Path) -> None:
    child = child_running("print('last words'); raise SystemExit(3)", tmp_path / "log")
    child.process.wait(timeout=60)
    text = explain_crash(child)
    assert f"decode-0 (pid {child.pid}) exited with code 3" in text
    assert text.endswith("\n  last words")


def test_process_entry_says_why_it_cannot_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"role": "decode"}')
    assert main([str(tmp_path / "config.json")]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_process_entry_refuses_an_unknown_role(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = msgspec.structs.replace(plan(Settings())["decode-0"], role="cook")
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(config))
    assert main([str(tmp_path / "config.json")]) == 2
    assert "role is 'cook'" in capsys.readouterr().err
