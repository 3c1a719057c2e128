from __future__ import annotations

import asyncio
import itertools
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.planted import planted, spec_of
from tidemill.core.errors import UserError
from tidemill.hardware.run_profile import kept_path, write_profile
from tidemill.planner.forecast import forecast
from tidemill.planner.forecast.forecast import TooSlow, fitting_profile, forecast_at_start, forecast_recipe

ABACUS = {"processor": "Abacus", "cores": 2}


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("TIDEMILL_CACHE", str(tmp_path))
    monkeypatch.setattr(forecast, "machine", lambda: ABACUS)
    monkeypatch.setattr(forecast, "QUICK_S", 600.0)  # a busy machine is not what is tested
    profile = planted(spec_of())
    write_profile(profile, kept_path(profile))
    return profile


def test_a_profile_of_such_a_run_is_taken(kept: Any) -> None:
    assert fitting_profile(spec_of(steps=50)) == kept
    forecast = forecast_at_start(spec_of(steps=50))
    assert forecast is not None
    assert (forecast.seeds, forecast.steps) == (3, 50)
    large = forecast_at_start(spec_of(steps=50, batch={"prompts": 80, "group_size": 4}))
    assert large is not None
    assert (large.seeds, len(large.step_s)) == (1, 2)  # nobody waits for more


def test_of_another_kind_of_run_nothing_is_known(kept: Any) -> None:
    other = spec_of(engine={"batch_invariant": True})
    assert forecast_at_start(other) is None
    with pytest.raises(UserError, match=r"engine\.batch_invariant is True"):
        fitting_profile(other)


def test_of_another_machine_nothing_is_known(kept: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecast, "machine", lambda: ABACUS | {"cores": 3})
    assert forecast_at_start(spec_of()) is None
    with pytest.raises(UserError, match="no run on this machine has been calibrated yet") as raised:
        fitting_profile(spec_of())
    assert "--measure" in str(msgspec.to_builtins(raised.value.hint))


def test_a_stopped_worker_delays_no_other(kept: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def spin(*_: Any) -> Any:
        loop = asyncio.get_running_loop()

        def again() -> None:
            loop.call_soon(again)

        again()
        await loop.create_future()

    monkeypatch.setattr(forecast, "QUICK_S", 0.01)
    monkeypatch.setattr("tidemill.sim.one_machine._simulate", spin)
    with pytest.raises(TooSlow, match=r"longer than 0\.01 s"):
        forecast_at_start(spec_of())


def test_a_slow_worker_delays_no_other(kept: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecast, "QUICK_S", 0.0)
    with pytest.raises(TooSlow, match="longer than 0 s"):
        forecast_at_start(spec_of())


@pytest.mark.parametrize("pass_s", [0.1, 3000.0])  # of the second an engine does not stop in time
@pytest.mark.parametrize("moment", [1, 30, 300])
def test_an_interrupt_ends_it(moment: int, pass_s: float) -> None:
    spec = spec_of(steps=50)
    looks = itertools.count()

    def watch() -> None:
        if next(looks) == moment:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        forecast_recipe(spec, planted(spec, engine_pass_s=pass_s), seeds=1, watch=watch)
    assert next(looks) > moment
