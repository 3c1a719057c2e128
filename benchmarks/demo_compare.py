"""A job on a reserved and a preemptible machine, in a recorded market, beside the same job on reserved machines only.

    python -m benchmarks.demo_compare [--seeds N] [--folder FOLDER] [--again]

Three runs of the recipe `spot-market` for each seed, each on a local Ray cluster with one core a machine: as it is; the
reserved machine alone; two machines, both reserved: never evicted, at the reserved price. Recipe, seed and batch are
the same. Time and dollars are those of the stage `rl`; the stages before it are equal and need one machine. Runs that
the folder has are kept. The benchmark fails if the three did not do the same work: steps, samples
and evaluations must be equal, the tokens generated may differ by 15 %, because completions do not have the same tokens
if timing decides which of them are decoded together.

Writes FOLDER/compare-SEED.html, results/demo_compare.json and docs/pictures/demo_compare.svg.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.line_charts import COLOURS, PICTURES, STYLE
from benchmarks.measuring import exit_code, write_result
from benchmarks.origin import ROOT, parsed
from benchmarks.subjects import check_counts, check_equal
from benchmarks.training_run import train
from tidemill.config.load import RECIPES
from tidemill.models.model_source import stage_folders
from tidemill.telemetry.comparison import axes_of
from tidemill.telemetry.report.compare import write_comparison
from tidemill.telemetry.report.payoff import payoff_of
from tidemill.telemetry.run_data import RunData
from tidemill.telemetry.run_dir import read_json

RECIPE = RECIPES / "spot-market.toml"
RESERVED_USD_PER_HOUR = 0.526  # of the recipe
DEMO, ALONE, RESERVED = "one reserved, one preemptible", "one reserved", "two reserved"
RUNS = {
    DEMO: [],
    ALONE: ["--stage.rl.pool", '{ kind = "static", workers = 0 }'],
    RESERVED: [
        *("--stage.rl.pool", '{ kind = "static", workers = 1 }'),
        *("--stage.rl.fleet.preemptible_usd_per_hour", str(RESERVED_USD_PER_HOUR)),
    ],
}
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "RAY_worker_niceness": "0"}
TOKENS_APART = 0.15
PICTURE = PICTURES / "demo_compare.svg"
GREY = "#7d8990"  # readable on white and on black


def main() -> int:
    parser = argparse.ArgumentParser(description="The demo compared with reserved machines only.")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path("runs") / "demo-compare")
    parser.add_argument("--again", action="store_true", help="measure runs that the folder has again")
    options = parsed(parser)
    rows = list[dict[str, Any]]()
    for seed in range(options.seeds):
        folder = ROOT / options.folder
        paths = [_measured(folder, name, seed, again=options.again) for name in RUNS]
        runs = dict(zip(RUNS, map(RunData.read, paths), strict=True))
        check_runs({name: run.summary for name, run in runs.items()})
        rows += [row_of(name, seed, run) for name, run in runs.items()]
        print(f"written: {write_comparison(paths, folder / f'compare-{seed}.html')}")
    result = result_of(rows)
    _print_table(rows, result)
    write_result("demo_compare", {"recipe": RECIPE.name, **result, "runs": rows})
    draw(rows, result)
    return exit_code(result)


def _measured(folder: Path, name: str, seed: int, *, again: bool) -> Path:
    path = folder / f"{name.replace(', ', '-').replace(' ', '-')}-{seed}"
    if again:
        shutil.rmtree(path, ignore_errors=True)
    if read_json(path / "summary.json").get("outcome") != "finished":
        train(RECIPE, path, "--run.seed", str(seed), "--run.name", name, *RUNS[name], environment=ENVIRONMENT)
    return stage_folders(path)["rl"]


def check_runs(summaries: dict[str, dict[str, Any]]) -> None:
    """Raises RuntimeError: the runs did not do the same work, or the demo had no eviction."""
    check_equal("steps", {name: one["steps"] for name, one in summaries.items()})
    check_equal("optimizer steps", {name: one["optimizer_steps"] for name, one in summaries.items()})
    check_equal("evaluated prompts", {name: one["eval"]["n"] for name, one in summaries.items()})
    tokens = {name: one["tokens_generated"] for name, one in summaries.items()}
    if max(tokens.values()) > (1 + TOKENS_APART) * min(tokens.values()):
        raise RuntimeError(f"the runs generated different numbers of tokens: {tokens}")
    check_counts(DEMO, evictions=summaries[DEMO]["evictions"])
    for name in (ALONE, RESERVED):
        check_equal("evictions of reserved machines", {name: summaries[name]["evictions"], "none": 0})


def row_of(name: str, seed: int, run: RunData) -> dict[str, Any]:
    """The figures of a run."""
    axes, at = axes_of(run), {line.step: number for number, line in enumerate(run.metrics)}
    summary, verdict, sessions = run.summary, payoff_of(run), run.manifest.get("sessions") or [{}]
    keys = ("steps", "optimizer_steps", "tokens_generated", "tokens_trained", "tokens_recomputed", "evictions")
    counts = {key: summary[key] for key in (*keys, "evictions_noticed", "samples_kept", "tokens_kept", "tokens_lost")}
    return {
        "run": name,
        "seed": seed,
        "wall_s": summary["wall_s"],
        "cost_usd": summary["cost_usd"],
        "reserved_only_usd": summary["reserved_only_usd"],
        "verdict": f"{verdict.title}. {verdict.text}" if verdict else "",
        **counts,
        "curve": [
            {
                "step": one.step,
                "accuracy": one.greedy_accuracy,
                "seconds": axes["seconds"][at[one.step]],
                "usd": axes["dollars"][at[one.step]],
            }
            for one in run.evaluations
        ],
        "n": summary["eval"]["n"],
        "commit": sessions[0].get("git", {}).get("commit", ""),
        "load_average_1min": os.getloadavg()[0],
    }


def result_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means over the seeds, and the demo relative to reserved machines only."""
    means = {
        name: {
            key: fmean(row[key] for row in rows if row["run"] == name) for key in ("wall_s", "cost_usd", "evictions")
        }
        | {"accuracy": fmean(row["curve"][-1]["accuracy"] for row in rows if row["run"] == name)}
        for name in RUNS
    }
    demo, alone, reserved = (means[name] for name in (DEMO, ALONE, RESERVED))
    cost = {(row["run"], row["seed"]): row["cost_usd"] for row in rows}
    return {
        "means": means,
        "cost_relative_by_seed": [cost[run, seed] / cost[ALONE, seed] for run, seed in cost if run == DEMO],
        "cost_relative_to_one_reserved": demo["cost_usd"] / alone["cost_usd"],
        "time_relative_to_one_reserved": demo["wall_s"] / alone["wall_s"],
        "cost_relative_to_two_reserved": demo["cost_usd"] / reserved["cost_usd"],
        "time_relative_to_two_reserved": demo["wall_s"] / reserved["wall_s"],
        "estimated_relative_to_measured": fmean(
            one["reserved_only_usd"] / other["cost_usd"]
            for one in rows
            for other in rows
            if one["run"] == DEMO
            and other["run"] == ALONE
            and one["seed"] == other["seed"]
            and one["reserved_only_usd"]
        ),
        "pays": demo["cost_usd"] < alone["cost_usd"],
    }


def title_of(result: dict[str, Any]) -> str:
    """What the picture says."""
    change, time = result["cost_relative_to_one_reserved"] - 1, 1 - result["time_relative_to_one_reserved"]
    cost = f"{abs(change):.0%} {'cheaper' if change < 0 else 'more expensive'}"
    speed = f"{abs(time):.0%} {'less' if time > 0 else 'more'} time"
    survived = f"evictions a run: {result['means'][DEMO]['evictions']:.3g}"
    return f"A preemptible machine beside the reserved one: {cost}, {speed}, {survived}".replace("%", " %")


def _print_table(rows: Sequence[dict[str, Any]], result: dict[str, Any]) -> None:
    table = Table(title=title_of(result), box=box.SIMPLE)
    for column in ("machines", "seed", "minutes", "USD", "accuracy before", "after", "evictions", "tokens trained"):
        table.add_column(column, justify="left" if column == "machines" else "right")
    for row in rows:
        before, after = (f"{row['curve'][at]['accuracy']:.2f}" for at in (0, -1))
        figures = (f"{row['wall_s'] / 60:.1f}", f"{row['cost_usd']:.4f}", before, after)
        table.add_row(row["run"], str(row["seed"]), *figures, str(row["evictions"]), str(row["tokens_trained"]))
    Console(width=140).print(table)


def draw(rows: Sequence[dict[str, Any]], result: dict[str, Any]) -> None:
    """The picture: accuracy by dollars and by time, without a background, in colours for light and dark pages."""
    style = STYLE | {f"{name}.color": GREY for name in ("text", "xtick", "ytick")}
    style |= {"axes.edgecolor": GREY, "axes.labelcolor": GREY, "grid.color": GREY, "grid.alpha": 0.25}
    PICTURE.parent.mkdir(exist_ok=True)
    with mpl.rc_context(style):
        figure = Figure(figsize=(8.0, 3.3), layout="constrained", facecolor="none")
        axes = figure.subplots(1, 2, sharey=True)
        for ax, key, scale, label in zip(axes, ("usd", "seconds"), (100, 1 / 60), ("US cents", "minutes"), strict=True):
            ax.set(xlabel=label, facecolor="none")
            for colour, name in enumerate(RUNS):
                for row in (row for row in rows if row["run"] == name):
                    xs, ys = ([one[of] for one in row["curve"]] for of in (key, "accuracy"))
                    shown = name if row["seed"] == 0 else None
                    ax.plot([x * scale for x in xs], ys, "o-", ms=3, lw=1.6, color=COLOURS[colour], label=shown)
            ax.set_xlim(left=0)
        axes[0].set(ylabel="held-out accuracy")
        axes[0].set_ylim(bottom=0)
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
        figure.suptitle(title_of(result), fontsize=10)
        figure.savefig(PICTURE, format="svg", metadata={"Date": None, "Title": title_of(result)}, transparent=True)
    print(f"written: {PICTURE}")


if __name__ == "__main__":
    sys.exit(main())
