"""What moves published bytes. Implementations: `memory` here, Ray's objects in the runtime."""

from __future__ import annotations

from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from tidemill.core.errors import WeightsError

Blob: TypeAlias = npt.NDArray[np.uint8]
"""Raw bytes, one-dimensional and contiguous. Whoever gets one never writes to it: others may hold the same memory."""


class Missing(WeightsError):
    """There is no blob of that name (any more)."""


class Transport(Protocol):
    """Immutable buffers by name. Names are unique for ever, and fit a file name.

    A reader keeps what it got: deleting a blob never disturbs who holds it.
    """

    @property
    def zero_copy(self) -> bool:
        """`get` costs (nearly) nothing whatever the size, for every reader: there is no use for deltas."""

    async def put(self, name: str, blob: Blob) -> None:
        """Returns when every reader can get all of it; before, none can get any. The caller never changes `blob`."""

    async def get(self, name: str) -> Blob:
        """May be read-only, and should be aligned to 64 bytes.

        Raises:
            Missing: there is none of that name.
            WeightsError: it cannot be read.
        """

    async def delete(self, name: str) -> None:
        """Harmless when there is none of that name."""

    async def close(self) -> None:
        """Of the owner's side: delete everything."""
