"""What is in the files a stage reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import xxhash

from tidemill.config.faults import ConfigError, Fault
from tidemill.config.pipeline import StageSpec
from tidemill.core.errors import UserError
from tidemill.pipeline.digest import file_inputs

_CHUNK_BYTES = 4 << 20


def contents_of(stages: Sequence[StageSpec]) -> dict[str, dict[str, str]]:
    """By stage and dotted key, the digest of every file it reads; a file that several read is read once.

    Raises:
        ConfigError: some are missing or cannot be read.
    """
    known: dict[Path, str] = {}
    found: dict[str, dict[str, str]] = {}
    faults: list[Fault] = []
    for stage in stages:
        found[stage.name] = {}
        for file in file_inputs(stage):
            try:
                known[file.path] = known.get(file.path) or content_digest(file.path, where=file.key)
            except UserError as error:
                faults.append(fault_of_stage(stage, error))
            else:
                found[stage.name][file.key] = known[file.path]
    if faults:
        raise ConfigError(faults)
    return found


def fault_of_stage(stage: StageSpec, error: UserError) -> Fault:
    return Fault(key=error.where, what=error.what, source=f"stage {stage.name}", cure=error.cure)


def content_digest(path: Path, *, where: str) -> str:
    """32 hex digits (xxh3-128) of a file's bytes, or of names and bytes of all visible files of a folder.

    Raises:
        UserError: naming `where` and the path.
    """
    digest = xxhash.xxh3_128()
    try:
        for file in _files(path):
            digest.update(f"{file.relative_to(path).as_posix()}\0{file.stat().st_size}\0".encode())
            with file.open("rb") as stream:
                while chunk := stream.read(_CHUNK_BYTES):
                    digest.update(chunk)
    except FileNotFoundError:
        raise UserError("no such file or folder", where=f"{where}: {path}", cure="correct the path") from None
    except OSError as error:
        what = f"cannot be read: {(error.strerror or str(error)).lower()}"
        raise UserError(what, where=f"{where}: {path}", cure="make it readable, or name another") from None
    return digest.hexdigest()


def _files(path: Path) -> Iterator[Path]:
    if not path.is_dir():
        yield path
        return
    for file in sorted(path.rglob("*")):
        hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
        if file.is_file() and not hidden:
            yield file
