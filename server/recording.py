"""How every server process opens its recorder."""

from __future__ import annotations

from pdtrace.errors import PdtraceError
from pdtrace.recorder import Recorder
from pdtrace.stages import Role
from server.config import ProcessConfig
from server.errors import StartError


def open_recorder(config: ProcessConfig, role: Role) -> Recorder:
    """The process's recorder, disabled where settings say so. Raises StartError."""
    if not config.settings.record:
        return Recorder.disabled()
    rings = config.settings.rings_path
    try:
        return Recorder.open(rings, role=role, instance=config.instance)
    except PdtraceError as error:
        raise StartError(f"{config.instance} cannot record in {rings}: {error}") from error
