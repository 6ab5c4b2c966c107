"""A worker whose engine is not loaded before a file appears: `python -m tests.support.slow_load
CONFIG.json GATE`."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import server.serve
from server.engine.base import Engine
from server.engine.loader import EngineConfig
from server.process import main

CONFIG, GATE = sys.argv[1:]
_load_engine = server.serve.load_engine


def load_once_allowed(config: EngineConfig) -> Engine:
    """The engine, as soon as the gate is there."""
    while not Path(GATE).exists():
        time.sleep(0.01)
    return _load_engine(config)


server.serve.load_engine = load_once_allowed
sys.exit(main([CONFIG]))
