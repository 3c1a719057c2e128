"""`tidemill plan run @recipe.toml`: forecasts time, cost and memory of a recipe."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter
from rich.console import RenderableType

from tidemill.cli.arguments import Items
from tidemill.cli.output import Json, Result
from tidemill.cli.plan_options import (
    CatalogFile,
    Explain,
    MachineOptions,
    ModelOptions,
    Whole,
    lengths_given,
    models_of,
    notes,
    plain,
    result,
    shape_of_model,
    table,
)
from tidemill.cli.plan_placement import estimate_data
from tidemill.config.load import load_spec
from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.core.formatting import counted, dollars, duration, percent, size
from tidemill.hardware.completion_lengths import Lengths
from tidemill.hardware.engine_ranks import Device
from tidemill.hardware.figures import Derivation
from tidemill.hardware.gpu_catalog import load_catalog
from tidemill.hardware.measured_rows import measured_efficiencies
from tidemill.hardware.process_memory import Models
from tidemill.hardware.run_profile import RunProfile, kept_path, read_profile, setting_differences, write_profile
from tidemill.jobs.placed_run import placed_run
from tidemill.planner.forecast.cluster_forecast import ClusterForecast, forecast_on_cluster, placement_question
from tidemill.planner.forecast.forecast import SEEDS, derive, fitting_profile, forecast_recipe, memory_on_this_machine
from tidemill.planner.placement.recipe import run_machines, workers_on_any_node
from tidemill.planner.placement.training import Offer
from tidemill.pool.build_provider import trace_outlasted, trace_remarks
from tidemill.runtime.memory_check import known_models, memory_remarks
from tidemill.telemetry.manifest import Forecast, Spread

MEASURED_STEPS = 6
PROMPT_TOKENS = 512
SIGMA = 0.8
BOOT_S = 60.0
ProfileFile = Annotated[
    Path | None, Parameter(name="--profile", help="A profile of `tidemill calibrate`; default: the newest that fits.")
]
Measure = Annotated[
    bool,
    Parameter(name="--measure", negative=(), help=f"First train {MEASURED_STEPS} steps and calibrate on them."),
]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class WorkOptions:
    """The work of a recipe on a described cluster."""

    prompt_tokens: Whole | None = None
    """Tokens per prompt on a described cluster, by default 512."""
    completion_tokens: float | None = None
    """Mean completion length there (log-normal), by default half of the limit."""
    sigma: float | None = None
    """Standard deviation of the logarithm of the lengths, by default 0.8."""
    lengths_from: Path | None = None
    """A run directory; use the lengths of its samples instead."""
    boot_s: float | None = None
    """Boot time of a preemptible machine in seconds, by default 60."""

    def lengths(self, limit: int) -> Lengths:
        """Raises UserError: as `lengths_given`."""
        sigma = SIGMA if self.sigma is None else self.sigma
        return lengths_given(self.lengths_from, self.completion_tokens, limit / 2, sigma=sigma, limit=limit)


def run(
    *items: Items,
    profile: ProfileFile = None,
    measure: Measure = False,
    machines: MachineOptions = MachineOptions(),
    model: ModelOptions = ModelOptions(),
    work: WorkOptions = WorkOptions(),
    seeds: Whole = SEEDS,
    catalog: CatalogFile = None,
    explain: Explain = False,
    json: Json = False,
) -> Result:
    """Forecast time, cost and memory of a recipe by running its controller in virtual time.

    Uses a calibrated profile of this machine or, with --machines, a described cluster.

    Parameters
    ----------
    seeds
        Number of simulations, for the uncertainty.
    """
    spec = load_spec(items)
    if seeds < 1:
        raise UserError("must be at least 1", where="--seeds", hint="5 give an uncertainty")
    if machines.machines:
        here = {"profile": profile, "measure": measure}
        _refuse(here, "applies to this machine, but --machines describes a cluster", "omit one of them")
        prompt_tokens = PROMPT_TOKENS if work.prompt_tokens is None else work.prompt_tokens
        boot_s = BOOT_S if work.boot_s is None else work.boot_s
        shape = model.shape() if model.params or model.model else shape_of_model(spec.model)
        lengths = work.lengths(spec.sampling.max_new_tokens)
        known = load_catalog(catalog)
        offers = machines.offers(known)
        models = known_models(spec, None, fetch=False) or Models(policy=shape)
        spec, remarks = _placed(spec, msgspec.structs.replace(models, policy=shape), offers)
        question = placement_question(spec, shape, offers, lengths, prompt_tokens)
        efficiencies, lines = measured_efficiencies(
            (), known, shape=shape, gpus=[offer.gpu for offer in offers], engines=(spec.engine.kind,)
        )
        question, remarks = msgspec.structs.replace(question, efficiencies=efficiencies), [*remarks, *lines]
        found = forecast_on_cluster(spec, question, lengths, prompt_tokens, seeds=seeds, boot_s=boot_s)
        return _of_cluster(spec, found, remarks, explain=explain)
    elsewhere = {**asdict(machines), **asdict(model), **asdict(work), "catalog": catalog}
    _refuse(elsewhere, "applies to a described cluster, but --machines is missing", "give --machines, or omit it")
    if measure:
        _refuse({"profile": profile}, "conflicts with --measure, which creates a profile", "omit one of them")
    remarks = memory_remarks(spec, "rl")  # refuses what does not fit, before it is measured
    if measure:
        chosen = _measured(spec)
    else:
        chosen = fitting_profile(spec) if profile is None else read_profile(profile)
    return _of_this_machine(spec, chosen, forecast_recipe(spec, chosen, seeds=seeds), remarks, explain=explain)


def _placed(spec: RunSpec, models: Models, offers: Sequence[Offer]) -> tuple[RunSpec, list[str]]:
    """A recipe on Ray with the ranks of its engine, and what its own placement holds on these machines.

    Raises:
        UserError: no number of ranks fits, or a process does not fit a machine.
    """
    gpu, machine = offers[0].gpu, offers[0].machine
    small = min(offers, key=lambda offer: offer.gpu.memory_bytes).gpu
    least = min(offer.machine.gpus for offer in offers)
    device = Device(title=small.title, memory_bytes=small.memory_bytes, count=least)
    spec, remarks = placed_run(spec, models, gpu=gpu, device=device)
    if spec.trainer.shards > 1:
        spot = min((offer.machine.gpus for offer in offers if offer.preemptible), default=None)
        each = run_machines(spec, reserved_gpus=machine.gpus, worker_gpus=spot)
        for kind, placed in zip(("reserved", "preemptible"), each, strict=True):
            for number, roles in enumerate(placed, 1):
                words = ", ".join(f"{count} × {role}" for role, count in roles.items())
                remarks.append(f"{kind} machine {number}: {words}")
        if spot is None and spec.is_elastic and not workers_on_any_node(spec):
            remarks.append("no preemptible machines are given (--preemptible): the reserved engine generates alone")
    return spec, remarks


def _refuse(options: Mapping[str, object], what: str, hint: str) -> None:
    """Raises UserError: an option without effect was given."""
    for name, value in options.items():
        if value is not None and value is not False and value != ():
            raise UserError(what, where=f"--{name.replace('_', '-')}", hint=hint)


def _measured(spec: RunSpec) -> RunProfile:
    """Train a few steps in a temporary directory and calibrate."""
    from tidemill.jobs.train import train
    from tidemill.planner.calibration.fit import calibrate

    with tempfile.TemporaryDirectory(prefix="tidemill-measured-") as folder:
        here = spec.run.model_copy(update={"dir": Path(folder) / "run"})
        few = spec.trainer.model_copy(update={"steps": min(spec.trainer.steps, MEASURED_STEPS)})
        short = spec.model_copy(update={"run": here, "trainer": few})
        train(short)
        found = calibrate(short.directory)
    write_profile(found, kept_path(found))
    return found


def _of_this_machine(
    spec: RunSpec, profile: RunProfile, found: Forecast, remarks: Sequence[str], *, explain: bool
) -> Result:
    sheet = Derivation()
    derive(found, sheet)
    memory = memory_on_this_machine(spec, models_of(spec), profile, sheet)
    differences = setting_differences(profile, spec)
    remarks = [*remarks, *found.notes, *_of_pool(spec, found)]
    data = {
        **as_data(found),
        "notes": remarks,
        "memory_bytes": memory,
        "measured_memory_bytes": profile["peak_rss_bytes"],
        "unlike": differences,
    }
    lines = [
        *as_text(spec, found),
        *plain(
            f"memory: at most {size(memory)} for models, microbatch, cache and libraries; the measured run used "
            f"{size(profile['peak_rss_bytes'])}"
        ),
        *notes((*(f"warning: {difference}" for difference in differences), *remarks)),
    ]
    return result(data, lines, sheet.figures, explain=explain)


def _of_cluster(spec: RunSpec, found: ClusterForecast, placed: Sequence[str], *, explain: bool) -> Result:
    sheet = Derivation()
    derive(found.forecast, sheet)
    remarks = [*placed, *found.forecast.notes, *_of_pool(spec, found.forecast)]
    dedicated = found.plan.best.placement.dedicated
    receivers = counted(math.ceil(dedicated.machines), "machine")
    slowest = min((engine.offer.machine.network_bytes_per_s for engine, _ in dedicated.engines), default=0.0)
    pulled = f"new weights reach {receivers} in {took(found.plan.best.pull_s)}, over {8e-9 * slowest:,.0f} Gbit/s"
    # With shards the memory of every role is among the remarks.
    one_rank = spec.trainer.shards == 1
    memory = {"memory_bytes": found.bytes_per_gpu, "usable_bytes": found.usable_bytes} if one_rank else {}
    shown = f"memory: {size(found.bytes_per_gpu)} of {size(found.usable_bytes)} per training GPU, without engines"
    data = {
        **as_data(found.forecast),
        "notes": remarks,
        **memory,
        "placement": estimate_data(found.plan.best),
    }
    lines = [
        *as_text(spec, found.forecast),
        *plain(f"placement: {found.plan.best.placement.description}"),
        *plain(*([pulled] if dedicated.engines else [])),
        *plain(*([shown] if one_rank else [])),
        *notes(remarks),
    ]
    return result(data, lines, (*sheet.figures, *found.plan.figures), explain=explain)


def _of_pool(spec: RunSpec, found: Forecast) -> list[str]:
    """The span and mean of a trace, and a warning if the forecast run outlasts it."""
    return [*trace_remarks(spec.pool), *trace_outlasted(spec.pool, found.total_s.mean)]


def as_data(found: Forecast) -> dict[str, Any]:
    return {name: value for name, value in msgspec.to_builtins(found).items() if name != "format"}


def as_text(spec: RunSpec, found: Forecast) -> Iterator[RenderableType]:
    """Total and step time and their parts."""
    cost = f", {dollars(found.cost_usd)}" if found.cost_usd else ""
    yield from plain(f"{spec.run.name}: {counted(found.steps, 'step')} in {between(found.total_s)}{cost}")
    first = found.step_s[0].mean
    yield from plain(
        f"a step takes {between(found.usual_step_s)}, the first {took(first)}; {found.tokens_per_s:,.0f} tokens/s"
    )
    step_s = found.usual_step_s.mean
    rows = [(name, took(seconds), percent(seconds / step_s)) for name, seconds in found.split_s.items()]
    yield table(("of a step, the trainer", "", ""), rows)
    yield from plain(f"its samples are generated in {took(found.generating_s)}")
    extra = ", ".join(f"{name} {duration(seconds)}" for name, seconds in found.outside_steps_s.items() if seconds)
    yield from plain(*([f"in addition to the steps: {extra}"] if extra else []))
    yield from plain(f"from {found.profile}; {counted(found.seeds, 'simulation')}")


def between(spread: Spread) -> str:
    """`12:03 (11:40 to 12:30)`"""
    return f"{took(spread.mean)} ({took(spread.low)} to {took(spread.high)})"


def took(seconds: float) -> str:
    """`0.382 s`, `12 s`, `2:31`."""
    return f"{seconds:.3g} s" if seconds < 10 else duration(seconds)
