"""The forecast of a run is stored before models are loaded, and its failure never stops the run."""

from __future__ import annotations

import io
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.fabricated_forecast import make_forecast
from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.jobs.train import ForecastRun, train
from tidemill.runtime.backend import RuntimeBackend
from tidemill.telemetry.manifest import Forecast, read_forecast


def nothing_to_run_on(*_: Any) -> AbstractAsyncContextManager[RuntimeBackend]:
    raise UserError("no machine today")


def start_run(directory: Path, foretell: ForecastRun) -> str:
    """Start a run that fails at once; returns its output."""
    spec = RunSpec.model_validate({"model": {"source": "char"}, "run": {"dir": str(directory)}})
    stream = io.StringIO()
    with pytest.raises(UserError, match="no machine today"):
        train(spec, telemetry_stream=stream, open_backend=nothing_to_run_on, forecast_run=foretell)
    return stream.getvalue()


def test_the_first_forecast_is_stored(tmp_path: Path) -> None:
    output = start_run(tmp_path, lambda _: make_forecast(3.0))
    assert "forecast: 1:40 (1:30 to 1:50) and $1.50 for 40 steps" in output
    start_run(tmp_path, lambda _: make_forecast(9.0))  # the run is resumed
    assert read_forecast(tmp_path) == make_forecast(3.0)


def test_the_cautions_of_a_forecast_are_logged_in_one_line(tmp_path: Path) -> None:
    forecast = msgspec.structs.replace(make_forecast(3.0), notes=("the machine was busy", "no checkpoint was written"))
    line = "the forecast is from a profile of another run; the machine was busy; no checkpoint was written\n"
    assert line in start_run(tmp_path, lambda _: forecast)
    assert "the forecast is from" not in start_run(tmp_path / "other", lambda _: make_forecast(3.0))


def test_a_failing_forecast_is_only_logged(tmp_path: Path) -> None:
    def foretell(_: RunSpec) -> Forecast | None:
        raise ZeroDivisionError("no steps")

    assert "no forecast: " in start_run(tmp_path, foretell)
    assert read_forecast(tmp_path) is None
    assert "forecast" not in start_run(tmp_path / "other", lambda _: None)


def test_an_interrupt_during_the_forecast_ends_the_run(tmp_path: Path) -> None:
    def foretell(_: RunSpec) -> Forecast | None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start_run(tmp_path, foretell)
