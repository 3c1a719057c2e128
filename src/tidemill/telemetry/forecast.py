"""What a run was expected to take, as it is kept in its directory."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tidemill.config.words import counted
from tidemill.core.decoding import decode_json
from tidemill.core.records import Record
from tidemill.telemetry.jsonl import write_atomically
from tidemill.telemetry.numerals import dollars, duration

FORECAST = "forecast.json"
FORMAT = 1


class Spread(Record):
    """A number of several simulations: their mean, and two standard deviations around it."""

    mean: float
    low: float
    high: float


class Forecast(Record):
    """Of a whole run. Times in seconds."""

    format: int
    profile: str  # what it rests on, in words
    seeds: int  # simulations
    steps: int
    step_s: tuple[Spread, ...]  # of each simulated step, from the first on
    usual_step_s: Spread  # of the steps but the first, on average; steps that were not simulated are taken to be so
    total_s: Spread  # from the command to the end
    split_s: dict[str, float]  # of a usual step, what the trainer did, one after another
    generating_s: float  # of a usual step, until its last sample was there
    beside_s: dict[str, float]  # of the whole run, what is in no step: start, evaluation, checkpoints
    tokens_per_s: float
    cost_usd: float
    notes: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        cost = f" and {dollars(self.cost_usd)}" if self.cost_usd else ""
        low, high = duration(self.total_s.low), duration(self.total_s.high)
        return f"forecast: {duration(self.total_s.mean)} ({low} to {high}){cost} for {counted(self.steps, 'step')}"

    @property
    def caution(self) -> str:
        """What to know of it, in a line; empty for nothing."""
        return f"the forecast is from {self.profile}; {'; '.join(self.notes)}" if self.notes else ""

    def of_step(self, step: int) -> Spread:
        """Of a step, from 1."""
        return self.step_s[step - 1] if step <= len(self.step_s) else self.usual_step_s


def write_forecast(directory: Path, forecast: Forecast) -> None:
    """Raises UserError: it cannot be written."""
    write_atomically(directory / FORECAST, msgspec.json.format(msgspec.json.encode(forecast)) + b"\n")


def read_forecast(directory: Path) -> Forecast | None:
    """None where there is none that this version reads: nothing depends on it."""
    try:
        forecast = decode_json((directory / FORECAST).read_bytes(), Forecast)
    except (OSError, msgspec.DecodeError):
        return None
    return forecast if forecast.format == FORMAT else None
