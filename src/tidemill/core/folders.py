"""The folder of files that outlive a run."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """`TIDEMILL_CACHE`, else `$XDG_CACHE_HOME/tidemill`, else `~/.cache/tidemill`. Not created here."""
    if chosen := os.environ.get("TIDEMILL_CACHE"):
        return Path(chosen).expanduser()
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base).expanduser() / "tidemill"
    return Path.home() / ".cache" / "tidemill"
