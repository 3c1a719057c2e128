"""The folder of files that outlive a run, and paths similar to a missing one."""

from __future__ import annotations

import difflib
import itertools
import os
from pathlib import Path


def cache_dir() -> Path:
    """`TIDEMILL_CACHE`, else `$XDG_CACHE_HOME/tidemill`, else `~/.cache/tidemill`. Not created here."""
    if chosen := os.environ.get("TIDEMILL_CACHE"):
        return Path(chosen).expanduser()
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base).expanduser() / "tidemill"
    return Path.home() / ".cache" / "tidemill"


def another_directory(used: Path) -> str:
    """A hint with a free directory for a new run: `runs/sft-2` beside `runs/sft`."""
    numbered = (used.with_name(f"{used.name}-{number}") for number in itertools.count(2))
    free = next(path for path in numbered if not path.exists())
    return f"choose another --run.dir, such as {free}"


def similar_path(missing: Path, *, files: bool = False) -> str:
    """A hint with the folder (or file) beside a missing one whose name is closest; empty if there is none."""
    if missing.exists() or not missing.parent.is_dir():
        return ""
    beside = [each for each in missing.parent.iterdir() if not each.name.startswith(".")]
    names = {each.stem if files else each.name: each for each in beside if (each.is_file() if files else each.is_dir())}
    close = difflib.get_close_matches(missing.stem if files else missing.name, names, n=1, cutoff=0.6)
    return f"did you mean {names[close[0]]}?" if close else ""
