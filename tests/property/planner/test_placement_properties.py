"""What holds for any machines and any batch."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.formulas import check_figures
from tidemill.core.errors import UserError
from tidemill.hardware.completion_lengths import LogNormalLengths
from tidemill.hardware.engine_profile import rollout_of
from tidemill.hardware.gpu_catalog import load_catalog
from tidemill.hardware.model_shape import shape_of_parameters
from tidemill.planner.placement.estimate import estimate
from tidemill.planner.placement.search import Candidates, PlacementPlan, plan_placement
from tidemill.planner.placement.training import Offer, PlacementQuestion

CATALOG = load_catalog()
PRICED = sorted(name for name, machine in CATALOG.machines.items() if machine.usd_per_hour)


def offer(name: str, count: int, *, preemptible: bool = False, availability: float = 1.0) -> Offer:
    machine = CATALOG.machine(name)
    gpu = CATALOG.gpu(machine.gpu)
    return Offer(machine=machine, gpu=gpu, count=count, preemptible=preemptible, availability=availability)


@st.composite
def questions(draw: st.DrawFn) -> PlacementQuestion:
    limit = draw(st.sampled_from([512, 8192]))
    lengths = LogNormalLengths(median=draw(st.floats(50, limit)), sigma=draw(st.floats(0, 1.2)), limit=limit)
    reserved = draw(st.lists(st.sampled_from(PRICED), min_size=1, max_size=2, unique=True))
    spot = draw(st.integers(0, 3))
    offers = [offer(name, draw(st.integers(1, 3))) for name in reserved]
    if spot:
        share = draw(st.floats(0.1, 1.0))
        offers.append(offer("rlboost-2xh100", spot, preemptible=True, availability=share))
    samples = 8 * draw(st.integers(1, 200))
    return PlacementQuestion(
        algorithm=draw(st.sampled_from(["ppo", "grpo", "dapo"])),
        shape=shape_of_parameters(draw(st.floats(5e8, 1.5e10))),
        offers=tuple(offers),
        rollout=rollout_of(lengths, samples=samples, group_size=8, prompt_tokens=200.0),
        longest=limit + 200,
        lag=draw(st.integers(0, 3)),
    )


def planned(question: PlacementQuestion) -> PlacementPlan | None:
    try:
        return plan_placement(question)
    except UserError as error:
        if "fits no placement" in error.what or "no machine holds an engine" in error.what:
            return None
        raise


@settings(derandomize=True, deadline=None, max_examples=25)
@given(questions())
def test_every_estimate_adds_up(question: PlacementQuestion) -> None:
    for placement in Candidates(question):
        found = estimate(question, placement)
        assert found.step_s >= found.training_s * (1 - 1e-9)
        assert found.step_s >= found.seeding_s + found.training_s * (1 - 1e-9) - 1e-9
        assert 0 <= found.trainer_idle < 1
        assert 0 <= found.dedicated_idle < 1
        generated = found.shared_rate * found.seeding_s + found.dedicated_rate * found.step_s
        assert generated >= found.tokens * (1 - 1e-6)


@settings(derandomize=True, deadline=None, max_examples=25)
@given(questions())
def test_the_best_placement_is_first_and_its_figures_equal_their_formulas(question: PlacementQuestion) -> None:
    if plan := planned(question):
        costs = [each.usd_per_million for each in (plan.best, *plan.runners_up)]
        assert costs == sorted(costs)
        check_figures(plan.figures)
        check_against_profiles(question, plan)


def check_against_profiles(question: PlacementQuestion, plan: PlacementPlan) -> None:
    """The formulas give what the profiles compute, which the simulator uses."""
    figures = {figure.name: figure.value for figure in plan.figures}
    best, training = plan.best, plan.best.placement.training
    assert figures["training_s"] == training.seconds
    assert figures["forward_token_s"] == training.profile.token_s
    assert figures["attention_pair_s"] == training.profile.pair_s
    assert figures["step_s"] == best.step_s
    sides = {"shared": best.placement.shared, "dedicated": best.placement.dedicated}
    for (name, side), rate in zip(sides.items(), (best.shared_rate, best.dedicated_rate), strict=True):
        if side.engines:
            assert figures[f"{name}.tokens_per_s"] == rate
        for engine, _ in side.engines:
            label, profile, rollout = f"{name}.{engine.offer.description}", engine.profile, question.rollout
            running = profile.most_running(rollout.prompt_tokens + rollout.mean)
            assert figures[f"{label}.weights_s"] == profile.weights_s
            assert figures[f"{label}.running"] == running
            step_s = profile.decode_step_s(running, running * rollout.running_context)
            assert figures[f"{label}.decode_step_s"] == step_s


@settings(derandomize=True, deadline=None, max_examples=12)
@given(questions())
def test_more_offers_never_increase_the_cost(question: PlacementQuestion) -> None:
    more = msgspec.structs.replace(
        question, offers=tuple(msgspec.structs.replace(each, count=each.count + 1) for each in question.offers)
    )
    fewer, larger = planned(question), planned(more)
    if fewer and len(fewer.best.placement.training.group.members) == 1:  # of several kinds only all machines are tried
        assert larger is not None
        assert larger.best.usd_per_million <= fewer.best.usd_per_million * (1 + 1e-9)


@settings(derandomize=True, deadline=None, max_examples=12)
@given(questions(), st.floats(0.5, 0.99))
def test_a_cheaper_machine_never_makes_a_plan_dearer(question: PlacementQuestion, factor: float) -> None:
    def cheaper(each: Offer) -> Offer:
        prices = {
            "usd_per_hour": each.machine.usd_per_hour,
            "preemptible_usd_per_hour": each.machine.preemptible_usd_per_hour,
        }
        machine = msgspec.structs.replace(
            each.machine, **{name: price * factor for name, price in prices.items() if price}
        )
        return msgspec.structs.replace(each, machine=machine)

    plan = planned(question)
    if plan:
        less = plan_placement(msgspec.structs.replace(question, offers=tuple(map(cheaper, question.offers))))
        assert less.best.usd_per_million == pytest.approx(plan.best.usd_per_million * factor)
