"""Reading records from bytes that may be damaged: one exception for every kind of damage."""

from __future__ import annotations

from typing import TypeVar

import msgspec

T = TypeVar("T")


def decode_json(data: bytes, kind: type[T]) -> T:
    """The JSON document as a `kind`.

    Raises:
        msgspec.DecodeError: not UTF-8, not JSON, nested too deeply, or not a `kind`.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from error


def decode_msgpack(data: bytes, decoder: msgspec.msgpack.Decoder[T]) -> T:
    """The same for MessagePack, with a decoder that knows the type."""
    try:
        return decoder.decode(data)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from error
