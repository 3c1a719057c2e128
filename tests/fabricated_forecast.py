"""A handwritten forecast."""

from __future__ import annotations

from tidemill.telemetry.manifest import FORECAST_FORMAT, Forecast, Spread


def make_forecast(*step_s: float, total_s: float = 100.0) -> Forecast:
    """Steps with these times, within a tenth; later ones take 2 s."""
    return Forecast(
        format=FORECAST_FORMAT,
        profile="a profile of another run",
        seeds=3,
        steps=40,
        step_s=tuple(Spread(mean=one, low=0.9 * one, high=1.1 * one) for one in step_s),
        usual_step_s=Spread(mean=2.0, low=1.8, high=2.2),
        total_s=Spread(mean=total_s, low=0.9 * total_s, high=1.1 * total_s),
        split_s={"learning": 1.0},
        generating_s=1.0,
        outside_steps_s={"start": 5.0},
        tokens_per_s=50.0,
        cost_usd=1.5,
    )
