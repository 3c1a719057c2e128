"""A small run whose samples come from a pool of workers, and the results of the same run without a pool."""

from __future__ import annotations

from typing import Any

from tests.doubles.session import PoolSession, Session, small_spec, trained
from tests.virtual_time import run_virtual
from tidemill.config.pool import FleetConfig
from tidemill.config.schema import RunSpec
from tidemill.core.records import LeaseEvent

SPEC = small_spec(batch={"prompts": 6, "group_size": 3})
FLEET = FleetConfig(heartbeat_timeout_s=5.0, join_timeout_s=20.0, drain_margin_s=0.5, seed_window_s=1.0)


def quiet(spec: RunSpec = SPEC) -> object:
    session = Session(spec=spec)
    run_virtual(session.run())
    return trained(session)


def pool(*script: tuple[float, LeaseEvent], **changes: Any) -> PoolSession:
    return PoolSession(**{"spec": SPEC, "script": script, "config": FLEET, **changes})
