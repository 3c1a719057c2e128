"""`tidemill plan placement`: machines for training and generation at the least cost or time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter
from rich.console import RenderableType

from tidemill.cli.output import Json, Result
from tidemill.cli.plan_options import (
    CatalogFile,
    Explain,
    HoldingOptions,
    MachineOptions,
    ModelOptions,
    Whole,
    lengths_given,
    notes,
    plain,
    result,
    table,
)
from tidemill.config.toml import write_value
from tidemill.core.errors import UserError
from tidemill.core.formatting import counted, dollars, duration, percent
from tidemill.hardware.engine_profile import Rollout, rollout_of
from tidemill.hardware.gpu_catalog import load_catalog
from tidemill.hardware.measured_rows import measured_efficiencies
from tidemill.planner.placement.estimate import Estimate
from tidemill.planner.placement.search import PlacementPlan, plan_placement
from tidemill.planner.placement.training import PlacementQuestion

COMPLETION_TOKENS = 2000.0

Measured = Annotated[
    tuple[Path, ...],
    Parameter(
        name="--measured",
        negative=(),
        help="Result of benchmarks.gpu.train_step or .engine; replaces assumed efficiencies of its GPU; repeatable.",
    ),
]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """The samples of a batch."""

    prompts: Whole = 128
    """Prompts per batch."""
    group_size: Whole = 8
    """Samples per prompt."""
    prompt_tokens: Whole = 512
    """Tokens per prompt."""
    completion_tokens: float | None = None
    """Mean completion length, by default 2000; lengths are log-normal, cut at the limit."""
    sigma: float = 0.8
    """Standard deviation of the logarithm of the lengths."""
    limit: Whole = 8192
    """Longest completion, in tokens."""
    lengths_from: Path | None = None
    """A run directory; use the lengths of its samples instead."""

    def rollout(self) -> tuple[Rollout, int]:
        """The generation work, and the tokens of the longest sample."""
        mean, limit = self.completion_tokens, self.limit
        lengths = lengths_given(self.lengths_from, mean, COMPLETION_TOKENS, sigma=self.sigma, limit=limit)
        samples, prompt_tokens = self.prompts * self.group_size, float(self.prompt_tokens)
        rollout = rollout_of(lengths, samples=samples, group_size=self.group_size, prompt_tokens=prompt_tokens)
        return rollout, self.prompt_tokens + lengths.quantile(0.9999)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The schedule of a run and its aim."""

    lag: Whole = 0
    """0: strictly on policy; 1 or more: generate the next batch during training."""
    objective: Literal["cost", "time"] = "cost"
    """cost: least cost per million trained tokens; time: shortest within the budget."""
    steps: Whole = 100
    """Steps of the run."""
    budget_usd: float | None = None
    """Budget for all steps."""
    microbatch_tokens: Whole = 16384
    """Per data-parallel rank."""
    engine_dtype: Literal["bf16", "fp8"] = "bf16"
    """Engine weights and arithmetic; keys and values stay in bf16."""


def placement(
    *,
    model: ModelOptions = ModelOptions(),
    machines: MachineOptions = MachineOptions(),
    availability: float = 1.0,
    algorithm: str = "grpo",
    batch: BatchOptions = BatchOptions(),
    run: RunOptions = RunOptions(),
    holding: HoldingOptions = HoldingOptions(),
    catalog: CatalogFile = None,
    measured: Measured = (),
    explain: Explain = False,
    json: Json = False,
) -> Result:
    """Find machines for training and generation, and GPUs per engine, at the least cost or time.

    Searches colocated, split and hybrid placements on the given machines, and numbers of preemptible ones.

    Parameters
    ----------
    availability
        Mean share of preemptible machines that are available.
    algorithm
        As in `tidemill plan memory`.
    """
    counts = {"--prompts": batch.prompts, "--group-size": batch.group_size, "--prompt-tokens": batch.prompt_tokens}
    for option, value in {**counts, "--limit": batch.limit, "--microbatch-tokens": run.microbatch_tokens}.items():
        if value < 1:
            raise UserError(f"must be at least 1, is {value}", where=option, hint="give a positive number")
    known = load_catalog(catalog)
    rollout, longest = batch.rollout()
    shape, offers = model.shape(), machines.offers(known, availability=availability)
    efficiencies, remarks = measured_efficiencies(measured, known, shape=shape, gpus=[offer.gpu for offer in offers])
    question = PlacementQuestion(
        algorithm=algorithm,
        shape=shape,
        offers=offers,
        rollout=rollout,
        longest=longest,
        holding=holding.holding(),
        efficiencies=efficiencies,
        **asdict(run),
    )
    plan = plan_placement(question)
    data = {
        "best": estimate_data(plan.best),
        "runners_up": [estimate_data(each) for each in plan.runners_up],
        "why": list(plan.why),
        "recipe": plan.keys,
        "warnings": list(plan.warnings),
        "tried": plan.tried,
        "efficiencies": list(remarks),
    }
    return result(data, (*as_text(question, plan), *notes(remarks)), plan.figures, explain=explain)


def estimate_data(found: Estimate) -> dict[str, Any]:
    """One placement; seconds are per step."""
    placement, training = found.placement, found.placement.training
    return {
        "kind": placement.kind,
        "training": {
            "machines": {offer.name: count for offer, count in training.group.members},
            "gpus": training.group.gpus,
            "gpus_apart": training.group.apart,
        },
        "generation": [
            {
                "machine": engine.offer.name,
                "machines": machines,
                "preemptible": engine.offer.preemptible,
                "shared": side is placement.shared,
                "reserved_engine": engine.offer.included,
                "gpus_per_engine": engine.gpus,
            }
            for side in (placement.shared, placement.dedicated)
            for engine, machines in side.engines
        ],
        "step_s": found.step_s,
        "training_s": found.training_s,
        "seeding_s": found.seeding_s,
        "generation_s": found.generation_s,
        "pull_s": found.pull_s,
        "tokens_per_s": found.tokens_per_s,
        "usd_per_hour": placement.usd_per_hour,
        "usd_per_million_tokens": found.usd_per_million,
        "trainer_idle_share": found.trainer_idle,
        "dedicated_idle_share": found.dedicated_idle,
        "hours": found.hours,
        "cost_usd": found.usd,
    }


def as_text(question: PlacementQuestion, plan: PlacementPlan) -> Iterator[RenderableType]:
    """The best placement, the runners-up, and warnings."""
    best, training = plan.best, plan.best.placement.training
    yield from plain(f"best of {plan.tried} placements: {best.placement.description}")
    shards = counted(training.group.gpus, "rank")
    yield from plain(f"training: {shards}, one for each GPU; a batch takes {duration(best.training_s)}")
    for title, side in (("the same GPUs generate", best.placement.shared), ("generating", best.placement.dedicated)):
        if side.engines:
            per = ", ".join(f"{engine.per_machine} per {engine.offer.name}" for engine, _ in side.workers)
            each = counted(side.engines[0][0].gpus, "GPU")
            yield from plain(f"{title}: engines of {each}{f', {per}' if per else ''}")
    yield from plain(f"recipe: {', '.join(f'{key} = {write_value(value)}' for key, value in plan.keys.items())}")
    yield ""
    rows = [
        [
            str(number),
            duration(found.step_s),
            f"{found.tokens_per_s:,.0f}",
            dollars(found.placement.usd_per_hour),
            dollars(found.usd_per_million),
            percent(found.trainer_idle),
            f"{found.hours:.3g} h, {dollars(found.usd)}",
        ]
        for number, found in enumerate((best, *plan.runners_up), 1)
    ]
    headings = ("", "step", "tokens/s", "$/h", "$/M tokens", "trainer idle", counted(question.steps, "step"))
    yield table(headings, rows)
    yield ""
    yield from plain(f"1  {best.placement.description}")
    yield from plain(*(f"{number}  {line}" for number, line in enumerate(plan.why, 2)))
    yield from notes(f"warning: {line}" for line in plan.warnings)
