"""From a model in memory to a folder that `from_pretrained` loads."""

from __future__ import annotations

import errno
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from transformers import PreTrainedModel

from tidemill.models.adapter_folder import write_origin
from tidemill.models.folder import DESCRIPTION
from tidemill.models.lora import adapter_of
from tidemill.models.quiet import quiet

_TENSOR_FILES = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx"}
_NOT_COPIED = {"config.json", "generation_config.json", "checkpoint.json", DESCRIPTION}
_TEMPLATE_FOLDERS = ("additional_chat_templates",)


def save_model(model: PreTrainedModel, directory: Path, *, source: Path) -> None:
    """Write weights, configuration and tokenizer into an empty directory; of a model with an adapter the adapter alone,
    in peft's format, and what it belongs to.

    Args:
        source: the Hugging Face folder the model came from; its tokenizer files are copied.

    Raises:
        OSError: the disk is full or a file cannot be written.
    """
    with disk_faults(directory), quiet():
        model.save_pretrained(directory)
        if adapter_of(model) is not None:
            write_origin(model, directory)
        _copy_tokenizer(source, directory)
    share_files(directory)


def share_files(directory: Path) -> None:
    """safetensors files are born private to their owner: give them the mode of the other files."""
    mode = next(path.stat().st_mode for path in directory.glob("*.json"))
    for path in directory.rglob("*.safetensors"):
        path.chmod(mode)


@contextmanager
def disk_faults(directory: Path) -> Iterator[None]:
    """safetensors has an error class of its own for a disk that fails; it names the system's number in its text."""
    try:
        yield
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(int(number[1]) if number else errno.EIO, str(error), str(directory)) from error


def tokenizer_files(source: Path) -> Iterator[Path]:
    """What `save_model` copies: every file of the source folder but weights and what is written anew."""
    for path in sorted(source.iterdir()):
        weights = path.suffix in _TENSOR_FILES or path.name.endswith(".index.json")
        if path.is_file() and not weights and not path.name.startswith(".") and path.name not in _NOT_COPIED:
            yield path
    for name in _TEMPLATE_FOLDERS:
        yield from (path for path in sorted((source / name).rglob("*")) if path.is_file())


def _copy_tokenizer(source: Path, directory: Path) -> None:
    for path in tokenizer_files(source):
        target = directory / path.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
