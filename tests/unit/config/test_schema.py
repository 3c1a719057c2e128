"""Each cross-field check, with the hint its message names."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from tidemill.config.algorithm import CriticConfig
from tidemill.config.learning import BatchConfig, OptimizerConfig
from tidemill.config.model import CharModelConfig, LoraConfig, ModelConfig, PlacementConfig
from tidemill.config.pool import FleetConfig
from tidemill.config.schema import EngineConfig, EvalConfig, RunConfig, RunSpec, SamplingConfig
from tidemill.config.supervised import DataConfig, PreferenceConfig, SupervisedConfig
from tidemill.config.task import ArithmeticTask, JsonlTask, RewardConfig, ScoringConfig


def messages(build: Any, **fields: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        build(**fields)
    return str(caught.value)


def test_the_defaults_are_a_valid_run() -> None:
    spec = RunSpec()
    assert str(spec.directory) == "runs/run"
    assert str(RunSpec(run=RunConfig.model_validate({"dir": "elsewhere"})).directory) == "elsewhere"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"hidden_size": 30}, "heads = 4 does not divide hidden_size = 30; make it a multiple of heads"),
        ({"hidden_size": 12}, "hidden_size / heads = 3 is odd"),  # 12 / 4 = 3
        ({"alphabet": "abca"}, "alphabet repeats 'a'; name every character once"),
        ({"alphabet": ""}, "alphabet is empty"),
    ],
)
def test_char_model(fields: dict[str, Any], says: str) -> None:
    assert says in messages(CharModelConfig, **fields)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"source": " "}, "source is empty"),
        ({"source": "char", "revision": "main"}, "leave revision out"),
        ({"source": "char", "chat_template": True}, "set chat_template = false"),
    ],
)
def test_model(fields: dict[str, Any], says: str) -> None:
    assert says in messages(ModelConfig, **fields)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"rank": 8, "dropout": 0.1}, "set dropout = 0"),
        ({"targets": ["q_proj"]}, "rank = 0 gives none of them an adapter; set rank"),
        ({"rank": 8, "targets": ["model.layers.0.q_proj"]}, "name layers by the last part of their names"),
        ({"rank": 8, "targets": ["q_proj", "o_proj", "q_proj"]}, "targets names q_proj twice"),
    ],
)
def test_lora(fields: dict[str, Any], says: str) -> None:
    assert says in messages(LoraConfig, **fields)
    assert not LoraConfig().enabled
    assert LoraConfig(rank=1).enabled


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"operators": ""}, "operators is empty"),
        ({"operators": "+/"}, "only + - * are known"),
        ({"digits": 1, "largest": 19}, "set digits = 2"),
        ({"digits": 3, "largest": 9}, "set digits = 1"),
        ({"digits": 3, "largest": 100}, "less than or equal to 99"),  # of what is drawn, too little might be held out
    ],
)
def test_arithmetic(fields: dict[str, Any], says: str) -> None:
    assert says in messages(ArithmeticTask, **fields)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"kind": "regex"}, "needs a pattern"),
        ({"kind": "regex", "pattern": "("}, "is not a regular expression"),
        ({"kind": "length"}, "needs target_tokens"),
        ({"kind": "python"}, "needs a function"),
        ({"kind": "python", "function": "module"}, "names no function"),
        ({"kind": "exact", "pattern": "x"}, 'pattern is only for kind = "regex"'),
        ({"kind": "exact", "target_tokens": 3}, 'target_tokens is only for kind = "length"'),
        ({"kind": "exact", "function": "a:b"}, 'function is only for kind = "python"'),
    ],
)
def test_reward(fields: dict[str, Any], says: str) -> None:
    assert says in messages(RewardConfig, **fields)


@pytest.mark.parametrize("function", ["package.module:function", "rewards/mine.py:score", "/a b/c.py:f"])
def test_reward_functions_by_module_or_file(function: str) -> None:
    assert RewardConfig(kind="python", function=function).function == function


def test_scoring_needs_a_reward() -> None:
    assert "at least 1 item" in messages(ScoringConfig, rewards=())


def test_adamw_betas_stay_below_one() -> None:
    # At 1 the moment never moves and its bias correction divides by zero.
    assert "less than 1" in messages(OptimizerConfig, betas=(0.9, 1.0))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"batch": BatchConfig(prompts=8, minibatches=3)}, "make prompts a multiple of minibatches"),
        (
            {"batch": BatchConfig(group_size=1), "algorithm": {"name": "ppo", "dynamic_sampling": True}},
            "draw more samples per prompt",
        ),
        ({"scoring": ScoringConfig(rewards=(RewardConfig(kind="task"),))}, "brings no checker of its own"),
        (
            {"engine": EngineConfig(context_tokens=64), "sampling": SamplingConfig(max_new_tokens=64)},
            "sampling.max_new_tokens = 64 leaves no room for a prompt",
        ),
        (
            {
                "engine": EngineConfig(context_tokens=65),
                "sampling": SamplingConfig(max_new_tokens=64),
                "eval": EvalConfig(max_new_tokens=65),
            },
            "eval.max_new_tokens = 65 leaves no room for a prompt",
        ),
    ],
)
def test_run(fields: dict[str, Any], says: str) -> None:
    assert says in messages(RunSpec, **fields)


def test_a_silence_that_healthy_workers_keep() -> None:
    assert "heartbeat_timeout_s = 0.9 ends leases of healthy workers" in messages(FleetConfig, heartbeat_timeout_s=0.9)
    slow = {"engine": EngineConfig(tick_s=0.6), "fleet": FleetConfig(heartbeat_timeout_s=1.0)}
    assert "fleet.heartbeat_timeout_s = 1 is less than two ticks of engine.tick_s = 0.6" in messages(
        RunSpec, runtime="ray", **slow
    )
    RunSpec(**slow)  # in one process nobody is silent
    # Four words within the silence, and one a second at least: 1 s / 4, and 1 s rather than 15 s / 4.
    assert (FleetConfig(heartbeat_timeout_s=1.0).heartbeat_s, FleetConfig().heartbeat_s) == (0.25, 1.0)


@pytest.mark.parametrize("name", ["reward_model", "reference", "critic"])
def test_an_actor_needs_ray(name: str) -> None:
    placement = PlacementConfig.model_validate({name: "actor"})
    assert f'placement.{name} = "actor" needs runtime = "ray"' in messages(RunSpec, placement=placement)
    assert RunSpec(runtime="ray", placement=placement).placement.on_actors == (name,)


def test_a_head_on_the_trunk_is_where_the_trunk_is() -> None:
    placement, critic = PlacementConfig(critic="actor"), CriticConfig(kind="shared")
    said = messages(RunSpec, runtime="ray", placement=placement, critic=critic)
    assert 'placement.critic = "actor" and critic.kind = "shared"' in said
    assert 'set placement.critic = "trainer", or critic.kind = "own"' in said


def test_a_jsonl_task_has_no_checker_either() -> None:
    task = JsonlTask.model_validate({"kind": "jsonl", "path": "x.jsonl"})
    said = messages(RunSpec, task=task, scoring=ScoringConfig(rewards=(RewardConfig(kind="task"),)))
    assert 'task.kind = "jsonl" brings no checker' in said


def test_the_k_of_pass_at_k() -> None:
    assert EvalConfig().ks == ()
    assert EvalConfig(samples_per_prompt=1).ks == (1,)
    assert EvalConfig(samples_per_prompt=12).ks == (1, 2, 4, 8)
    assert EvalConfig(samples_per_prompt=12, pass_at=(12, 3)).ks == (3, 12)
    said = messages(EvalConfig, samples_per_prompt=4, pass_at=(1, 8))
    assert "pass_at holds 8, and samples_per_prompt = 4 draws fewer" in said


def test_data_to_evaluate_on_needs_data_to_learn_from() -> None:
    assert "held_out_path is given without path" in messages(DataConfig, held_out_path="x.jsonl")
    assert DataConfig().path is None  # a run of reinforcement learning needs none


def test_room_for_one_token_of_prompt_is_enough() -> None:
    RunSpec(engine=EngineConfig(context_tokens=65), sampling=SamplingConfig(max_new_tokens=64))


def test_all_contradictions_of_a_section_are_told_together() -> None:
    said = messages(CharModelConfig, hidden_size=30, alphabet="aa")
    assert "does not divide" in said
    assert "repeats" in said


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"kind": "model"}, "set model to the folder of a reward model"),
        ({"kind": "exact", "model": "folder"}, 'model is only for kind = "model"'),
        ({"kind": "http"}, 'kind = "http" needs a url with a host, and "" is not'),
        ({"kind": "http", "url": "ftp://a"}, 'set url = "http://host:port/path"'),
        ({"kind": "http", "url": "http:///score"}, 'needs a url with a host, and "http:///score" is not'),
        ({"kind": "http", "url": "http://:80/score"}, "needs a url with a host"),
        ({"kind": "http", "url": "http://a:8x"}, "needs a url with a host"),
        (
            {"kind": "http", "url": "https://a", "auth_env": "Bearer hush"},
            "auth_env is no variable's name; put the secret",
        ),
        ({"kind": "http", "url": "http://a.b", "auth_env": "KEY"}, "http://a.b is not encrypted; use https://"),
        ({"kind": "http", "url": "https://a", "auth_header": "a: b"}, "auth_header = 'a: b' is no header's name"),
        ({"kind": "exact", "auth_env": "KEY"}, 'auth_env is only for kind = "http"'),
        ({"kind": "model", "model": "folder", "url": "http://a"}, 'url is only for kind = "http"'),
    ],
)
def test_rewards_by_other_models(fields: dict[str, Any], says: str) -> None:
    assert says in messages(RewardConfig, **fields)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://me:hush@a/score", "use auth_env"),
        ("https://hush@a", "use auth_env"),
        ("http://me:hush@/score", "use auth_env"),
        ("http://me:hu/hush@a", "needs a url with a host"),  # "/" ends the host: "hu" is read as the port
        ("me:hush@a/score", "needs a url with a host"),
        ("ftp://me:hush@a/score", "use auth_env"),
    ],
)
def test_credentials_in_a_reward_url_are_refused_and_not_repeated(url: str, says: str) -> None:
    said = messages(RewardConfig, kind="http", url=url, auth_env="KEY")
    assert says in said
    assert "hush" not in said


def test_an_at_sign_in_a_path_is_no_credential() -> None:
    url = "https://a/@team/score?by=b@c"
    assert RewardConfig(kind="http", url=url).url == url


def test_how_long_a_reward_may_take_depends_on_who_gives_it() -> None:
    assert RewardConfig(kind="model", model="folder").longest_wait_s == 600
    assert RewardConfig(kind="http", url="http://a").longest_wait_s == 60
    assert RewardConfig(kind="http", url="http://a", timeout_s=5).longest_wait_s == 5


@pytest.mark.parametrize(
    ("build", "fields", "says"),
    [
        (SupervisedConfig, {"minibatch_tokens": 10, "microbatch_tokens": 20}, "lower the first or raise the second"),
        (SupervisedConfig, {"patience": 2, "evaluate_every_steps": 0}, "patience = 2 never acts"),
        (PreferenceConfig, {"loss": "ipo", "label_smoothing": 0.1}, "label_smoothing is only for loss"),
    ],
)
def test_supervised_sections(build: Any, fields: dict[str, Any], says: str) -> None:
    assert says in messages(build, **fields)
