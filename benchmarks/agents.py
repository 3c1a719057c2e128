"""Agents: whether the recipes learn, and whether evictions, kills and slow environments cost or change anything.

    python -m benchmarks.agents [--only recipes,tokens,waiting,evictions,kills] [--seeds 3]

- *recipes*: guess, calc-tool and python-tool over seeds, on 200 held-out tasks, greedy and at the temperature of
training; controls with random rewards, and with tools that are out of order. All start from the seed's SFT stage.
- *tokens*: 10,000 episodes of random turns: what the engines drew against what is trained.
- *waiting*: wall time of 64 episodes with calls of one second, compared with engine time and critical path.
- *evictions*: a batch-invariant run with slow steps, with and without evictions: all samples and weights.
- *kills*: the same with the process killed at 50 random moments.

Parts that are not run keep their results in results/agents.json; seeds of *recipes* are kept too, unless --again.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import sys
import tempfile
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import torch
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.agent_faults import EvictedRun, KilledRun, evicted_run, killed_run
from benchmarks.agent_runs import KINDS, LEARNING, Accuracy, AgentRun, agent_run
from benchmarks.agent_tokens import check_tokens, compared_tokens
from benchmarks.agent_waiting import CONTROL_LEAST, MOST, check_waited, waited
from benchmarks.measuring import earlier_parts, print_records, write_part
from benchmarks.models import quiet, smollm2
from benchmarks.origin import parsed
from benchmarks.stopping import interruptible
from benchmarks.subjects import check_counts
from tidemill.agents.builtin import BUILT_IN
from tidemill.config.load import RECIPES

NAME = "agents"
PARTS = ("recipes", "tokens", "waiting", "evictions", "kills")
AIMS = {"guess": (0.45, 0.85), "calc-tool": (0.35, 0.90), "python-tool": (0.35, 0.90)}
"""Highest share of held-out tasks solved greedily before, lowest share after."""
TRAJECTORIES, TOKEN_STEPS = 10_000, 40
EVICTIONS, EVICTIONS_ACTING, KILLS = 200, 60, 50


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas")
    parser.add_argument("--recipes", default=",".join(KINDS), help="likewise")
    parser.add_argument("--seeds", type=int, default=3, help="of recipes and evictions")
    parser.add_argument("--steps", type=int, default=12, help="of evictions and kills")
    parser.add_argument("--again", action="store_true", help="measure existing results of recipes again")
    options = parsed(parser)
    quiet()
    torch.set_num_threads(1)
    parts: dict[str, Callable[[Path], dict[str, Any]]] = {
        "recipes": lambda folder: recipes_part(
            folder, options.recipes.split(","), seeds=options.seeds, again=options.again
        ),
        "tokens": tokens_part,
        "waiting": waiting_part,
        "evictions": lambda folder: evictions_part(folder, seeds=options.seeds, steps=options.steps),
        "kills": lambda folder: kills_part(folder, steps=options.steps),
    }
    reached = True
    for name in options.only.split(","):
        with tempfile.TemporaryDirectory(prefix="tidemill-agents-") as folder:
            reached = _keep(name, parts[name](Path(folder))) and reached
    return 0 if reached else 1


def recipes_part(folder: Path, recipes: Sequence[str], *, seeds: int, again: bool) -> dict[str, Any]:
    """Results are written after every run, so that an interrupt loses one run."""
    smollm2()
    runs = [] if again else earlier_runs()
    for recipe in recipes:
        for kind in KINDS[recipe]:
            for seed in range(seeds):
                if not any((each.recipe, each.kind, each.seed) == (recipe, kind, seed) for each in runs):
                    runs.append(run := agent_run(folder / f"{recipe}-{seed}", recipe, kind, seed))
                    check_counts(f"{recipe}, {kind}, seed {seed}", evictions=run.evictions)
                    _keep("recipes", recipes_figures(runs))
    _print(runs)
    return recipes_figures(runs)


def earlier_runs() -> list[AgentRun]:
    """Results in results/agents.json of the current recipes."""
    try:
        found = earlier_parts(NAME, PARTS)["recipes"]
        same = [recipe for recipe in KINDS if found["digests"].get(recipe) == _digest(recipe)]
        runs = [{"origin": found["origin"], **run} for run in found["runs"]]
        return [run for run in msgspec.convert(runs, list[AgentRun]) if run.recipe in same]
    except (KeyError, msgspec.ValidationError):
        return []


def recipes_figures(runs: Sequence[AgentRun]) -> dict[str, Any]:
    aims = verdict(runs)
    return {
        "digests": {recipe: _digest(recipe) for recipe in KINDS},
        "aims": aims,
        "reached": all(aims.values()),
        "runs": [msgspec.to_builtins(run) for run in runs],
    }


def verdict(runs: Sequence[AgentRun]) -> dict[str, bool]:
    """Each aim, and whether every seed reaches it."""
    found: dict[str, bool] = {}
    for recipe, (most, least) in AIMS.items():
        learning = [run for run in runs if run.recipe == recipe and run.kind == LEARNING]
        controls = [run for run in runs if run.recipe == recipe and run.kind != LEARNING]
        before, after = ([getattr(run, when).share for run in learning] for when in ("greedy_before", "greedy_after"))
        found[f"{recipe}: at most {most:g} before"] = max(before, default=1.0) <= most
        found[f"{recipe}: at least {least:g} after"] = min(after, default=0.0) >= least
        found[f"{recipe}: controls do not learn"] = bool(controls) and all(
            run.greedy_after.low <= run.greedy_before.high for run in controls
        )
    return found


def tokens_part(folder: Path) -> dict[str, Any]:
    compared = compared_tokens(folder, steps=TOKEN_STEPS)
    check_tokens(compared)
    found = msgspec.to_builtins(compared)
    print_records("episodes of random turns: trained against drawn tokens", [found])
    return {**found, "reached": not found["differing"] and found["trajectories"] >= TRAJECTORIES}


def waiting_part(folder: Path) -> dict[str, Any]:
    found = waited(folder, rounds=3)
    check_waited(found)
    figures = msgspec.to_builtins(found) | {"ratio": found.ratio, "control_ratio": found.control_ratio}
    print_records("64 episodes of 4 turns, 32 tokens and one second a turn, 8 slots", [figures])
    return {**figures, "reached": found.ratio <= MOST and found.control_ratio >= CONTROL_LEAST}


def evictions_part(folder: Path, *, seeds: int, steps: int) -> dict[str, Any]:
    runs = [evicted_run(folder, seed=seed, steps=steps) for seed in range(seeds)]
    print_records(
        "guess with slow steps, batch-invariant: with evictions against without", list(map(msgspec.to_builtins, runs))
    )
    return {"runs": list(map(msgspec.to_builtins, runs)), "reached": undisturbed(runs)}


def undisturbed(runs: Sequence[EvictedRun]) -> bool:
    """Whether enough evictions, also of workers whose episodes were acting, changed nothing."""
    same = all(run.differing_samples == run.differing_steps == 0 for run in runs)
    enough = sum(run.evictions for run in runs) >= EVICTIONS
    acting = sum(run.evictions_own_acting for run in runs) >= EVICTIONS_ACTING
    return same and enough and acting


def kills_part(folder: Path, *, steps: int) -> dict[str, Any]:
    runs = list[KilledRun]()
    while (done := sum(run.kills for run in runs)) < KILLS:
        runs.append(killed_run(folder, seed=len(runs), steps=steps, kills=KILLS - done))
        check_counts(f"seed {runs[-1].seed}", kills=runs[-1].kills)
    print_records("the same, its process killed at random moments", list(map(msgspec.to_builtins, runs)))
    return {"runs": list(map(msgspec.to_builtins, runs)), "reached": all(run.same for run in runs)}


def _digest(recipe: str) -> str:
    """Of a recipe and its built-in environment."""
    content = (RECIPES / f"{recipe}.toml").read_bytes()
    environment = BUILT_IN[tomllib.loads(content.decode())["env"]["name"]]
    return hashlib.blake2b(content + inspect.getsource(environment).encode(), digest_size=8).hexdigest()


def _keep(name: str, figures: dict[str, Any]) -> bool:
    """Replace one part in the results file; returns whether it reached its aims."""
    write_part(NAME, name, figures, parts=PARTS)
    return bool(figures["reached"])


def _print(runs: Sequence[AgentRun]) -> None:
    table = Table(title="held-out tasks solved, mean over seeds (95 % intervals of the seeds)", box=box.SIMPLE)
    for column in (
        "recipe",
        "run",
        "seeds",
        "greedy before",
        "after",
        "sampled before",
        "after",
        "evictions",
        "CPU min",
    ):
        table.add_column(column)
    for recipe, kinds in KINDS.items():
        for kind in kinds:
            if not (group := [run for run in runs if (run.recipe, run.kind) == (recipe, kind)]):
                continue
            shares = ("greedy_before", "greedy_after", "sampled_before", "sampled_after")
            cells = [_shares([getattr(run, name) for run in group]) for name in shares]
            minutes = f"{fmean(run.cpu_minutes for run in group):.1f}"
            table.add_row(recipe, kind, str(len(group)), *cells, str(sum(run.evictions for run in group)), minutes)
    Console(width=190).print(table)
    for aim, reached in verdict(runs).items():
        print(f"{'reached' if reached else 'MISSED '}  {aim}")


def _shares(found: Sequence[Accuracy | None]) -> str:
    if not (shares := [each for each in found if each is not None]):
        return "-"
    spread = f"{min(each.low for each in shares):.2f}-{max(each.high for each in shares):.2f}"
    return f"{fmean(each.share for each in shares):.3f} ({spread})"


if __name__ == "__main__":
    sys.exit(interruptible(main, keeps=True))
