"""Where each tensor of a folder lies in its safetensors files: headers read, and checked against the files' length.

Format: 8 bytes little-endian header length, a JSON header of names, dtypes, shapes and offsets, the tensors' bytes.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidemill.core.errors import UserError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_LONGEST_HEADER_BYTES = 100_000_000  # the limit of the format's reference implementation
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64,
}  # fmt: skip
_CURE = "copy or download the file again"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """One tensor on the disk."""

    file: Path
    offset: int  # of its first byte, from the start of the file
    nbytes: int
    dtype: str  # as the format spells it: F32, BF16, ...
    shape: tuple[int, ...]


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder: one, or the shards its index names (some may be missing). Empty: none at all.

    Raises:
        UserError: the index cannot be read.
    """
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    index = folder / INDEX
    if not index.is_file():
        return []
    try:
        shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        files = [folder / shard for shard in shards]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError("the list of weight files is not readable", where=str(index), cure=_CURE) from error
    if outside := [file for file in files if file.parent != folder]:
        raise UserError(f"it names a file outside its folder: {outside[0]}", where=str(index), cure=_CURE)
    return files


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the folder's weights by name, without reading any weight.

    Raises:
        UserError: a file is missing, cut short, or not in the format.
    """
    tensors: dict[str, StoredTensor] = {}
    for file in weight_files(folder):
        tensors |= read_header(file)
    return tensors


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Every tensor of one file by name, without reading any weight.

    Raises:
        UserError: the file is missing, cut short, or not in the format.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if not 2 <= length <= min(_LONGEST_HEADER_BYTES, size - 8):
                raise UserError("not a safetensors file, or cut short", where=str(file), cure=_CURE)
            header = json.loads(stream.read(length))
        tensors = {name: _entry(file, 8 + length, entry) for name, entry in header.items() if name != "__metadata__"}
    except FileNotFoundError as error:
        raise UserError("the weight file is missing", where=str(file), cure=_CURE) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError("the header of the weight file is corrupt", where=str(file), cure=_CURE) from error
    except OSError as error:
        raise UserError(f"the weight file cannot be read ({error.strerror})", where=str(file)) from error
    expected = max((tensor.offset + tensor.nbytes for tensor in tensors.values()), default=8 + length)
    if size != expected:
        raise UserError(
            f"the weight file has {size:,} bytes where its header promises {expected:,}", where=str(file), cure=_CURE
        )
    return tensors


def _entry(file: Path, data_start: int, entry: dict[str, Any]) -> StoredTensor:
    start, end = entry["data_offsets"]
    shape = tuple(int(size) for size in entry["shape"])
    bits = _BITS.get(entry["dtype"])
    if start < 0 or end < start or (bits is not None and (end - start) * 8 != math.prod(shape) * bits):
        raise ValueError("offsets do not fit the shape")
    return StoredTensor(file=file, offset=data_start + start, nbytes=end - start, dtype=entry["dtype"], shape=shape)
