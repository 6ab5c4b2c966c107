"""Processes that end, with real processes and a policy in a hurry."""

from __future__ import annotations

import os
import signal
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from server.children import Child
from server.config import ProcessConfig, Settings
from server.rundir import RunDir
from server.supervision import RestartPolicy
from server.supervisor import Member, ServerCrashedError, Supervisor

HASTY = RestartPolicy(first_pause_s=0.01, longest_pause_s=0.02, max_failures=3)
LIMIT_S = 60.0


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[RunDir]:
    with RunDir.acquire(tmp_path / "run") as run_dir:
        yield run_dir


def supervisor(run_dir: RunDir, policy: RestartPolicy = HASTY) -> Supervisor:
    return Supervisor(run_dir, policy=policy, environment={})


def config(run_dir: RunDir, role: str, *, pool: Path | None = None) -> ProcessConfig:
    """A worker of the fake model that talks to nobody."""
    return ProcessConfig(
        settings=Settings(
            model="fake", mode="colocated", record=False, decode_pages=8, run_dir=str(run_dir.path)
        ),
        role=role,
        instance=f"{role}-0",
        incarnation="first",
        endpoint=run_dir.endpoint(f"{role}-0"),
        gateway_endpoint=run_dir.endpoint("gateway-0"),
        pool_path=None if pool is None else str(pool),
    )


def look_until(supervisor: Supervisor, condition: Callable[[Member], bool]) -> list[str]:
    """What the operator is told until `condition` holds for the only member."""
    said: list[str] = []
    deadline = time.monotonic() + LIMIT_S
    while not condition(supervisor.members[0]):
        assert time.monotonic() < deadline, said
        said += supervisor.look(time.monotonic())
        time.sleep(0.01)
    return said


def is_ready(member: Member) -> bool:
    return member.state == "ready"


def test_a_killed_worker_is_followed_by_another_at_the_same_address(
    run_dir: RunDir, tmp_path: Path
) -> None:
    pool = tmp_path / "worker-0.first"
    watched = supervisor(run_dir)
    try:
        watched.start(config(run_dir, "worker", pool=pool), time.monotonic())
        look_until(watched, is_ready)
        before = watched.members[0].config
        first = watched.members[0].child
        assert pool.exists()
        os.kill(first.pid, signal.SIGKILL)
        said = look_until(watched, lambda member: member.child is not first and is_ready(member))
        member = watched.members[0]
        assert (member.life.restarts, member.last_exit) == (1, "was killed by SIGKILL")
        assert member.config.endpoint == before.endpoint
        assert member.config.incarnation != before.incarnation
        assert not pool.exists(), "what the killed one left is removed"
        (its_pool,) = tmp_path.glob("worker-0.*")
        assert its_pool.name == f"worker-0.{member.config.incarnation}"
        assert stat.S_IMODE(run_dir.config("worker-0").stat().st_mode) == 0o600
        assert said[0] == (
            f"warning: worker-0 (pid {first.pid}) was killed by SIGKILL; it is started again at "
            f"once (log: {first.log})"
        )
        assert said[1] == f"{member.child.name} is starting in its place"
        assert said[2].startswith(f"{member.child.name} is ready again, ")
    finally:
        watched.close()


def test_a_stopped_worker_is_reported_and_left_alone(run_dir: RunDir, tmp_path: Path) -> None:
    watched = supervisor(run_dir)
    try:
        watched.start(config(run_dir, "worker", pool=tmp_path / "pool"), time.monotonic())
        look_until(watched, is_ready)
        child = watched.members[0].child
        os.kill(child.pid, signal.SIGSTOP)
        said = look_until(watched, lambda member: member.stopped)
        assert said[-1].startswith(f"warning: {child.name} is stopped by a signal")
        for _ in range(20):
            assert watched.look(time.monotonic()) == []
        os.kill(child.pid, signal.SIGCONT)
        assert look_until(watched, is_ready) == [f"{child.name} continues"]
        assert watched.members[0].child is child
    finally:
        watched.close()


def test_one_that_never_serves_is_given_up_with_its_last_words(run_dir: RunDir) -> None:
    watched = supervisor(run_dir)
    seen: set[Child] = set()
    watched.start(config(run_dir, "cook"), time.monotonic())

    def never(member: Member) -> bool:
        seen.add(member.child)
        return False

    try:
        with pytest.raises(ServerCrashedError) as raised:
            look_until(watched, never)
    finally:
        watched.close()
    assert len({child.pid for child in seen}) == 3
    assert watched.members[0].state == "given_up"
    assert str(raised.value).startswith("3 in a row were never ready; cook-0 (pid ")
    assert "error: role is 'cook'" in str(raised.value)


def test_without_restarts_the_first_end_is_an_error(run_dir: RunDir, tmp_path: Path) -> None:
    watched = supervisor(run_dir, RestartPolicy(restart=False))
    try:
        watched.start(config(run_dir, "worker", pool=tmp_path / "pool"), time.monotonic())
        look_until(watched, is_ready)
        child = watched.members[0].child
        os.kill(child.pid, signal.SIGTERM)
        with pytest.raises(ServerCrashedError, match=r"worker-0 \(pid \d+\) exited with code 0"):
            look_until(watched, lambda _: False)
        assert watched.members[0].child is child
    finally:
        watched.close()


def test_one_that_cannot_be_started_again_is_tried_later(run_dir: RunDir, tmp_path: Path) -> None:
    """As when the disk is full: its configuration cannot be written."""
    watched = supervisor(run_dir)
    path = run_dir.config("worker-0")
    try:
        watched.start(config(run_dir, "worker", pool=tmp_path / "pool"), time.monotonic())
        look_until(watched, is_ready)
        first = watched.members[0].child
        path.unlink()
        path.mkdir()
        os.kill(first.pid, signal.SIGKILL)
        said = look_until(watched, lambda member: member.life.failures == 1)
        assert said[-1].startswith("warning: worker-0 cannot be started again yet: ")
        path.rmdir()
        look_until(watched, lambda member: member.child is not first and is_ready(member))
    finally:
        watched.close()
