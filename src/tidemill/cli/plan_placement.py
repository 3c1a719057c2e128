"""`tidemill plan placement`: machines for training and generation at the least cost or time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from cyclopts import Parameter
from rich.console import RenderableType

from tidemill.cli import plan_options
from tidemill.cli.output import Json, Result
from tidemill.cli.plan_options import (
    CatalogFile,
    Explain,
    Model,
    Params,
    Whole,
    counted_from_1,
    lengths_given,
    shape_of,
)
from tidemill.core.errors import UserError
from tidemill.core.formatting import counted, dollars, duration, percent
from tidemill.hardware.engine_profile import rollout_of
from tidemill.hardware.gpu_catalog import Catalog, load_catalog
from tidemill.hardware.measured_rows import measured_efficiencies
from tidemill.planner.memory.states import Holding
from tidemill.planner.placement.estimate import Estimate, Side
from tidemill.planner.placement.search import PlacementPlan, plan_placement
from tidemill.planner.placement.training import Offer, PlacementQuestion

COMPLETION_TOKENS = 2000.0

Machines = Annotated[
    tuple[str, ...], Parameter(name="--machines", negative=(), help="Reserved machines, NAME:COUNT; repeatable.")
]
Preemptible = Annotated[
    tuple[str, ...],
    Parameter(name="--preemptible", negative=(), help="Preemptible machines, NAME:MAXIMUM; repeatable."),
]
Measured = Annotated[
    tuple[Path, ...],
    Parameter(
        name="--measured",
        negative=(),
        help="Result of benchmarks.gpu.train_step or .engine; replaces assumed efficiencies of its GPU; repeatable.",
    ),
]
Prices = Annotated[
    tuple[str, ...],
    Parameter(name="--price", negative=(), help="NAME=USD or preemptible:NAME=USD, per hour and machine; repeatable."),
]


def placement(
    *,
    params: Params = None,
    model: Model = None,
    machines: Machines = (),
    preemptible: Preemptible = (),
    price: Prices = (),
    availability: float = 1.0,
    algorithm: str = "grpo",
    prompts: Whole = 128,
    group_size: Whole = 8,
    prompt_tokens: Whole = 512,
    completion_tokens: float | None = None,
    sigma: float = 0.8,
    limit: Whole = 8192,
    lengths_from: Path | None = None,
    lag: Whole = 0,
    objective: Literal["cost", "time"] = "cost",
    steps: Whole = 100,
    budget_usd: Annotated[float | None, Parameter(name="--budget-usd")] = None,
    microbatch_tokens: Whole = 16384,
    engine_dtype: Literal["bf16", "fp8"] = "bf16",
    lora_rank: Whole = 0,
    optimizer: Literal["adam", "adam-8bit"] = "adam",
    offload: Annotated[bool, Parameter(negative=())] = False,
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
    prompts
        Prompts per batch.
    group_size
        Samples per prompt.
    prompt_tokens
        Tokens per prompt.
    completion_tokens
        Mean completion length, by default 2000; lengths are log-normal, cut at the limit.
    sigma
        Standard deviation of the logarithm of the lengths.
    limit
        Longest completion, in tokens.
    lengths_from
        A run directory; use the lengths of its samples instead.
    lag
        0: strictly on policy; 1 or more: generate the next batch during training.
    objective
        cost: least cost per million trained tokens; time: shortest within the budget.
    steps
        Steps of the run.
    budget_usd
        Budget for all steps.
    microbatch_tokens
        Per data-parallel rank.
    engine_dtype
        Engine weights and arithmetic; keys and values stay in bf16.
    lora_rank
        Train adapters of this rank; 0 trains the whole model.
    optimizer
        As in `tidemill plan memory`.
    offload
        Keep moments and master weights in host memory.
    """
    counted_from_1(
        {
            "--prompts": prompts,
            "--group-size": group_size,
            "--prompt-tokens": prompt_tokens,
            "--limit": limit,
            "--microbatch-tokens": microbatch_tokens,
        }
    )
    known = with_prices(load_catalog(catalog), price)
    lengths = lengths_given(lengths_from, completion_tokens, COMPLETION_TOKENS, sigma=sigma, limit=limit)
    shape, offers = shape_of(params, model), offers_of(known, machines, preemptible, availability=availability)
    efficiencies, remarks = measured_efficiencies(measured, known, shape=shape, gpus=[offer.gpu for offer in offers])
    question = PlacementQuestion(
        algorithm=algorithm,
        shape=shape,
        offers=offers,
        rollout=rollout_of(
            lengths, samples=prompts * group_size, group_size=group_size, prompt_tokens=float(prompt_tokens)
        ),
        longest=prompt_tokens + lengths.quantile(0.9999),
        lag=lag,
        objective=objective,
        steps=steps,
        budget_usd=budget_usd,
        holding=Holding(optimizer=optimizer, lora_rank=lora_rank, offload=offload),
        microbatch_tokens=microbatch_tokens,
        engine_dtype=engine_dtype,
        efficiencies=efficiencies,
    )
    plan = plan_placement(question)
    data = {**as_data(plan), "efficiencies": list(remarks)}
    text = (*as_text(question, plan), *plan_options.notes(remarks))
    return plan_options.result(data, text, plan.figures, explain=explain)


def offers_of(
    known: Catalog, machines: Sequence[str], preemptible: Sequence[str], *, availability: float = 1.0
) -> tuple[Offer, ...]:
    """Raises UserError: as `offer_of`."""
    return (
        *(offer_of(text, known, "--machines") for text in machines),
        *(offer_of(text, known, "--preemptible", availability=availability) for text in preemptible),
    )


def offer_of(text: str, catalog: Catalog, option: str, *, availability: float = 1.0) -> Offer:
    """Parse `rlboost-2xh100:6`; the default count is 1.

    Raises:
        UserError: unknown machine or invalid count.
    """
    name, colon, count = text.partition(":")
    where = f"{option} {text}"
    if colon and not count.isdecimal():
        raise UserError(f"{count!r} is not a number of machines", where=where, hint="write NAME:COUNT")
    machine = catalog.machine(name, where=where)
    return Offer(
        machine=machine,
        gpu=catalog.gpu(machine.gpu),
        count=int(count or 1),
        preemptible=option == "--preemptible",
        availability=availability,
    )


def with_prices(catalog: Catalog, prices: Sequence[str]) -> Catalog:
    """The catalogue with the given prices.

    Raises:
        UserError: unknown machine or invalid price.
    """
    machines = dict(catalog.machines)
    for text in prices:
        given, _, amount = text.partition("=")
        name = given.removeprefix("preemptible:")
        try:
            usd = float(amount)
        except ValueError:
            usd = math.nan
        if not 0 < usd < math.inf:
            raise UserError(f"{amount!r} is not a price", where=f"--price {text}", hint="write NAME=USD, per hour")
        field = "usd_per_hour" if given == name else "preemptible_usd_per_hour"
        row = catalog.machine(name, where=f"--price {text}")
        changes: dict[str, Any] = {field: usd, "price_source": "given by --price", "priced": "now"}
        machines[row.name] = msgspec.structs.replace(machines[row.name], **changes)
    return Catalog(gpus=catalog.gpus, machines=machines)


def as_data(plan: PlacementPlan) -> dict[str, Any]:
    return {
        "best": estimate_data(plan.best),
        "runners_up": [estimate_data(each) for each in plan.runners_up],
        "why": list(plan.why),
        "warnings": list(plan.warnings),
        "tried": plan.tried,
    }


def estimate_data(found: Estimate) -> dict[str, Any]:
    """One placement; seconds are per step."""
    placement, training = found.placement, found.placement.training
    return {
        "kind": placement.kind,
        "training": {
            "machines": {offer.name: count for offer, count in training.group.members},
            "gpus": training.group.gpus,
            "fsdp": training.fsdp,
            "tp": training.tp,
            "pp": training.pp,
        },
        "generation": [
            {
                "machine": engine.offer.name,
                "machines": machines,
                "preemptible": engine.offer.preemptible,
                "shared": side is placement.shared,
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
    degrees = f"fsdp {training.fsdp}, tp {training.tp}, pp {training.pp}"
    yield from plan_options.plain(f"best of {plan.tried} placements: {best.placement.description}")
    yield from plan_options.plain(
        f"training: {counted(training.group.gpus, 'GPU')}, {degrees}; a batch takes {duration(best.training_s)}"
    )
    for title, side in (("the same GPUs generate", best.placement.shared), ("generating", best.placement.dedicated)):
        if side.engines:
            yield from plan_options.plain(f"{title}: {describe_engines(side)}")
    yield ""
    rows = [row(number, each) for number, each in enumerate((best, *plan.runners_up), 1)]
    headings = ("", "step", "tokens/s", "$/h", "$/M tokens", "trainer idle", counted(question.steps, "step"))
    yield plan_options.table(headings, rows)
    yield ""
    yield from plan_options.plain(f"1  {best.placement.description}")
    yield from plan_options.plain(*(f"{number}  {line}" for number, line in enumerate(plan.why, 2)))
    yield from plan_options.notes(f"warning: {line}" for line in plan.warnings)
    if plan.best.placement.training.group.gpus > 1:
        yield from plan_options.notes(["this release trains on one GPU: placements with more are forecasts"])


def describe_engines(side: Side) -> str:
    return "; ".join(
        f"{machines:.3g} × {engine.offer.description}: {engine.per_machine} per machine, {engine.gpus} GPUs each"
        for engine, machines in side.engines
    )


def row(number: int, found: Estimate) -> list[str]:
    return [
        str(number),
        duration(found.step_s),
        f"{found.tokens_per_s:,.0f}",
        dollars(found.placement.usd_per_hour),
        dollars(found.usd_per_million),
        percent(found.trainer_idle),
        f"{found.hours:.3g} h, {dollars(found.usd)}",
    ]
