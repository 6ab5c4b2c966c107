"""`python -m pdtrace.agent`."""

import sys

from pdtrace.agent.command import main

if __name__ == "__main__":
    sys.exit(main())
