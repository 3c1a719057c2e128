from __future__ import annotations

import itertools
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from tests.formulas import check_figures
from tidemill.config.processes import Processes, worker_process
from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.hardware.completion_lengths import LogNormalLengths, log_normal_of_mean
from tidemill.hardware.engine_profile import EngineProfile, generation_s, rollout_of, steady_tokens_per_s
from tidemill.hardware.engine_ranks import undivided
from tidemill.hardware.gpu_catalog import load_catalog
from tidemill.hardware.model_shape import shape_of_parameters
from tidemill.hardware.trainer_profile import TrainerProfile
from tidemill.planner.forecast.cluster_forecast import placement_question
from tidemill.planner.memory.states import Holding
from tidemill.planner.placement.estimate import (
    Engine,
    Estimate,
    Placement,
    Side,
    TooSmall,
    engines_on,
    estimate,
)
from tidemill.planner.placement.recipe import machines_of, most_workers, own_placement, run_machines
from tidemill.planner.placement.search import (
    MOST_COMBINATIONS,
    Candidates,
    counts,
    counts_tried,
    plan_of,
    plan_placement,
    warnings_on,
)
from tidemill.planner.placement.training import (
    Group,
    Offer,
    PlacementQuestion,
    TooLarge,
    Training,
    best_training,
    memory_question,
)

CATALOG = load_catalog()


def offer(name: str, count: int, *, preemptible: bool = False, availability: float = 1.0) -> Offer:
    machine = CATALOG.machine(name)
    gpu = CATALOG.gpu(machine.gpu)
    return Offer(machine=machine, gpu=gpu, count=count, preemptible=preemptible, availability=availability)


TWO = offer("rlboost-8xh100", 2)
RESERVED, SPOT = offer("rlboost-8xh100", 1), offer("rlboost-2xh100", 4, preemptible=True)
REASONING = rollout_of(log_normal_of_mean(4000, sigma=0.8, limit=14_000), samples=1024, group_size=8, prompt_tokens=512)
QUESTION = PlacementQuestion(
    algorithm="grpo",
    shape=shape_of_parameters(14e9),
    offers=(RESERVED, SPOT),
    rollout=REASONING,
    longest=14_512,
)

# By hand: 100 samples of 10 tokens; an engine makes 100 tokens a second whatever runs, learning takes 8 s.
EVEN = EngineProfile(
    slots=1000,
    cache_tokens=1e12,
    step_s=0.0,
    weights_s=0.0,
    cached_token_s=0.0,
    sample_s=0.01,
    attended_token_s=0.0,
    prefill_token_s=0.0,
)
PLAIN = msgspec.structs.replace(
    QUESTION,
    rollout=rollout_of(LogNormalLengths(median=10, sigma=0.0, limit=10), samples=100, group_size=10, prompt_tokens=0.0),
)
TRAINING = Training(
    group=Group(members=((RESERVED, 1),)),
    profile=TrainerProfile(gpus=8, ranks=8, token_s=1, pair_s=0, gather_s=0, update_s=0, hidden=1),
    seconds=8.0,
    held_per_gpu=0.0,
)


def best_engine(
    question: PlacementQuestion, of: Offer, *, samples_per_gpu: float, held_per_gpu: float = 0.0
) -> Engine | TooSmall:
    """The engine that takes the shortest time for its share of a batch."""
    found = engines_on(question, of, held_per_gpu=held_per_gpu)
    if isinstance(found, TooSmall):
        return found

    def share_s(engine: Engine) -> float:
        """Time for the engine's share of a batch; at lag 0 it includes the tail."""
        samples, rollout = samples_per_gpu * engine.gpus, question.rollout
        if question.lag == 0:
            return generation_s(engine.profile, rollout, samples)
        return samples / steady_tokens_per_s(engine.profile, rollout, samples * question.lag)

    return min(found.values(), key=share_s)


def side(of: Offer, machines: float) -> Side:
    return Side(
        engines=((Engine(offer=of, gpus=of.machine.gpus, profile=EVEN, fewest_gpus=1, smallest=EVEN), machines),)
    )


def by_hand(lag: int = 0, *, shared: bool, dedicated: float) -> Estimate:
    placement = Placement(
        training=TRAINING,
        shared=side(RESERVED, 1) if shared else Side(),
        dedicated=side(SPOT, dedicated) if dedicated else Side(),
    )
    return estimate(msgspec.structs.replace(PLAIN, lag=lag), placement)


PULL_S = 28e9 / 6.25e9 + 50e-6  # 14e9 parameters in bf16 over 50 Gbit/s
"""The trainer's 200 Gbit/s feed four such machines at once."""


def test_colocated_generates_then_learns() -> None:
    # 1000 tokens at 100 a second: 10 s, then 8 s
    found = by_hand(shared=True, dedicated=0)
    assert found.placement.kind == "colocated"
    assert found.step_s == pytest.approx(18.0)
    assert found.seeding_s == pytest.approx(10.0)
    assert found.trainer_idle == 0
    assert found.tokens_per_s == pytest.approx(1000 / 18)
    # 83.79 dollars an hour for 18 s and 1000 tokens
    assert found.usd_per_million == pytest.approx(83.79 * 18 / 3600 / 1000 * 1e6)


def test_split_learns_while_the_last_samples_come() -> None:
    # 5 s for 1000 tokens at 200 a second; learning starts after a tenth, 0.5 s, and is longer: 8.5 s, and a pull
    found = by_hand(shared=False, dedicated=2)
    assert found.placement.kind == "split"
    assert found.pull_s == pytest.approx(PULL_S)
    assert found.step_s == pytest.approx(8.5 + PULL_S)
    assert found.dedicated_idle == pytest.approx(1 - 5 / (8.5 + PULL_S))
    # at 50 a second 20 s, and the last tenth of learning, 0.8 s
    assert by_hand(shared=False, dedicated=0.5).step_s == pytest.approx(20.8 + PULL_S)


def test_whitened_advantages_wait_for_the_whole_batch() -> None:
    # 1000 tokens at 200 a second, and then 8 s; with a shared side all generate at once: 1000 / 200
    ppo = msgspec.structs.replace(PLAIN, algorithm="ppo")
    split = estimate(ppo, Placement(training=TRAINING, dedicated=side(SPOT, 2)))
    assert split.step_s == pytest.approx(5 + 8 + PULL_S)
    hybrid = estimate(ppo, Placement(training=TRAINING, shared=side(RESERVED, 1), dedicated=side(SPOT, 1)))
    assert hybrid.seeding_s == hybrid.generation_s == pytest.approx(5.0)
    assert hybrid.step_s == pytest.approx(5 + 8 + PULL_S)


def test_hybrid_seeds_until_neither_side_waits() -> None:
    # 100 + 100 tokens a second: t_seed 100 + t_gen 100 = 1000 with t_gen = t_seed + 7.2: 1.4 s of seeding; the step is
    # that and 8 s
    found = by_hand(shared=True, dedicated=1)
    assert found.placement.kind == "hybrid"
    assert found.seeding_s == pytest.approx(1.4)
    assert found.generation_s == pytest.approx(8.6)
    assert found.step_s == pytest.approx(9.4 + PULL_S)
    # with 300 a second the others alone are done in 3.3 s: no seeding
    assert by_hand(shared=True, dedicated=3).seeding_s == 0


def test_with_a_lag_the_longer_side_sets_the_step() -> None:
    # split: 1000 / 200 = 5 s against 8; 1000 / 50 = 20 against 8; the pull (4.48 s) hides
    assert by_hand(1, shared=False, dedicated=2).step_s == pytest.approx(8.0)
    assert by_hand(1, shared=False, dedicated=2).dedicated_idle == pytest.approx(1 - 5 / 8)
    assert by_hand(1, shared=False, dedicated=0.5).step_s == pytest.approx(20.0)
    assert by_hand(1, shared=False, dedicated=0.5).trainer_idle == pytest.approx(0.6)
    # hybrid: (1000 + 100 * 8) / 150 = 12 s, of which 4 generating
    found = by_hand(1, shared=True, dedicated=0.5)
    assert found.step_s == pytest.approx(12.0)
    assert found.seeding_s == pytest.approx(4.0)
    # colocated: as in sequence
    assert by_hand(1, shared=True, dedicated=0).step_s == pytest.approx(18.0)


def test_many_pull_from_one_trainer() -> None:
    # six machines of 50 Gbit/s ask for 300, and the trainer has 200: 28e9 * 6 / 25e9
    placement = Placement(training=TRAINING, dedicated=side(SPOT, 6))
    assert estimate(PLAIN, placement).pull_s == pytest.approx(28e9 * 6 / 25e9, rel=1e-4)


def test_only_machines_that_are_there_are_paid_for() -> None:
    half = side(offer("rlboost-2xh100", 4, preemptible=True, availability=0.5), 2.0)
    assert half.usd_per_hour == pytest.approx(2 * 5.32)


def test_the_search_finds_the_cheapest_of_all() -> None:
    plan = plan_placement(QUESTION)
    found = [estimate(QUESTION, placement) for placement in Candidates(QUESTION)]
    # colocated; hybrid with 1 to 4; split with 1 to 4, whose engines have 1 or 2 GPUs; without other machines 1 to 3
    # engines of 1 GPU, or one of 2, beside the trainer
    assert plan.tried == len(found) == 1 + 4 + 4 * 2 + 4
    assert plan.best.usd_per_million == min(each.usd_per_million for each in found)
    assert {each.placement.kind for each in (plan.best, *plan.runners_up)} == {"colocated", "split", "hybrid"}
    assert len(plan.why) == len(plan.runners_up)
    assert all("dearer" in line or "as dear" in line for line in plan.why)


def test_the_shortest_time_within_a_budget() -> None:
    fast = msgspec.structs.replace(QUESTION, objective="time", budget_usd=1e6)
    cheapest, fastest = plan_placement(QUESTION).best, plan_placement(fast).best
    assert fastest.step_s <= cheapest.step_s
    found = [estimate(QUESTION, placement) for placement in Candidates(QUESTION)]
    assert fastest.step_s == min(each.step_s for each in found)
    tight = msgspec.structs.replace(fast, budget_usd=cheapest.usd * 1.001)
    assert plan_placement(tight).best.usd == pytest.approx(cheapest.usd)
    with pytest.raises(UserError, match="no placement trains 100 steps") as caught:
        plan_placement(msgspec.structs.replace(fast, budget_usd=cheapest.usd - 1))
    assert "$1.00 more" in caught.value.hint


@pytest.mark.parametrize("lag", [0, 1])
def test_every_number_equals_its_formula(lag: int) -> None:
    assert check_figures(plan_placement(msgspec.structs.replace(QUESTION, lag=lag)).figures) >= 8


def test_a_model_that_fits_nowhere_names_the_missing_memory() -> None:
    # GRPO on 70e9: 18 * 70e9 / 8 = 157.5 GB of states on each of 8 GPUs that can use 72
    large = msgspec.structs.replace(QUESTION, shape=shape_of_parameters(70e9))
    with pytest.raises(UserError, match="fits no placement") as caught:
        plan_placement(large)
    assert "1 × rlboost-8xh100" in caught.value.what
    assert "GPUs; or --offload, --lora-rank" in caught.value.hint


def test_a_machine_that_holds_no_engine() -> None:
    # 70e9 in bf16 are 140 GB; two H100 give an engine 2 * (0.9 * 80 - 2) = 140 GB: only the longest sample is missing,
    # 14,512 tokens of 79 layers * 2 * 8 * 128 * 2 bytes
    large = msgspec.structs.replace(QUESTION, shape=shape_of_parameters(70e9))
    found = best_engine(large, SPOT, samples_per_gpu=10)
    assert isinstance(found, TooSmall)
    assert found.missing_bytes == found.missing_alone == pytest.approx(14_512 * 79 * 4096)


def test_an_engine_is_divided_only_as_the_heads_are() -> None:
    # 9 heads: one GPU an engine, 0.9 * 80 - 2 = 70 GB; 80 GB of weights
    odd = msgspec.structs.replace(shape_of_parameters(40e9), heads=9)
    found = best_engine(msgspec.structs.replace(QUESTION, shape=odd), RESERVED, samples_per_gpu=10)
    assert isinstance(found, TooSmall)
    assert found.missing_bytes == pytest.approx(10e9 + 14_512 * odd.kv_bytes_per_token())


def test_a_model_that_trains_but_generates_nowhere() -> None:
    # an adapter on 400e9 frozen parameters: 800 GB over 64 GPUs; one machine of 8 * 70 GB holds no such engine in bf16,
    # but one of 400 GB in fp8
    question = msgspec.structs.replace(
        QUESTION,
        shape=shape_of_parameters(400e9),
        offers=(offer("rlboost-8xh100", 8),),
        holding=Holding(lora_rank=8),
        microbatch_tokens=2048,
        longest=4096,
    )
    with pytest.raises(UserError, match="one rlboost-8xh100 lacks") as caught:
        plan_placement(question)
    assert "--engine-dtype fp8" in caught.value.hint
    plan = plan_placement(msgspec.structs.replace(question, engine_dtype="fp8"))
    assert any("does not run engines in fp8" in line for line in plan.warnings)


@pytest.mark.parametrize(("recipe", "megabytes"), [({}, 2048), ({"trainer": {"logits_budget_mb": 256}}, 256)])
def test_training_holds_the_logits_of_its_budget(recipe: dict[str, Any], megabytes: int) -> None:
    lengths = log_normal_of_mean(4000, sigma=0.8, limit=14_000)
    question = placement_question(RunSpec.model_validate(recipe), QUESTION.shape, QUESTION.offers, lengths, 512)
    logits = memory_question(question, TRAINING.group).load.logits_budget
    assert logits == megabytes * 1_048_576
    assert recipe or logits == memory_question(QUESTION, TRAINING.group).load.logits_budget


def test_engines_use_what_training_leaves() -> None:
    alone = best_engine(QUESTION, RESERVED, samples_per_gpu=10)
    beside = best_engine(QUESTION, RESERVED, samples_per_gpu=10, held_per_gpu=30e9)
    assert isinstance(alone, Engine)
    assert isinstance(beside, Engine)
    assert beside.profile.cache_tokens / beside.gpus < alone.profile.cache_tokens / alone.gpus


def test_kinds_of_gpus_are_not_mixed_in_training() -> None:
    # 18 * 34e9 bytes are 76.5 GB on each of 8 GPUs that can use 72, and 43.7 on each of 14, beside an engine of two
    shape = shape_of_parameters(34e9)
    other = msgspec.structs.replace(QUESTION, shape=shape, offers=(RESERVED, offer("aws-p4de.24xlarge", 1)))
    with pytest.raises(UserError, match="fits no placement"):
        plan_placement(other)
    equal = msgspec.structs.replace(QUESTION, shape=shape, offers=(RESERVED, offer("aws-p5.48xlarge", 1)))
    group = plan_placement(equal).best.placement.training.group
    assert [each.name for each, _ in group.members] == ["rlboost-8xh100", "aws-p5.48xlarge"]
    assert group.network.bytes_per_s == 25e9


def test_only_what_a_run_can_place_is_offered() -> None:
    """Ranks of FSDP; a reserved engine apart, or an engine on each rank's GPU at lag 0; engines of one size."""
    for algorithm, lag, heads in itertools.product(("grpo", "ppo"), (0, 2), (40, 36)):
        shape = msgspec.structs.replace(shape_of_parameters(8e9), heads=heads, kv_heads=heads // 4)
        changes = {"algorithm": algorithm, "lag": lag, "shape": shape, "offers": (offer("rlboost-8xh100", 2), SPOT)}
        kinds = set[str]()
        for placement in Candidates(msgspec.structs.replace(QUESTION, **changes)):
            kinds.add(placement.kind)
            group = placement.training.group
            engines = [engine for engine, _ in (*placement.shared.engines, *placement.dedicated.engines)]
            (gpus,) = {engine.gpus for engine in engines}
            reserved = [engine for engine in engines if engine.offer.included]
            assert not undivided(shape, gpus) and all(gpus <= engine.offer.machine.gpus for engine in engines)
            assert len(reserved) == (0 if placement.shared.engines else 1)
            own = sum(
                round(each.per_machine * count) for each, count in placement.dedicated.engines if each in reserved
            )
            assert own == len(reserved) or not placement.dedicated.workers
            assert gpus == 1 or not placement.shared.engines
            reward = 1 if algorithm == "ppo" else 0
            assert group.gpus == group.all_gpus - reward - own * gpus
            # The reserved engine costs nothing in addition.
            workers = sum(engine.offer.usd_per_hour * count for engine, count in placement.dedicated.workers)
            assert placement.usd_per_hour == group.usd_per_hour + workers
        assert kinds == ({"split"} if lag else {"colocated", "split", "hybrid"})


@pytest.mark.parametrize("lag", [0, 1])
def test_the_keys_of_a_placement_are_a_recipe_with_this_placement(lag: int) -> None:
    question = msgspec.structs.replace(QUESTION, lag=lag, shape=shape_of_parameters(30e9), offers=(TWO, SPOT))
    plan = plan_placement(question)
    tree: dict[str, Any] = {"ray": {"address": "auto"}}
    for key, value in plan.keys.items():
        section, _, name = key.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[name] = value
    spec = RunSpec.model_validate(tree)
    group, workers = plan.best.placement.training.group, plan.best.placement.dedicated.workers
    assert plan.best.placement.kind == "split"
    assert spec.trainer.shards == group.gpus and group.all_gpus == 16
    assert worker_process(spec).gpus == spec.engine.tensor_parallel == 2
    assert most_workers(spec) == sum(engine.per_machine * count for engine, count in workers)
    reserved, spot = run_machines(spec, reserved_gpus=8, worker_gpus=2)
    assert reserved == [{"trainer": 8}, {"trainer": 6, "reserved engine": 1}]
    assert spot == [{"worker": 1}] * most_workers(spec)
    # The same placement is planned for the recipe.
    again = plan_of(question, own_placement(spec, question)).best
    assert again.step_s == plan.best.step_s
    assert again.placement.usd_per_hour == plan.best.placement.usd_per_hour


def test_processes_are_placed_whole() -> None:
    three = Processes("engine", 3, 1.0, 3.0, "ray.worker")
    assert machines_of([three, Processes("reference", 1, 1.0, 2.0, "placement.actor")], 8) == [
        {"engine": 2, "reference": 1},
        {"engine": 1},
    ]
    with pytest.raises(UserError, match="the engine needs 3 GPUs of one machine, and the largest has 2"):
        machines_of([three], 2)


def test_weak_links_and_prices_to_check_are_warned_of() -> None:
    question = msgspec.structs.replace(
        QUESTION, offers=(offer("aws-g6e.48xlarge", 4),), shape=shape_of_parameters(14e9), lag=1
    )
    plan = plan_placement(question)
    assert any("PCIe 4.0 x16 (32 GB/s)" in line for line in plan.warnings)
    assert any(line.startswith("price of aws-g6e.48xlarge: ") for line in plan.warnings)


def test_idle_machines_and_slow_pulls_are_warned_of() -> None:
    best = plan_placement(QUESTION).best
    step_s = best.step_s
    busy = msgspec.structs.replace(best, exposed_pull_s=0.0, trainer_idle=0.0, dedicated_idle=0.0)
    slow = msgspec.structs.replace(best, exposed_pull_s=0.5 * step_s, trainer_idle=0.3, dedicated_idle=0.4)
    added = [line for line in warnings_on(QUESTION, slow) if line not in set(warnings_on(QUESTION, busy))]
    assert len(added) == 3
    for line, share in zip(added, ("50", "30", "40"), strict=True):
        assert f"{share} %" in line


def test_the_largest_group_fits_where_smaller_ones_do_not() -> None:
    small = best_training(QUESTION, Group(members=((offer("aws-p4d.24xlarge-block", 1), 1),)))
    large = best_training(QUESTION, Group(members=((offer("aws-p4d.24xlarge-block", 4), 4),)))
    assert isinstance(small, TooLarge)
    assert small.missing_per_gpu > 0
    assert isinstance(large, Training)


def test_numbers_of_machines_are_thinned_out() -> None:
    assert counts(3, 12) == [1, 2, 3]
    # 64 to the powers of 0, 1/3, 2/3 and 1
    assert counts(64, 4) == [1, 4, 16, 64]
    assert counts(200, 2) == [1, 200]
    assert all(counts(most, 12)[0] == 1 and counts(most, 12)[-1] == most for most in (13, 129, 130, 100_000))
    assert len(counts(200, 12)) <= 12


@pytest.mark.parametrize("lag", [0, 1])
def test_offers_of_more_machines_have_no_dearer_best(lag: int) -> None:
    def dearness(reserved: int, preemptible: int) -> float:
        offers = (offer("rlboost-8xh100", reserved), offer("rlboost-2xh100", preemptible, preemptible=True))
        question = msgspec.structs.replace(QUESTION, offers=offers[: 2 if preemptible else 1], lag=lag)
        return plan_placement(question).best.usd_per_million

    # The best has 7 preemptible machines at lag 0 and 5 at lag 1: numbers that are not tried of 24, 129 or 100,000.
    for offered in (((1, 0), (129, 0), (130, 0), (100_000, 0)), ((1, 12), (1, 24), (13, 129), (130, 100_000))):
        costs = [dearness(*numbers) for numbers in offered]
        assert all(more <= less * (1 + 1e-9) for less, more in pairwise(costs))


def test_one_machine_of_a_kind_is_tried_however_many_kinds_there_are() -> None:
    names = [name for name, machine in CATALOG.machines.items() if machine.usd_per_hour]
    alone = [msgspec.structs.replace(QUESTION, offers=(offer(name, 1),)) for name in names]
    fitting = [question for question in alone if list(Candidates(question))]
    together = msgspec.structs.replace(QUESTION, offers=tuple(offer(name, 4) for name in names))
    best = plan_placement(together).best.usd_per_million
    assert best <= min(plan_placement(question).best.usd_per_million for question in fitting)


def test_many_kinds_of_many_machines_are_still_few_placements() -> None:
    names = ("aws-p5.48xlarge", "aws-p4d.24xlarge-block", "aws-p4de.24xlarge", "rlboost-8xh100", "aws-g6e.48xlarge")
    offers = tuple(offer(name, 64) for name in names)
    question = msgspec.structs.replace(QUESTION, offers=(*offers, SPOT))
    assert counts_tried(question) < 12
    machines = {
        (
            placement.kind,
            tuple((each.name, count) for each, count in placement.training.group.members),
            tuple((engine.offer.description, number) for engine, number in placement.dedicated.workers),
        )
        for placement in Candidates(question)
    }
    assert 100 < len(machines) <= MOST_COMBINATIONS
    assert counts_tried(QUESTION) == 12


@pytest.mark.parametrize(
    ("changes", "where", "what"),
    [
        ({"algorithm": "sft"}, "--algorithm", "sft"),
        ({"offers": (SPOT,)}, "--machines", "no reserved machines"),
        ({"offers": (offer("rlboost-2xh100", 1),)}, "--machines rlboost-2xh100", "price"),
        ({"offers": (RESERVED, RESERVED)}, "--machines", "rlboost-8xh100 is given twice"),
        ({"offers": (offer("rlboost-8xh100", 0),)}, "--machines rlboost-8xh100", "0"),
        ({"lag": -1}, "--lag", ""),
        ({"steps": 0}, "--steps", ""),
        ({"budget_usd": 0.0}, "--budget-usd", "0"),
        ({"objective": "time"}, "--objective time", "budget"),
        ({"offers": (RESERVED, offer("rlboost-2xh100", 1, preemptible=True, availability=0.0))}, "--availability", "0"),
    ],
)
def test_an_invalid_question_is_refused(changes: dict[str, object], where: str, what: str) -> None:
    with pytest.raises(UserError) as caught:
        plan_placement(msgspec.structs.replace(QUESTION, **changes))
    assert caught.value.where == where
    assert what in caught.value.what
    assert caught.value.hint
