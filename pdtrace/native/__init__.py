"""The hot paths in C, where they were built and are wanted: the one place that knows.

The extension is optional. Without it, or with PDTRACE_NATIVE=0, the Python that it stands in for
does the same, byte for byte (`pdtrace.marking`, `pdtrace.ring.cursor`, `pdtrace.ring.reader`,
`pdtrace.otlp.wire`).
"""

from __future__ import annotations

import os
from types import ModuleType

NATIVE_VARIABLE = "PDTRACE_NATIVE"


def _load() -> ModuleType | None:
    if os.environ.get(NATIVE_VARIABLE, "").strip().lower() in ("0", "off"):
        return None
    try:
        from pdtrace.native import _compiled  # noqa: PLC0415 -- it need not be there
    except ImportError:
        return None
    return _compiled


compiled = _load()
"""The module in C, or None. Decided when this is first imported, for the whole process."""


def hot_path() -> str:
    """What records and reads here: `C` or `Python`."""
    return "Python" if compiled is None else "C"
