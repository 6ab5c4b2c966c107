"""Starts and stops the programs of a stack, all or none."""

from __future__ import annotations

import http.client
import shutil
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from pdtrace.agent.slo_environment import server_environment
from pdtrace.slo import DEFAULT_SLO, Slo
from pdtrace.web_answers import without_credentials
from server.errors import StartError
from server.stack import detached
from server.stack.objectives import GENERATED, write_rules
from server.stack.plan import (
    HOST,
    Ports,
    Program,
    Sampling,
    plan_programs,
    plan_targets,
    port_names,
    with_webhook,
)
from server.stack.programs import COLLECTOR, Programs
from server.stack.state import (
    STATE_NAME,
    Running,
    StackState,
    boot_id,
    locked,
    read_state,
    write_state,
)

_STOP_S = 15.0
_POLL_S = 0.1
_ANSWER_S = 2.0
_LAST_LINES = 5
_FILES = ("jaeger.yaml", "prometheus.yml")


@dataclass(frozen=True, slots=True, kw_only=True)
class StackSettings:
    """What `stack up` was asked for.

    rules    rule files beside the generated ones; one of the same name takes its place
    webhook  where Alertmanager sends alerts

    Raises StartError for a webhook that is no address.
    """

    folder: Path
    ports: Ports = field(default_factory=Ports)
    sampling: Sampling = field(default_factory=Sampling)
    rules: Sequence[Path] = ()
    webhook: str | None = None

    def __post_init__(self) -> None:
        if self.webhook is not None and not _is_address(self.webhook):
            raise StartError(
                f"--webhook {without_credentials(self.webhook)!r} is no address: "
                "give http://HOST:PORT/PATH"
            )


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return False
    fits = url.isprintable() and " " not in url
    return fits and parts.scheme in {"http", "https"} and bool(parts.hostname) and port != 0


def start_stack(
    settings: StackSettings,
    programs: Programs,
    *,
    timeout_s: float,
    progress: Callable[[str], None],
) -> StackState:
    """Start what the stack is made of and wait until all of it answers.

    One that is up already is left as it is. Raises StartError, with nothing left running, when a
    port is taken, a file is refused, or a program ends or does not answer in time.
    """
    folder = settings.folder.absolute()
    with locked(folder):
        state = read_state(folder)
        if state is not None and state.is_up:
            return state
        if state is not None:
            _stop(folder, state)
        _refuse_taken(settings.ports)
        _write_files(settings, folder)
        started: list[Running] = []
        try:
            plan = plan_programs(programs, folder, settings.ports, settings.sampling)
            started.extend(_start(program, folder) for program in plan)
            state = StackState(
                programs=tuple(started),
                otlp=f"http://{HOST}:{settings.ports.otlp_http}",
                boot_id=boot_id(),
                started_at=time.time(),
                environment=_for_servers(settings.sampling.slo),
            )
            write_state(folder, state)
            _wait(plan, started, timeout_s=timeout_s, progress=progress)
        except BaseException:
            detached.stop([one.process for one in started], timeout_s=_STOP_S)
            (folder / STATE_NAME).unlink(missing_ok=True)
            raise
        return state


def _for_servers(slo: Slo) -> dict[str, str]:
    return {} if slo == DEFAULT_SLO else server_environment(slo)


def stop_stack(folder: Path) -> tuple[Running, ...]:
    """Stop what `start_stack` started; those that still ran are returned. Its data stay."""
    folder = folder.absolute()
    if not folder.is_dir():
        return ()
    with locked(folder):
        state = read_state(folder)
        return () if state is None else _stop(folder, state)


def _stop(folder: Path, state: StackState) -> tuple[Running, ...]:
    running = state.running
    detached.stop([one.process for one in running], timeout_s=_STOP_S)
    (folder / STATE_NAME).unlink(missing_ok=True)
    return running


def _write_files(settings: StackSettings, folder: Path) -> None:
    """Copies of `collector/`, rules, lists of targets; what a former stack left of these goes."""
    for name in (GENERATED, "rules", "targets"):
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in ("rules", "targets", "logs"):
        (folder / name).mkdir(exist_ok=True)
    try:
        for name in _FILES:
            shutil.copyfile(COLLECTOR / name, folder / name)
        alertmanager = (COLLECTOR / "alertmanager.yml").read_text()
        generated = write_rules(folder, settings.sampling.slo)
        # Both would record the same series, each its own values.
        own = {path.name for path in settings.rules}
        kept = (path for path in generated if path.name not in own)
        for number, path in enumerate((*kept, *settings.rules)):
            shutil.copyfile(path, folder / "rules" / f"{number}-{path.stem}.yml")
    except OSError as error:
        raise StartError(f"{error.filename}: {error.strerror}") from error
    (folder / "alertmanager.yml").write_text(with_webhook(alertmanager, settings.webhook))
    for name, text in plan_targets(settings.ports).items():
        (folder / name).write_text(text)


def _refuse_taken(ports: Ports) -> None:
    for name in port_names():
        port = getattr(ports, name)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError as error:
                raise StartError(
                    f"port {port} ({name}) on {HOST} cannot be used: {error.strerror}. Stop what "
                    "listens there (Debian starts its own: systemctl disable --now prometheus "
                    "prometheus-alertmanager), or take --free-ports"
                ) from error


def _start(program: Program, folder: Path) -> Running:
    log = folder / "logs" / f"{program.name}.log"
    log.unlink(missing_ok=True)
    try:
        process = detached.start(
            program.command, environment=program.environment, folder=folder, log=log
        )
    except OSError as error:
        raise StartError(f"cannot start {program.command[0]}: {error.strerror}") from error
    return Running(name=program.name, process=process, url=program.url, log=str(log))


def _wait(
    plan: Sequence[Program],
    started: Sequence[Running],
    *,
    timeout_s: float,
    progress: Callable[[str], None],
) -> None:
    deadline = time.monotonic() + timeout_s
    for program, running in zip(plan, started, strict=True):
        progress(program.name)
        while not answers(program.ready_url):
            if not detached.is_running(running.process):
                raise StartError(f"{program.name} ended: {_last_words(running)}")
            if time.monotonic() > deadline:
                raise StartError(
                    f"{program.name} does not answer at {program.ready_url} after "
                    f"{timeout_s:.0f} s: see {running.log}"
                )
            time.sleep(_POLL_S)


def _last_words(running: Running) -> str:
    lines = Path(running.log).read_text(errors="replace").splitlines()
    return " / ".join(line.strip() for line in lines[-_LAST_LINES:] if line.strip()) or "silently"


def answers(url: str) -> bool:
    """Whether a loopback address answers 200."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=_ANSWER_S)
    try:
        connection.request("GET", parts.path)
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
