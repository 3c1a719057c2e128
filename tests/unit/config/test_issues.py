from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tests.config_issues import issues_of
from tests.pretend_stages import pipeline
from tidemill.config.issues import (
    ConfigError,
    default_task_remark,
    purpose_issues,
    refuse_untrainable,
    shown_value,
    without_effect,
)
from tidemill.config.learning import BatchConfig
from tidemill.config.load import load_spec
from tidemill.config.model import CharModelConfig, ModelConfig
from tidemill.config.pipeline import load_recipe
from tidemill.config.schema import EvalConfig, RunSpec, SamplingConfig
from tidemill.config.task import RewardConfig, ScoringConfig
from tidemill.pipeline.execution import plan_pipeline


def test_values_are_shown_without_the_credentials_of_a_url() -> None:
    assert shown_value({"url": "http://me:hush@host/score"}) == '{"url": "http://...@host/score"}'
    assert shown_value("https://host/a@b") == '"https://host/a@b"'


@pytest.mark.parametrize(
    ("spec", "key", "what", "hint"),
    [
        (RunSpec(sampling=SamplingConfig(top_p=0.9)), "sampling.top_p", "importance ratios", "sampling.top_p = 1"),
        (RunSpec(sampling=SamplingConfig(top_k=1)), "sampling.top_k", "importance ratios", "sampling.top_k = 0"),
        (RunSpec(sampling=SamplingConfig(temperature=0)), "sampling.temperature", "greedy", "above 0"),
        (
            RunSpec(batch=BatchConfig(microbatch_tokens=63), sampling=SamplingConfig(max_new_tokens=64)),
            "batch.microbatch_tokens",
            "sampling.max_new_tokens = 64",
            "raise batch.microbatch_tokens",
        ),
        (
            RunSpec(scoring=ScoringConfig(rewards=(RewardConfig(kind="exact", weight=0),))),
            "scoring.rewards",
            "every weight is 0",
            "weight",
        ),
    ],
)
def test_training_refuses(spec: RunSpec, key: str, what: str, hint: str) -> None:
    (issue,) = issues_of(lambda: refuse_untrainable(spec))
    assert issue.key == key
    assert what in issue.what
    assert hint in issue.hint
    for purpose in ("generate", "eval", "read"):
        assert list(purpose_issues(spec, purpose)) == []


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"runtime": "inprocess"}, 'trainer.shards = 2 needs runtime = "ray"'),
        ({"algorithm": {"name": "ppo"}, "placement": {"critic": "actor", "actor_gpus": 2}}, "a shard of the critic"),
        ({"reading": {"ahead": True}, "algorithm": {"kl_beta": 0.1}}, "reading.ahead"),
        ({"ray": {"trainer_gpus": 0.5}}, "ray.trainer_gpus = 0.5"),
        ({"ray": {"trainer_gpus": 2}}, "ray.trainer_gpus = 2"),
        ({"trainer": {"shards": 2, "offload": "optimizer"}}, "shards have none"),
        ({"trainer": {"shards": 1, "offload": "optimizer"}}, "needs trainer.shards above 1"),
    ],
)
def test_what_shards_cannot_do_is_refused(changed: dict[str, Any], what: str) -> None:
    given = {"runtime": "ray", "trainer": {"shards": 2}, **changed}
    with pytest.raises(ValidationError) as refused:
        RunSpec.model_validate(given)
    assert what in str(refused.value)


VLLM_SCORING = {"reference": "actor", "scoring_engine": "vllm"}


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"placement": {"reference": "actor", "actor_tensor_parallel": 2}}, "actor_tensor_parallel = 2 needs vLLM"),
        ({"placement": VLLM_SCORING, "reading": {"ahead": True}}, "vLLM scores finished samples only"),
        ({"placement": VLLM_SCORING, "engine": {"batch_invariant": True}}, "on the samples of a pass"),
        ({"placement": VLLM_SCORING | {"actor_gpus": 0.5}}, "a rank uses one GPU or none"),
    ],
)
def test_what_vllm_cannot_score_is_refused(changed: dict[str, Any], what: str) -> None:
    given = {"runtime": "ray", "algorithm": {"kl_beta": 0.1}, "trainer": {"shards": 2}}
    RunSpec.model_validate(given | {"placement": VLLM_SCORING | {"actor_tensor_parallel": 2, "actor_gpus": 1}})
    RunSpec.model_validate(given | {"placement": {"reference": "actor"}, "reading": {"ahead": True}})
    with pytest.raises(ValidationError) as refused:
        RunSpec.model_validate(given | changed)
    assert what in str(refused.value)


ONE_WORKER = {"kind": "static", "workers": 1}
RAY_OWN = {"runtime": "ray", "placement": {"engine": "own"}, "weights": {"lane": "collective"}}


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"placement": {"engine": "own"}}, 'placement.engine = "own" needs runtime = "ray"'),
        ({"placement": {"engine": "colocated"}, "schedule": {"max_policy_lag": 1}}, "trainer and engine take turns"),
        ({"engine": {"kind": "vllm"}}, 'placement.engine = "colocated" without a pool'),
        (
            {
                "runtime": "ray",
                "engine": {"kind": "vllm", "batch_invariant": True},
                "placement": {"engine": "colocated"},
            },
            "ray.trainer_gpus",
        ),
        (
            {
                "engine": {"kind": "vllm"},
                "placement": {"engine": "colocated"},
                "pool": {"kind": "static", "workers": 1},
            },
            'engine.kind = "vllm" needs runtime = "ray"',
        ),
        ({"runtime": "ray", "weights": {"lane": "collective"}}, "preemptible workers always pull"),
        ({**RAY_OWN, "placement": {"engine": "colocated"}}, "in a process of its own, and there is none"),
        ({**RAY_OWN, "model": {"lora": {"rank": 4}}}, "adapters are small"),
        ({**RAY_OWN, "schedule": {"max_policy_lag": 1, "unfinished": "finish"}}, "a version is sent when it is new"),
    ],
)
def test_what_places_and_lanes_of_engines_cannot_do_is_refused(given: dict[str, Any], what: str) -> None:
    with pytest.raises(ValidationError) as refused:
        RunSpec.model_validate(given)
    assert what in str(refused.value)


@pytest.mark.parametrize(
    "given",
    [
        {"engine": {"kind": "vllm"}, "placement": {"engine": "colocated"}},
        {"runtime": "ray", "engine": {"kind": "vllm"}, "placement": {"engine": "own"}},
        RAY_OWN,
        {
            "runtime": "ray",
            "trainer": {"shards": 2},
            "weights": {"lane": "collective"},
            "pool": {"kind": "static", "workers": 2},
        },
    ],
)
def test_places_and_lanes_of_engines_that_are_possible(given: dict[str, Any]) -> None:
    RunSpec.model_validate(given)


def test_a_completion_must_leave_room_for_a_prompt_in_the_char_model() -> None:
    model = ModelConfig(source="char", char=CharModelConfig(context=64))
    full = RunSpec(model=model, sampling=SamplingConfig(max_new_tokens=64))
    room = RunSpec(model=model, sampling=SamplingConfig(max_new_tokens=63), eval=EvalConfig(max_new_tokens=64))
    assert [issue.key for issue in purpose_issues(full, "generate")] == ["sampling.max_new_tokens"]
    assert list(purpose_issues(room, "generate")) == []
    assert [issue.key for issue in purpose_issues(room, "eval")] == ["eval.max_new_tokens"]
    other = RunSpec(model=ModelConfig(char=CharModelConfig(context=64)), sampling=SamplingConfig(max_new_tokens=64))
    assert list(purpose_issues(other, "train")) == []  # the context of other models is not known here


def test_the_default_run_trains() -> None:
    refuse_untrainable(RunSpec())


def test_samples_for_pass_at_k_must_differ() -> None:
    greedy = SamplingConfig(temperature=0)
    (issue,) = purpose_issues(RunSpec(sampling=greedy, eval=EvalConfig(samples_per_prompt=4)), "eval")
    assert issue.key == "sampling.temperature"
    assert "4 samples" in issue.what
    assert list(purpose_issues(RunSpec(sampling=greedy), "eval")) == []


MODEL = '--scoring.rewards=[{kind="model", model="./m"}]'
SETTINGS: list[tuple[list[str], list[str]]] = [  # settings without effect, and what activates them
    (["--schedule.fresh_fraction=0.5"], ["--schedule.max_policy_lag=1"]),
    (["--schedule.membership=first_finished", "--schedule.unfinished=restart"], ["--schedule.max_policy_lag=1"]),
    (["--schedule.keep_cache=true"], ["--schedule.max_policy_lag=1"]),
    (
        ["--schedule.keep_cache=true", "--schedule.max_policy_lag=1", "--schedule.unfinished=wait"],
        ["--schedule.unfinished=continue"],
    ),
    (["--schedule.on_lag_limit=drop"], ["--schedule.max_policy_lag=1", "--schedule.membership=first_finished"]),
    (["--algorithm.max_redraws=1"], ["--algorithm.dynamic_sampling=true"]),
    (["--fleet.tail_fraction=0.2", "--fleet.size=adaptive"], ["--pool.workers=1"]),
    (["--fleet.preemptible_usd_per_hour=2"], ["--pool.kind=synthetic"]),
    (["--fleet.heartbeat_timeout_s=30"], ["--pool.workers=1", "--runtime=ray"]),
    (["--pool.kind=synthetic", "--pool.noticed=0.5"], ["--pool.notice_s=5"]),
    (["--ray.trainer_cpus=2"], ["--runtime=ray"]),
    (["--placement.actor_cpus=2"], ["--runtime=ray", "--placement.reward_model=actor", MODEL]),
    (["--placement.reward_model=actor", "--runtime=ray"], [MODEL]),
    (["--placement.reference=actor", "--runtime=ray"], ["--algorithm.kl_beta=0.1"]),
    (["--algorithm.kl_ratio=true"], ["--algorithm.kl_beta=0.1"]),
    (["--reading.ahead=true"], ["--algorithm.kl_beta=0.1"]),
    (["--reading.own_thread=true"], ["--reading.ahead=true", MODEL]),
    (["--reading.chunk_tokens=8"], ["--reading.ahead=true", MODEL]),
    (["--critic.max_grad_norm=2", "--algorithm.lam=0.9"], ["--algorithm.name=ppo"]),
    (["--critic.warmup_steps=3"], ["--algorithm.name=ppo"]),
    (["--algorithm.gamma=0.9"], ["--algorithm.name=reinforce_pp"]),
    (["--algorithm.name=cispo", "--algorithm.clip_low=0.1"], ["--algorithm.loss=ppo_clip"]),
    (["--algorithm.kl_stop=0.1"], ["--batch.epochs=2"]),
    (["--optimizer.min_learning_rate_ratio=0.5"], ["--optimizer.schedule=linear"]),
    (["--optimizer.schedule_steps=5"], ["--optimizer.schedule=cosine"]),
]


def messages(args: list[str]) -> list[str]:
    return without_effect(load_spec(args, purpose="read"))


@pytest.mark.parametrize(("idle", "needed"), SETTINGS)
def test_a_key_without_effect_is_reported_until_it_has_one(idle: list[str], needed: list[str]) -> None:
    (line,) = messages(idle)
    assert any(arg.removeprefix("--").split("=")[0] in line for arg in idle)
    assert messages([*idle, *needed]) == []


def test_keys_with_the_same_reason_share_a_message() -> None:
    (both,) = messages(["--schedule.membership=first_finished", "--schedule.unfinished=restart"])
    assert both.startswith("schedule.membership, schedule.unfinished have no effect: ")
    (one,) = messages(["--fleet.tail_fraction=0.2"])
    assert one.startswith("fleet.tail_fraction has no effect: ")


def test_values_of_a_preset_are_not_reported() -> None:
    assert messages(["--algorithm.name=ppo", "--algorithm.kl_beta=0"]) == []  # the preset sets kl_in = "reward"


def test_training_compares_no_models() -> None:
    (line,) = messages(["--eval.samples_per_prompt=4", "--eval.compare_with=char"])
    assert line.startswith("eval.compare_with has no effect: ")


@pytest.mark.parametrize(
    ("names", "key", "what"),
    [
        (("a", "b", "a"), "eval", 'two sets have the name "a"'),
        (("held_out",), "eval.sets[0]", 'name = "held_out" is reserved'),
        (("a-drawn",), "eval.sets[0]", 'name = "a-drawn" is reserved'),
        (("a/b",), "eval.sets[0]", 'name = "a/b" is not a folder name'),
    ],
)
def test_names_of_evaluation_sets(names: tuple[str, ...], key: str, what: str) -> None:
    tables = ", ".join(f'{{name = "{name}", path = "x.jsonl"}}' for name in names)
    with pytest.raises(ConfigError) as caught:
        load_spec([f"--eval.sets=[{tables}]"])
    (issue,) = caught.value.issues
    assert (issue.key, issue.what) == (key, what)
    assert issue.hint


def test_keys_without_effect_are_reported_for_training_stages(tmp_path: Path) -> None:
    recipe = (
        '[model]\nsource = "char"\n[[stage]]\nname = "one"\nkind = "rl"\nfleet.tail_fraction = 0.2\n'
        '[[stage]]\nname = "two"\nkind = "eval"\neval.samples_per_prompt = 4\n'
    )
    (message,) = plan_pipeline(pipeline(tmp_path, recipe)).unused
    assert message.startswith("stage one: fleet.tail_fraction has no effect")


@pytest.mark.parametrize(
    ("text", "remarks"),
    [
        ("[batch]\nprompts = 4\n", 1),
        ("[task]\ndigits = 2\n", 0),
        ("gateway.sessions = true\n", 0),
        ('[[stage]]\nname = "a"\nkind = "rl"\n', 1),
        ('[task]\ndigits = 2\n[[stage]]\nname = "a"\nkind = "rl"\n', 0),
    ],
)
def test_the_default_task_of_a_recipe_is_named(text: str, remarks: int, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(f'model.source = "char"\nsampling.max_new_tokens = 8\n{text}')
    recipe = load_recipe([f"@{tmp_path}/mine.toml", f"--run.dir={tmp_path}/run"])
    found = [default_task_remark(recipe)] if isinstance(recipe, RunSpec) else plan_pipeline(recipe).remarks
    assert sum("no [task] in the recipe: training the built-in arithmetic task" in each for each in found) == remarks
