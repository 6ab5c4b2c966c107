"""For every test: hypothesis judges answers, never how long they took on a busy machine."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("pdtrace", deadline=None)
settings.load_profile("pdtrace")
