"""Names of blobs, and manifests as blobs that cannot be mistaken for whole when they are not."""

from __future__ import annotations

import msgspec
import numpy as np

from tidemill.core.records import PolicyVersion, WeightManifest
from tidemill.weights.snapshot import Damaged, checksum
from tidemill.weights.transport import Blob

BASE = PolicyVersion(number=-1, digest="base")
"""Under this version lies what all versions have in common, where they are adapters of one base."""
_CHECKSUM_BYTES = 8


def manifest_name(version: PolicyVersion) -> str:
    return f"{version.number}-{version.digest}.manifest"


def snapshot_name(version: PolicyVersion) -> str:
    return f"{version.number}-{version.digest}.snapshot"


def delta_name(version: PolicyVersion) -> str:
    """Of the delta that ends at `version`."""
    return f"{version.number}-{version.digest}.delta"


def pack_manifest(manifest: WeightManifest) -> Blob:
    body = msgspec.msgpack.encode(manifest)
    mark = checksum(np.frombuffer(body, np.uint8)).to_bytes(_CHECKSUM_BYTES, "little")
    return np.frombuffer(mark + body, np.uint8)


def unpack_manifest(blob: Blob, *, of: str) -> WeightManifest:
    """
    Args:
        of: what to call it in an error.

    Raises:
        Damaged: torn or corrupt.
    """
    mark, body = blob[:_CHECKSUM_BYTES], blob[_CHECKSUM_BYTES:]
    if len(mark) < _CHECKSUM_BYTES or checksum(body) != int.from_bytes(mark.tobytes(), "little"):
        raise Damaged(f"the manifest of {of} is torn or corrupt ({len(blob)} bytes)")
    return msgspec.msgpack.decode(body.tobytes(), type=WeightManifest)
