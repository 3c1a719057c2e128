"""Rows from folders that the `datasets` library saved."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tidemill.core.errors import UserError
from tidemill.envs.text.extras import import_extra

STATE = "state.json"
BATCH_ROWS = 1024
"""Rows decoded at once."""


def read_saved(path: Path) -> Iterator[tuple[str, Any]]:
    """(where, fields) of every row of a folder written by `save_to_disk`, counted from 0. Nothing is fetched.

    Raises:
        UserError: `datasets` is not installed, or the folder is none of its own, holds several splits or is damaged.
    """
    if not (path / STATE).is_file():
        raise _no_data_set(path)
    datasets = import_extra("datasets", package="datasets", needed_by="reading a saved data set", extra="data")
    try:
        # As Arrow tables: its own format would decode images and sounds, which nobody asked for.
        saved = datasets.load_from_disk(str(path)).with_format("arrow")
    except Exception as error:  # whatever a damaged file makes of it
        raise UserError(
            f"the saved data set cannot be loaded: {type(error).__name__}: {error}",
            where=str(path),
            cure="save it again with save_to_disk, at least one row of it",
        ) from error
    number = 0
    for table in saved.iter(batch_size=BATCH_ROWS):
        for row in table.to_pylist():
            yield f"{path}, row {number} (from 0)", row
            number += 1


def _no_data_set(path: Path) -> UserError:
    if not path.is_dir():
        what = "is a file, not a folder that `datasets` saved"
        return UserError(what, where=str(path), cure="name its format: jsonl or parquet")
    if splits := sorted(each.name for each in path.iterdir() if (each / STATE).is_file()):
        named = " or ".join(str(path / split) for split in splits)
        return UserError(f"holds several splits: {', '.join(splits)}", where=str(path), cure=f"give one: {named}")
    files = sorted(each.name for each in path.iterdir() if each.suffix in (".parquet", ".jsonl", ".json"))
    cure = f"give one of its files, {files[0]}" if files else "give a file, or a folder written by save_to_disk"
    return UserError("is no folder that `datasets` saved (it has no state.json)", where=str(path), cure=cure)
