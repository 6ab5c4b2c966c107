"""`python -m server`."""

from __future__ import annotations

from server.cli import main

main()
