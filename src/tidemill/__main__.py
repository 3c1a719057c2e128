"""`python -m tidemill` is `tidemill`."""

from __future__ import annotations

import sys


def main() -> int:
    """The exit code of the command that the process was started with, also when Ctrl-C comes before it is there."""
    try:
        from tidemill.cli.app import main as run
    except KeyboardInterrupt:
        return 130
    return run()


if __name__ == "__main__":
    sys.exit(main())
