"""A forecast's numbers, each with what it is made of."""

from __future__ import annotations

from tidemill.planner.figures import Sheet
from tidemill.telemetry.forecast import Forecast

SIMULATED = "the run's own controller in virtual time"


def derive(forecast: Forecast, sheet: Sheet) -> None:
    """Of the means over all simulations."""
    simulated, steps = len(forecast.step_s), forecast.steps
    in_steps = sum(step.mean for step in forecast.step_s)
    usual = forecast.usual_step_s.mean
    beside = forecast.beside_s
    sheet.note(
        "total_s",
        forecast.total_s.mean,
        "s",
        formula="start + simulated_steps_s + (steps - simulated) * usual_step_s + evaluation + checkpoints",
        source=f"{SIMULATED}; {forecast.profile}",
        start=beside["start"],
        simulated_steps_s=in_steps,
        steps=steps,
        simulated=simulated,
        usual_step_s=usual,
        evaluation=beside["evaluation"],
        checkpoints=beside["checkpoints"],
    )
    for name, seconds in forecast.split_s.items():
        sheet.note(
            f"share of {name}",
            seconds / usual,
            "",
            formula="seconds / usual_step_s",
            source=f"{SIMULATED}; what the trainer did, one after another",
            seconds=seconds,
            usual_step_s=usual,
        )
    sheet.note(
        "cost_usd_per_hour",
        3600 * forecast.cost_usd / forecast.total_s.mean,
        "USD/h",
        formula="3600 * cost_usd / total_s",
        source="prices of the fleet, each machine for as long as it was held",
        cost_usd=forecast.cost_usd,
        total_s=forecast.total_s.mean,
    )
