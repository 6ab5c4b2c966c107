from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from pdtrace.terminal.documents import stages_document
from server.config import Settings
from server.faults import FAULT_STAGES, MAX_DELAY_MS
from server.listening import listen

ROOT = Path(__file__).resolve().parents[3]

# Settings that are not a matter of the command line, with the reason.
NOT_OPTIONS = {
    "max_body_bytes": "fits the context length",
    "heartbeat_s": "one cadence for all processes",
    "dead_after_s": "follows heartbeat_s",
    "stalled_after_s": "follows heartbeat_s",
    "deadlines": "a structure of its own",
    "clock_faults": "--clock-fault, once for each process",
    "clients": "--client-limits, all in one",
}


def server(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "server", *arguments],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def refusal(*arguments: str) -> str:
    """Standard error of an `up` that must not start; checked to be one line and exit code 2."""
    done = server("up", "--model", "fake", *arguments)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("error: ")
    return lines[0]


def test_help_documents_every_setting_with_its_default() -> None:
    text = server("up", "--help").stdout
    for name in Settings.__struct_fields__:
        if name in NOT_OPTIONS:
            continue
        option = f"--{name.replace('_', '-')}"
        assert re.search(rf"{option}\b", text), f"{option} is not in --help"
    text = " ".join(text.split())
    assert "[default: least_loaded]" in text
    assert "[default: 8000]" in text


def test_help_says_how_to_slow_a_fake_model_and_where_stages_to_delay_are_listed() -> None:
    text = " ".join(re.sub(r"[│|]", " ", server("up", "--help").stdout).split())
    assert "`fake:step_ms=5,token_us=50` lets a step take 5 ms and 50 µs for each token" in text
    assert "a STAGE is one of the request's way as `pdtrace stages` lists them, or" in text
    assert f"MS is at most {MAX_DELAY_MS}" in text
    listed = {stage["name"] for stage in stages_document()["stages"]}
    assert listed >= FAULT_STAGES


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("--prefill", "0", "--prefill is 0, expected at least 1"),
        ("--api-key", "key ", "--api-key has spaces around it or control characters"),
        ("--api-key", "k\nX: y", "--api-key has spaces around it or control characters"),
        ("--port", "70000", "--port is 70000, expected 0 to 65535"),
        ("--decode-pages", "1", "--decode-pages is 1, expected at least 2"),
        ("--gap-threshold-s", "0", "--gap-threshold-s is 0.0, expected more than 0"),
        ("--agent-port", "-2", "--agent-port is -2, expected 0 to 65535, or -1 for none"),
    ],
)
def test_bad_setting_is_one_line_and_exit_code_2(option: str, value: str, expected: str) -> None:
    assert expected in refusal(option, value)


@pytest.mark.parametrize(
    ("mode", "option"),
    [
        ("colocated", "--prefill=1"),
        ("colocated", "--decode=2"),
        ("colocated", "--prefill-pages=64"),
        ("colocated", "--first-token=decode"),
        ("colocated", "--transfer=tcp"),
        ("pd", "--workers=2"),
        ("pd", "--unchunked"),
    ],
)
def test_option_without_effect_in_the_mode_is_refused(mode: str, option: str) -> None:
    name = option.partition("=")[0].replace("--un", "--")
    line = refusal("--mode", mode, option)
    assert f"{name} has no effect with --mode {mode}" in line


def test_faults_need_permission_and_their_file_is_checked(tmp_path: Path) -> None:
    file = tmp_path / "faults.json"
    file.write_text('[{"kind": "pause", "ms": 1, "at": "decode-1"}]')
    assert "--allow-faults" in refusal("--faults", str(file))
    line = refusal("--allow-faults", "--faults", str(file))
    assert "fault 1 (pause): at is 'decode-1', expected one of decode, decode-0," in line
    missing = refusal("--allow-faults", "--faults", str(tmp_path / "none"))
    assert missing.endswith("none cannot be read: No such file or directory")


def test_faults_for_a_server_that_is_not_there_are_one_line(tmp_path: Path) -> None:
    done = server("inject", "--run-dir", str(tmp_path), '{"kind": "pause", "ms": 1}')
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert "--run-dir names the folder of a running server" in line


def test_busy_agent_port_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    with listen("127.0.0.1", 0) as taken:
        port = str(taken.getsockname()[1])
        line = refusal("--port", "0", "--agent-port", port, "--run-dir", str(tmp_path / "run"))
    assert f"port {port} on 127.0.0.1 cannot be used" in line
    assert line.endswith("choose another with --agent-port")


def test_missing_model_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    missing = tmp_path / "missing.gguf"
    assert f"no model at {missing}" in refusal("--model", str(missing), "--run-dir", str(tmp_path))


def test_broken_model_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF then nothing of use")
    assert "broken.gguf" in refusal("--model", str(broken), "--run-dir", str(tmp_path / "run"))


def test_busy_port_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    with listen("127.0.0.1", 0) as taken:
        port = str(taken.getsockname()[1])
        line = refusal("--port", port, "--run-dir", str(tmp_path / "run"))
    assert f"port {port} on 127.0.0.1 cannot be used" in line


def test_used_run_directory_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "rings").mkdir()
    (tmp_path / "rings" / "decode-0.ring").write_bytes(b"marks")
    line = refusal("--port", "0", "--run-dir", str(tmp_path))
    assert f"run directory {tmp_path} holds a recording" in line


def test_fresh_needs_a_run_directory() -> None:
    assert "--fresh needs --run-dir" in refusal("--fresh", "--port", "0")


def test_too_large_pools_are_one_line_and_exit_code_2(tmp_path: Path) -> None:
    line = refusal(
        "--port", "0", "--run-dir", str(tmp_path / "run"), "--decode-pages", "1" + "0" * 12
    )
    assert "KV pools need" in line


def test_help_has_a_short_form_for_every_command() -> None:
    assert server("-h").stdout == server("--help").stdout
    assert "--faults" in server("up", "-h").stdout


@pytest.mark.parametrize(("arguments", "code"), [(["--help"], 0), (["--no-such"], 2)])
def test_a_command_that_is_done_does_not_take_its_interpreter_apart(
    arguments: list[str], code: int
) -> None:
    program = (
        "import atexit, sys; from server.cli import main; "
        f"atexit.register(print, 'taken apart'); sys.argv[1:] = {arguments}; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code
    assert "python -m server" in done.stdout + done.stderr
    assert "taken apart" not in done.stdout


@pytest.mark.parametrize("arguments", [("--help",), ("up", "--help"), ("keys", "{}/keys")])
def test_full_disk_is_one_line(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "server", *(text.format(tmp_path) for text in arguments)],
            cwd=ROOT,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.stderr == "error: cannot write the output: No space left on device\n"
    assert done.returncode == 2
