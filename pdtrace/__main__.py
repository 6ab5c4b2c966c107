"""`python -m pdtrace` is the `pdtrace` command."""

from pdtrace.cli import main

main()
