"""Simulated factories of what takes time and machines, for running the real controller under a virtual clock.

`sim/` replaces everything around the controller (engines, workers, provider, trainer, weights, journal) by components
in virtual time. Two uses:

- **Faults.** `tests/fault_simulation/` draws a fleet, a schedule and faults from a seed: evictions; late, lost,
  duplicate and reordered messages; hangs; slow and faulty workers; torn weights and journals; restarts. Each
  simulated token encodes its sample, position and version, so invariants are checked at every event: nothing lost,
  duplicated, reordered, learned twice or too old. `make faults` runs 10,000 seeds; `python -m tests.fault_simulation
  --seed N --log` replays one. Seeds that found a defect are named tests.
- **Forecasts.** `sim/simulation.py: simulate_run` takes a spec, a `CostModel`, a workload and a timetable, runs the
  real controller, and returns the logs that a real run writes. Costs are derived from a model and a GPU (`hardware/`,
  `sim/schedules.py`) or fitted to the logs of a run (`planner/calibration/`). A component's state is a closed form
  between two events, so a thousand workers take minutes; only where engines and trainer share the cores of one
  machine does an engine advance pass by pass. Each schedule of `tidemill simulate` is a row of differences
  (`sim/schedules.py`); other systems' policies are other `ComponentFactories` (`sim/baselines.py`). Figures and
  timelines come from the same code as for real runs.
"""
