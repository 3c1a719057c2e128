"""Reads and validates a model's config.json, as Hugging Face folders have it. Loads no tensor library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tidemill.core.errors import UserError

CONFIG = "config.json"
SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "max_position_embeddings",
)
"""Fields that are positive whole numbers wherever a configuration has them."""
MOST = 10**12
"""Of anything that a configuration counts."""
_HINT = "give the config.json of a Hugging Face decoder"


class ConfigReader:
    """Whole numbers of a configuration; absent and null are alike.

    Args:
        config: the decoder's part of the configuration.
        source: named in errors.
    """

    def __init__(self, config: dict[str, Any], source: str) -> None:
        self.config, self._source = config, source

    def whole(self, name: str, default: int | None = None, *, least: int | None = None) -> int:
        """The number at `name`, or `default`. It is at least `least`: 0, or 1 where there is no default.

        Raises:
            UserError: naming file and field.
        """
        value = self.config.get(name)
        if value is None and default is not None:
            return default
        least = least if least is not None else int(default is None)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST:
            allowed = f"a whole number from {least} to {MOST:.0e}"
            what = "is missing" if value is None else f"needs {allowed}, has {value!r:.60}"
            raise UserError(what, where=f"{self._source}: {name}", cure=_HINT)
        return value

    def up_to(self, most: int, name: str, default: int) -> int:
        """As `whole`, from 1 to `most`."""
        value = self.whole(name, default, least=1)
        if value > most:
            raise UserError(f"needs 1 to {most}, has {value}", where=f"{self._source}: {name}", cure=_HINT)
        return value


def read_config(path: Path) -> dict[str, Any]:
    """The content of a config.json whose sizes are sizes.

    Raises:
        UserError: naming the file and the field.
    """
    config = _read_json(path)
    if not isinstance(config, dict):
        raise UserError("is not a model configuration", where=str(path), cure=_HINT)
    reader = ConfigReader(decoder_part(config), str(path))
    for name in SIZES:
        if reader.config.get(name) is not None:
            reader.whole(name)
    heads, kv_heads = (reader.config.get(name) for name in ("num_attention_heads", "num_key_value_heads"))
    if heads and kv_heads and heads % kv_heads:
        what = f"is {kv_heads}, which does not divide num_attention_heads = {heads}"
        raise UserError(what, where=f"{path}: num_key_value_heads", cure=_HINT)
    return config


def decoder_part(config: dict[str, Any]) -> dict[str, Any]:
    """The text decoder of a configuration with several parts; else the configuration itself."""
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def _read_json(path: Path) -> Any:
    again = "copy or download the file again"
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror or error}", where=str(path), cure=_HINT) from error
    except (ValueError, RecursionError) as error:
        line = f":{error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise UserError("the model configuration is not valid JSON", where=f"{path}{line}", cure=again) from error
