"""A local Hugging Face folder: what must be in it, and where each tensor is in its safetensors files.

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
from tidemill.hardware.model_config import CONFIG, read_config

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
        raise UserError("the list of weight files is not readable", where=str(index), hint=_CURE) from error
    if outside := [file for file in files if file.parent != folder]:
        raise UserError(f"it names a file outside its folder: {outside[0]}", where=str(index), hint=_CURE)
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
                raise UserError("not a safetensors file, or cut short", where=str(file), hint=_CURE)
            header = json.loads(stream.read(length))
        tensors = {name: _entry(file, 8 + length, entry) for name, entry in header.items() if name != "__metadata__"}
    except FileNotFoundError as error:
        raise UserError("the weight file is missing", where=str(file), hint=_CURE) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError("the header of the weight file is corrupt", where=str(file), hint=_CURE) from error
    except OSError as error:
        raise UserError(f"the weight file cannot be read ({error.strerror})", where=str(file)) from error
    expected = max((tensor.offset + tensor.nbytes for tensor in tensors.values()), default=8 + length)
    if size != expected:
        raise UserError(
            f"the weight file has {size:,} bytes where its header promises {expected:,}", where=str(file), hint=_CURE
        )
    return tensors


def _entry(file: Path, data_start: int, entry: dict[str, Any]) -> StoredTensor:
    start, end = entry["data_offsets"]
    shape = tuple(int(size) for size in entry["shape"])
    bits = _BITS.get(entry["dtype"])
    if start < 0 or end < start or (bits is not None and (end - start) * 8 != math.prod(shape) * bits):
        raise ValueError("offsets do not fit the shape")
    return StoredTensor(file=file, offset=data_start + start, nbytes=end - start, dtype=entry["dtype"], shape=shape)


ADAPTER_CONFIG = "adapter_config.json"
DESCRIPTION = "tidemill.json"  # of a folder with a head; see models.heads
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tokenizer_config.json")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def holds_adapter(folder: Path) -> bool:
    """Whether it is an adapter's folder, as peft writes them, rather than a model's."""
    return (folder / ADAPTER_CONFIG).is_file()


def holds_reward_model(folder: Path) -> bool:
    """Whether it says so, as what trains reward models writes them; such a folder also loads as a language model."""
    try:
        described = json.loads((folder / DESCRIPTION).read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(described, dict) and described.get("kind") == "reward_model"


def refuse_reward_model(source: str | Path) -> None:
    """For whatever is to write.

    Raises:
        UserError: the folder holds a reward model.
    """
    folder = Path(source).expanduser()
    if holds_reward_model(folder):
        raise UserError(
            "the folder holds a reward model, whose weights were trained to judge and not to write",
            where=str(folder),
            hint='give the model that it was made from; a reward model goes into scoring.rewards (kind = "model") or '
            "critic.source",
        )


def check_folder(folder: Path) -> Path:
    """Return `folder` if it holds a configuration, complete safetensors weights and a tokenizer.

    Raises:
        UserError: naming the file at fault.
    """
    if not folder.is_dir():
        what = "is a file, not a model folder" if folder.exists() else "there is no such folder"
        hint = "give the folder that holds config.json and model.safetensors"
        raise UserError(what, where=str(folder), hint=hint)
    check_config(folder)
    if not stored_tensors(folder):
        raise _no_weights(folder)
    if holds_adapter(folder):  # transformers would put it into the model
        raise UserError(
            f"the folder holds a model and an adapter ({ADAPTER_CONFIG})",
            where=str(folder),
            hint="merge the adapter into its base model and save that, or remove the adapter's files",
        )
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise UserError(
            "the folder has no tokenizer",
            where=str(folder),
            hint="copy the model's tokenizer files (tokenizer.json) there",
        )
    return folder


def check_config(folder: Path) -> dict[str, Any]:
    """The content of a folder's config.json.

    Raises:
        UserError: it is missing or no model configuration; naming the field.
    """
    path = folder / CONFIG
    if not path.is_file():
        if holds_adapter(folder):
            raise _unmerged(folder)
        raise UserError("the folder has no config.json", where=str(folder), hint="give a Hugging Face model folder")
    config = read_config(path)
    if config.get("quantization_config") is not None:
        raise UserError(
            "the weights are quantized (quantization_config), and only unquantized weights are trained",
            where=str(path),
            hint="give the model in float32, bfloat16 or float16",
        )
    if not isinstance(config.get("model_type"), str):
        raise UserError(
            "the model configuration names no model_type", where=str(path), hint="give a Hugging Face model folder"
        )
    return config


def _unmerged(folder: Path) -> UserError:
    return UserError(
        "the folder holds an adapter without its base model",
        where=str(folder),
        hint="merge the adapter into its base model and save that",
    )


def _no_weights(folder: Path) -> UserError:
    if holds_adapter(folder):
        return _unmerged(folder)
    pickles = [path.name for pattern in _PICKLES for path in sorted(folder.glob(pattern))]
    if pickles:
        return UserError(
            f"the weights are in {pickles[0]}, a pickle, which can run code when opened; only safetensors are read",
            where=str(folder),
            hint="if you trust it, convert it: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder)",
        )
    if gguf := sorted(folder.glob("*.gguf")):
        return UserError(
            f"the weights are in {gguf[0].name}; only safetensors are read",
            where=str(folder),
            hint="use the safetensors version of the model",
        )
    return UserError(
        "the folder has no model.safetensors", where=str(folder), hint="copy or download the weights again"
    )
