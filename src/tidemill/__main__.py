"""`python -m tidemill` is `tidemill`."""

from __future__ import annotations

import sys

from tidemill.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
