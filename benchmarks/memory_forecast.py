"""The memory forecast of `tidemill plan run` and the peak of real runs of the same recipe.

    python -m benchmarks.memory_forecast [--steps 3]

SmolLM2 on one CPU thread: GRPO of the full model and of an adapter, each without and with a KL reference, and PPO with
a value head and with a separate critic. Each run is a separate process; its peak is its largest resident set. The
profile for the forecasts (lengths of prompts) is fitted to the first run only. The benchmark fails if a run trained
without the models of its case.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.measuring import BYTES_PER_GB, write_result
from benchmarks.models import quiet, smollm2
from benchmarks.origin import parsed
from benchmarks.subjects import check_models
from benchmarks.training_run import train
from benchmarks.weights_delta import RECIPE
from tidemill.cli.plan_options import models_of
from tidemill.config.load import load_spec
from tidemill.hardware.figures import Derivation
from tidemill.hardware.run_profile import RunProfile
from tidemill.planner.calibration.fit import calibrate
from tidemill.planner.forecast.forecast import memory_on_this_machine
from tidemill.telemetry.metrics import read_metrics

STEPS = 3
DEADLINE_S = 600.0
LORA = ("--model.lora.rank=8",)
KL = ("--algorithm.kl_beta=0.001",)
PPO = ("--algorithm.name=ppo", *KL)
CASES: Mapping[str, Sequence[str]] = {
    "GRPO": (),
    "GRPO, KL reference": KL,
    "GRPO, LoRA": LORA,
    "GRPO, LoRA, KL reference": (*LORA, *KL),
    "PPO, value head, KL reference": (*PPO, "--critic.kind=shared"),
    "PPO, critic of its own, KL reference": PPO,
    "PPO, LoRA, critic of its own, KL reference": (*PPO, *LORA),
}
LESS = 0.95


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS, help="of each run; 3 at least")
    steps = parsed(parser).steps
    quiet()
    smollm2()
    profile: RunProfile | None = None
    rows = []
    for name, changes in CASES.items():
        with tempfile.TemporaryDirectory(prefix="tidemill-memory-") as folder:
            run = Path(folder) / "run"
            arguments = [f"--trainer.steps={steps}", "--trainer.threads=1", "--checkpoint.every_steps=0"]
            arguments += ["--eval.every_steps=0", "--eval.prompts=8", *changes]
            measured = train(RECIPE, run, *arguments, progress=False, deadline_s=DEADLINE_S)["peak_rss_bytes"]
            lines = read_metrics(run / "metrics.jsonl")
            check_models(name, lines, reference=KL[0] in changes, critic=PPO[0] in changes)
            profile = profile or calibrate(run)
            spec = load_spec((f"@{RECIPE}", *arguments))
        forecast = memory_on_this_machine(spec, models_of(spec), profile, Derivation())
        rows.append({"case": name, "forecast_bytes": forecast, "measured_bytes": measured})
        print(f"{name}: forecast {forecast / BYTES_PER_GB:.2f} GB, measured {measured / BYTES_PER_GB:.2f}", flush=True)
    check_sizes({row["case"]: row["measured_bytes"] for row in rows})
    show(rows)
    write_result("memory_forecast", {"recipe": RECIPE.name, "steps": steps, "cases": rows})
    return 0


def check_sizes(measured_bytes: Mapping[str, float]) -> None:
    """Raises RuntimeError: an adapter took as much memory as all weights, or a critic no more than a value head."""
    pairs = [(case, case.replace(", LoRA", "")) for case in measured_bytes if ", LoRA" in case]
    pairs.append(("PPO, value head, KL reference", "PPO, critic of its own, KL reference"))
    for smaller, larger in pairs:
        if measured_bytes[smaller] > LESS * measured_bytes[larger]:
            raise RuntimeError(f"{smaller} took as much memory as {larger}")


def show(rows: Sequence[Mapping[str, float]]) -> None:
    table = Table(title="peak memory of SmolLM2, GB", box=box.SIMPLE)
    for column in ("", "forecast", "measured", "off by"):
        table.add_column(column, justify="right" if column else "left")
    for row in rows:
        forecast, measured = row["forecast_bytes"], row["measured_bytes"]
        figures = (
            f"{forecast / BYTES_PER_GB:.2f}",
            f"{measured / BYTES_PER_GB:.2f}",
            f"{forecast / measured - 1:+.0%}",
        )
        table.add_row(str(row["case"]), *figures)
    Console(width=120).print(table)


if __name__ == "__main__":
    sys.exit(main())
