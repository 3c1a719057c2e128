from __future__ import annotations

from pathlib import Path

from tests.fabricated_forecast import make_forecast
from tidemill.telemetry.manifest import FORECAST, read_forecast, write_forecast


def test_a_forecast_is_read_as_it_was_written(tmp_path: Path) -> None:
    forecast = make_forecast(3.0, 2.5)
    write_forecast(tmp_path, forecast)
    assert read_forecast(tmp_path) == forecast
    assert forecast.of_step(2).mean == 2.5
    assert forecast.of_step(3) == forecast.usual_step_s
    assert forecast.sentence == "forecast: 1:40 (1:30 to 1:50) and $1.50 for 40 steps"


def test_a_missing_damaged_or_other_forecast_reads_as_none(tmp_path: Path) -> None:
    assert read_forecast(tmp_path) is None
    (tmp_path / FORECAST).write_text('{"format": 2, "seeds"')
    assert read_forecast(tmp_path) is None
    write_forecast(tmp_path, make_forecast(1.0))
    (tmp_path / FORECAST).write_text((tmp_path / FORECAST).read_text().replace('"format": 2', '"format": 3'))
    assert read_forecast(tmp_path) is None
