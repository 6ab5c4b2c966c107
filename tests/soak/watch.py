"""What the processes of a server use: memory, threads, open files. Reads /proc."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.support.present import processes_of

LAUNCHER = "launcher"


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """Of one process at one moment."""

    rss_bytes: int
    threads: int
    files: int


def use_of(pid: int) -> Use | None:
    """None for a process that is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        files = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    if "VmRSS" not in fields:  # it is about to be gone
        return None
    return Use(
        rss_bytes=int(fields["VmRSS"].split()[0]) * 1024,
        threads=int(fields["Threads"]),
        files=files,
    )


def use_of_server(run_dir: Path, launcher_pid: int) -> Mapping[str, Use]:
    """Of every present process, by instance."""
    pids = {process.instance: process.pid for process in processes_of(run_dir)}
    found = {name: use_of(pid) for name, pid in {**pids, LAUNCHER: launcher_pid}.items()}
    return {name: use for name, use in found.items() if use is not None}
