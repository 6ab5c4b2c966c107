"""The server of a soak: `python -m tests.soak.serve SETTINGS.json`, which says `ready` when it is.

As `python -m server up`, with settings that have no flag: deadlines short enough that a soak sees
every one of them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec

from server.config import PD, Deadlines, Settings
from server.launch import Launcher, run_server

START_S = 150.0
DEADLINES = Deadlines(
    gateway_queue_s=12.0,
    reserve_s=10.0,
    handshake_s=6.0,
    prefill_queue_s=12.0,
    prefill_compute_s=15.0,
    transfer_s=5.0,
    copy_s=4.0,
    await_kv_s=36.0,
    decode_queue_s=12.0,
    preempted_s=12.0,
    drain_s=3.0,
    peer_silence_s=6.0,
    request_s=40.0,
)


def soak_settings(
    run_dir: Path, *, mode: str = PD, transfer: str = "shm", first_token: str = "decode"
) -> Settings:
    """Two pairs, or two colocated workers, that have to share what they have: pages, places and
    processors are scarce."""
    own: dict[str, Any] = {"workers": 2}
    if mode == PD:
        own = {"prefill": 2, "decode": 2, "prefill_pages": 160}
        own |= {"transfer": transfer, "first_token": first_token}
    return Settings(
        run_dir=str(run_dir),
        port=0,
        mode=mode,
        model="fake:step_ms=2,token_us=20",
        decode_pages=120,
        prefill_budget=128,
        reserve_output_tokens=8,
        max_running=8,
        max_waiting=16,
        max_concurrency=32,
        max_queue=16,
        preempted_pages=60,
        dead_after_s=2.0,
        stalled_after_s=5.0,
        allow_faults=True,
        deadlines=DEADLINES,
        **own,
    )


def main() -> int:
    """Serve until told to stop; prints the server's state when it is ready."""
    settings = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Settings)

    def on_ready(launcher: Launcher) -> None:
        print(json.dumps(msgspec.to_builtins(launcher.state())), flush=True)

    return run_server(
        settings,
        fresh=False,
        start_timeout_s=START_S,
        progress=lambda _: None,
        on_ready=on_ready,
    )


if __name__ == "__main__":
    sys.exit(main())
