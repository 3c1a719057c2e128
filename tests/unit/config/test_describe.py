from __future__ import annotations

import pytest

from tidemill.config.describe import describe, topics
from tidemill.config.load import load_spec
from tidemill.config.schema import RunSpec


def said(*args: str, topic: str) -> list[str]:
    return [words for name, words in topics(load_spec(args)) if name == topic]


def test_the_default_run_in_words() -> None:
    assert describe(RunSpec()).splitlines() == [
        "model       smollm2-135m; bf16 autocast on a GPU, fp32 else",
        "task        arithmetic: + on numbers of 1 digit, 2 worked examples; reward = exact",
        "step        8 prompts × 8 samples = 64 samples per step, all decoded at once",
        "algorithm   grpo: advantage grpo; loss ppo_clip, mean by sample; correction tis",
        (
            "learning    1 epoch × 1 minibatch = 1 optimizer step per batch, each from 64 samples; "
            "learning rate 1e-05, constant, 0 warm-up steps"
        ),
        # 8 × (18 + 8 × 64) = 4240 tokens; three groups fit into 2048 with 458 to spare: 3 whole, then by samples
        (
            "microbatch  up to 2,048 packed tokens, a group's prompt counted once: about 3 microbatches "
            "per optimizer step (prompts of about 18 tokens and completions at their limit)"
        ),
        "tokens      64 samples × 64 new tokens = at most 4,096 completion tokens per step",
        (
            "run         20 steps: 20 optimizer steps, 1,280 samples, at most 81,920 tokens generated "
            "and 81,920 trained on"
        ),
        (
            "evaluation  5 times (before, every 5 steps and after the last) × at most 64 held-out prompts, "
            "64 new tokens each at most, greedily: at most 20,480 tokens in all"
        ),
        "checkpoint  every 10 steps and at the end: 2 written, the last 2 and the best kept, about 1.6 GB each",
        "directory   runs/run; the same command again resumes it",
    ]


def test_other_tasks_models_and_rewards() -> None:
    assert said("--task.kind=jsonl", "--task.path=/x.jsonl", topic="task") == ["jsonl: /x.jsonl; reward = exact"]
    rewards = '--scoring.rewards=[{kind="exact"}, {kind="length", target_tokens=5, weight=0.5}]'
    assert said("--task.kind=reasoning_gym", "--task.name=sums", rewards, topic="task") == [
        "reasoning-gym sums: 1,000 training prompts; reward = exact + 0.5 × length"
    ]
    assert said("--task.digits=2", "--task.operators=+*", "--task.shots=1", topic="task") == [
        "arithmetic: + * on numbers of 1 to 2 digits, 1 worked example; reward = exact"
    ]
    assert said("--model.source=a/b", "--algorithm.kl_beta=0.1", "--trainer.precision=fp32", topic="model") == [
        "a/b (a local folder or a hub id) plus a frozen copy as KL reference; fp32"
    ]
    assert said("--model.source=char", topic="checkpoint") == [
        "every 10 steps and at the end: 2 written, the last 2 and the best kept, 12 bytes per parameter each"
    ]
    assert said("--checkpoint.every_steps=0", "--checkpoint.keep_best=false", topic="checkpoint") == [
        "at the end: 1 written, the last 2 kept, about 1.6 GB each"
    ]
    assert said("--eval.every_steps=0", topic="evaluation")[0].startswith("2 times (before and after the last)")
    assert said("--engine.slots=16", topic="step")[0].endswith("decoded 16 at a time")


def test_algorithms() -> None:
    (words,) = said("--algorithm.name=ppo", "--critic.kind=shared", topic="algorithm")
    assert words == (
        "ppo: advantage gae, whitened over the batch; critic on the policy's own trunk; KL in the reward, weight 0.01; "
        "loss ppo_clip, mean by token; correction tis"
    )
    assert said("--algorithm.name=gspo", "--algorithm.clip_low=0.1", topic="algorithm")[0].endswith(
        "(not the preset's: clip_low = 0.1)"
    )
    changed = said("--algorithm.correction.kind=icepop", topic="algorithm")[0]
    assert changed.endswith("correction icepop (not the preset's: correction = icepop)")


def test_prompts_of_unknown_length() -> None:
    (words,) = said("--task.kind=jsonl", "--task.path=x", topic="microbatch")
    # 64 × 64 tokens in runs of 2048
    assert words.endswith(
        "2 microbatches for the completions alone of one optimizer step, more for the prompts "
        "(their length is known at the start)"
    )


@pytest.mark.parametrize(
    ("args", "note"),
    [
        (["--algorithm.kl_stop=0.1"], "algorithm.kl_stop never acts"),
        (["--algorithm.name=dapo"], "DAPO's penalty of overlong completions is off"),
        (["--algorithm.gamma=0.9"], "algorithm.gamma never acts"),
        (["--algorithm.proximal=rollout"], "algorithm.correction never acts"),
        (["--optimizer.warmup_steps=20"], "warm-up takes 20 of 20 optimizer steps"),
        (['--scoring.rewards=[{kind="random"}]'], "rewards are random"),
        (["--sampling.temperature=0.7"], "at temperature 0.7"),
        (["--batch.microbatch_tokens=70"], "one prompt of about 18 tokens and its completion may exceed"),
        (["--pool.kind=synthetic", "--pool.noticed=0.5"], "pool.noticed has no effect"),
        (["--pool.kind=synthetic", "--pool.noticed=0.5", "--pool.notice_s=1"], "hands its samples back at once"),
    ],
)
def test_notes(args: list[str], note: str) -> None:
    (found,) = said(*args, topic="note")
    assert note in found


def test_no_notes_without_a_reason() -> None:
    assert said(topic="note") == []
    assert said("--algorithm.kl_stop=0.1", "--batch.epochs=2", topic="note") == []


def test_evaluating_and_generating_say_less() -> None:
    spec = load_spec(["--sampling.top_k=5", "--sampling.top_p=0.5"], purpose="generate")
    assert topics(spec, purpose="generate")[1] == (
        "sampling",
        "temperature 1, top-k 5, top-p 0.5, at most 64 new tokens",
    )
    greedy = load_spec(["--sampling.temperature=0", "--sampling.max_new_tokens=1"], purpose="generate")
    assert topics(greedy, purpose="generate")[1] == ("sampling", "greedy, at most 1 new token")
    assert [topic for topic, _ in topics(spec, purpose="eval")] == ["model", "task", "evaluation"]


def generation(*args: str) -> dict[str, str]:
    return {
        name: words for name, words in topics(load_spec(args)) if name in ("workers", "notice", "seeding", "prices")
    }


def test_the_reserved_side_alone_needs_no_words_but_its_price() -> None:
    assert generation() == {}
    assert generation("--fleet.reserved_usd_per_hour=2.5", "--fleet.preemptible_usd_per_hour=1") == {
        "prices": "$2.5 an hour for the reserved side"
    }


def test_workers_that_come_and_go() -> None:
    args = ("--pool.kind=synthetic", "--pool.workers=3", "--pool.notice_s=4", "--pool.noticed=0.25")
    assert generation(*args, "--fleet.reserved_usd_per_hour=2.5", "--fleet.preemptible_usd_per_hour=0.5") == {
        "workers": (
            "3 preemptible workers; on average one is evicted after 20 s and back 5 s later; simulated in this process"
        ),
        "notice": "4 s before 25 % of evictions; samples are handed back 1 s before the end",
        "seeding": (
            "the reserved side generates too in the first 10 s of a step (this adapts), and whenever no worker is there"
        ),
        "prices": "$2.5 an hour for the reserved side, $0.5 an hour for each preemptible worker",
    }


def test_workers_of_a_trace() -> None:
    said = generation("--pool.kind=trace", "--pool.path=/t.csv", "--pool.speed=60", "--pool.start_s=90")
    assert said["workers"] == (
        "as many preemptible workers as /t.csv has from second 90, 60 times as fast, at most 8; "
        "simulated in this process"
    )
    assert said["notice"].startswith("none; samples of a worker that was taken go on elsewhere")
    announced = generation("--pool.kind=trace", "--pool.path=/t.csv", "--pool.notice_s=0.5")
    assert announced["notice"] == "0.5 s before each eviction; samples are handed back 0.5 s before the end"


def test_workers_of_a_cluster() -> None:
    said = generation("--runtime=ray", "--pool.kind=ray", "--fleet.seeding=false", "--ray.address=10.0.0.1:6379")
    assert said["workers"] == (
        "at most 64 preemptible workers, on nodes labelled ray.io/market-type=spot; "
        "Ray actors on the cluster at 10.0.0.1:6379"
    )
    assert said["notice"].startswith("as the cluster gives it")
    assert said["seeding"] == "none: the reserved side never generates, and the run waits while no worker is there"
    fixed = generation("--runtime=ray", "--pool.workers=1")
    assert fixed["workers"] == ("1 preemptible worker, there from the start; Ray actors on a cluster of this machine")
    assert "notice" not in fixed
