"""The package a second time in one process, with its hot paths in Python: to be held against the
package as it is, in which they are in C."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import pytest

from pdtrace.native import NATIVE_VARIABLE

_NAMES = ("recorder", "native", "otlp.wire", "ring.layout", "ring.reader", "ring.writer")


def load_plain() -> dict[str, ModuleType]:
    """Modules of the second one by their names in the package. Its classes are others."""
    ours = {name: module for name, module in sys.modules.items() if _is_ours(name)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(NATIVE_VARIABLE, "0")
        for name in ours:
            del sys.modules[name]
        try:
            return {name: importlib.import_module(f"pdtrace.{name}") for name in _NAMES}
        finally:
            for name in [name for name in sys.modules if _is_ours(name)]:
                del sys.modules[name]
            sys.modules.update(ours)


def load_native() -> dict[str, ModuleType]:
    """The same modules as they are."""
    return {name: importlib.import_module(f"pdtrace.{name}") for name in _NAMES}


def _is_ours(name: str) -> bool:
    return name == "pdtrace" or name.startswith("pdtrace.")
