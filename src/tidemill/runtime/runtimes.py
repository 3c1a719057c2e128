"""Which runtime a run computes on."""

from __future__ import annotations

from tidemill.config.schema import RunSpec
from tidemill.runtime.backend import Runtime
from tidemill.runtime.local import IN_PROCESS


def runtime_of(spec: RunSpec) -> Runtime:
    """The runtime that `spec.runtime` names; Ray is imported only for "ray"."""
    if spec.runtime == "inprocess":
        return IN_PROCESS
    from tidemill.runtime.cluster.ray_backend import RAY

    return RAY
