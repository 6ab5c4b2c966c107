"""`python -m tests.soak`: a soak from the command line."""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from server.config import COLOCATED, PD
from tests.soak.run import Scenario, run_soak
from tests.soak.serve import soak_settings
from tests.soak.traffic import Habits


def main() -> int:
    """Exit code 0: everything was as it must be; 1: it was not; 2: wrong arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak",
        description="Load on a server in which random things go wrong, and what was left of it.",
    )
    parser.add_argument("--seconds", type=float, default=600.0, help="duration of the load (600)")
    parser.add_argument("--every", type=float, default=4.0, help="seconds between faults (4)")
    parser.add_argument("--steady", action="store_true", help="no faults, and no client leaves")
    parser.add_argument("--rate", type=float, default=Habits().rate, help="requests a second (12)")
    parser.add_argument("--seed", type=int, help="of a soak to be repeated; default: a new one")
    parser.add_argument("--mode", choices=(PD, COLOCATED), default=PD)
    parser.add_argument("--transfer", choices=("shm", "tcp"), default="shm")
    parser.add_argument("--first-token", choices=("decode", "prefill"), default="decode")
    parser.add_argument("--run-dir", type=Path, help="kept; default: a folder removed if all is ok")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    chosen = parser.parse_args()
    if chosen.seconds <= 0 or chosen.every <= 0 or chosen.rate <= 0:
        parser.error("--seconds, --every and --rate are more than 0")
    folder = Path(tempfile.mkdtemp(prefix="pdtrace-soak-"))
    run_dir: Path = chosen.run_dir or folder / "run"
    seed: int = random.SystemRandom().randrange(1 << 32) if chosen.seed is None else chosen.seed
    scenario = Scenario(
        settings=soak_settings(
            run_dir.absolute(),
            mode=chosen.mode,
            transfer=chosen.transfer,
            first_token=chosen.first_token,
        ),
        seconds=chosen.seconds,
        seed=seed,
        every_s=None if chosen.steady else chosen.every,
        habits=Habits(rate=chosen.rate, drop_share=0.0 if chosen.steady else Habits().drop_share),
    )
    report = run_soak(scenario, lambda line: print(line, file=sys.stderr, flush=True))
    if chosen.json:
        print(json.dumps(report.document()))
    else:
        report.show(Console(highlight=False))
    failed = bool(report.failures())
    if failed:
        print(f"the recording is in {run_dir}; again with --seed {seed}", file=sys.stderr)
    else:
        shutil.rmtree(folder)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
