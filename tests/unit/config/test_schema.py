"""The checks between the keys of a section and between sections."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from tests.config_issues import section_issue, section_issues
from tidemill.config.base import Config
from tidemill.config.learning import OptimizerConfig, PreferenceConfig, ScheduleConfig, SupervisedConfig
from tidemill.config.model import CharModelConfig, LoraConfig, ModelConfig, PlacementConfig
from tidemill.config.pool import FleetConfig
from tidemill.config.schema import EngineConfig, EvalConfig, RunConfig, RunSpec, SamplingConfig
from tidemill.config.task import ArithmeticTask, DataConfig, FileTask, RewardConfig, ScoringConfig
from tidemill.config.telemetry import AlertConfig
from tidemill.config.weights import WeightsConfig


def test_the_defaults_are_a_valid_run() -> None:
    spec = RunSpec()
    assert str(spec.directory) == "runs/run"
    assert str(RunSpec(run=RunConfig.model_validate({"dir": "elsewhere"})).directory) == "elsewhere"


JUDGE = {"kind": "judge", "url": "https://a/v1", "judge_model": "m"}
CASES: list[tuple[type[Config], dict[str, Any], str, str]] = [  # section, values, part of `what`, part of `hint`
    (CharModelConfig, {"hidden_size": 30}, "heads = 4 does not divide hidden_size = 30", "multiple of heads"),
    (CharModelConfig, {"hidden_size": 12}, "hidden_size / heads = 3", "even"),  # 12 / 4 = 3
    (CharModelConfig, {"alphabet": "abca"}, "alphabet repeats 'a'", "once"),
    (CharModelConfig, {"alphabet": ""}, "alphabet is empty", "characters"),
    (ModelConfig, {"source": " "}, "source is empty", "tidemill model list"),
    (ModelConfig, {"source": "char", "revision": "main"}, "revision", "leave revision out"),
    (ModelConfig, {"source": "char", "chat_template": True}, '"char"', "chat_template = false"),
    (LoraConfig, {"rank": 8, "dropout": 0.1}, "dropout = 0.1", "dropout = 0"),
    (LoraConfig, {"targets": ["q_proj"]}, "rank = 0", "set rank"),
    (LoraConfig, {"rank": 8, "targets": ["model.layers.0.q_proj"]}, "'model.layers.0.q_proj'", "last part"),
    (ArithmeticTask, {"operators": ""}, "operators is empty", "+ - *"),
    (ArithmeticTask, {"operators": "+/"}, "'/'", "+ - *"),
    (ArithmeticTask, {"digits": 1, "largest": 19}, "largest = 19", "digits = 2"),
    (ArithmeticTask, {"digits": 3, "largest": 9}, "largest = 9", "digits = 1"),
    (RewardConfig, {"kind": "regex"}, 'kind = "regex" needs a pattern', "set pattern"),
    (RewardConfig, {"kind": "regex", "pattern": "("}, "pattern '('", "correct it"),
    (RewardConfig, {"kind": "length"}, 'kind = "length" needs target_tokens', "set it"),
    (RewardConfig, {"kind": "python"}, 'kind = "python" needs a function', "package.module:function"),
    (RewardConfig, {"kind": "python", "function": "module"}, '"module"', "package.module:function"),
    (RewardConfig, {"kind": "exact", "pattern": "x"}, 'pattern is only for kind = "regex"', "leave pattern out"),
    (RewardConfig, {"kind": "exact", "target_tokens": 3}, 'target_tokens is only for kind = "length"', "leave"),
    (RewardConfig, {"kind": "exact", "function": "a:b"}, 'function is only for kind = "python"', "leave"),
    (RewardConfig, {"kind": "model"}, 'kind = "model" needs a model', "folder of a reward model"),
    (RewardConfig, {"kind": "exact", "model": "folder"}, 'model is only for kind = "model"', "leave"),
    (RewardConfig, {"kind": "http"}, '""', "http://host:port/path"),
    (RewardConfig, {"kind": "http", "url": "ftp://a"}, '"ftp://a"', "http://host:port/path"),
    (RewardConfig, {"kind": "http", "url": "http:///score"}, '"http:///score"', "http://host:port/path"),
    (RewardConfig, {"kind": "http", "url": "http://:80/score"}, "url with a host", "http://host:port/path"),
    (RewardConfig, {"kind": "http", "url": "http://a:8x"}, "url with a host", "http://host:port/path"),
    (RewardConfig, {"kind": "http", "url": "https://a", "auth_env": "Bearer hush"}, "auth_env", "put the secret"),
    (RewardConfig, {"kind": "http", "url": "http://a.b", "auth_env": "KEY"}, "http://a.b", "https://"),
    (RewardConfig, {"kind": "http", "url": "https://a", "auth_header": "a: b"}, "auth_header = 'a: b'", "x-api-key"),
    (RewardConfig, {"kind": "exact", "auth_env": "KEY"}, 'auth_env is only for kind = "http"', "leave"),
    (RewardConfig, {"kind": "model", "model": "m", "url": "http://a"}, 'url is only for kind = "http"', "leave"),
    (RewardConfig, {"kind": "judge", "judge_model": "m"}, '""', "http://host:port/path"),
    (RewardConfig, {"kind": "judge", "url": "http://a/v1"}, "needs a judge_model", "set it"),
    (RewardConfig, JUDGE | {"most_usd": 1.0}, "most_usd needs the prices", "usd_per_million_tokens"),
    (RewardConfig, JUDGE | {"url": "http://a.b/v1", "auth_env": "KEY"}, "http://a.b/v1", "https://"),
    (RewardConfig, {"kind": "exact", "most_calls": 3}, 'most_calls is only for kind = "judge"', "leave"),
    (AlertConfig, {}, "either url or url_env", "set one"),
    (AlertConfig, {"url": "https://a", "url_env": "URL"}, "either url or url_env", "set one"),
    (AlertConfig, {"url": "hooks.example/x"}, '"hooks.example/x"', "http://host:port/path"),
    (AlertConfig, {"url_env": "https://a/secret"}, "url_env", "into a variable"),
    (WeightsConfig, {"port": 8000}, "port", "leave them out"),
    (WeightsConfig, {"host": "10.0.0.5"}, "host", "leave them out"),
    (WeightsConfig, {"transport": "http", "host": "0.0.0.0"}, "no address", "set url"),
    (WeightsConfig, {"transport": "http", "url": "trainer:8000"}, "'trainer:8000'", "http://trainer.example:8000"),
    (DataConfig, {"held_out_path": "x.jsonl"}, "held_out_path is set without path", "set path"),
    (EvalConfig, {"samples_per_prompt": 4, "pass_at": [1, 8]}, "pass_at contains 8", "at least 8"),
    (SupervisedConfig, {"minibatch_tokens": 10, "microbatch_tokens": 20}, "microbatch_tokens = 20", "lower the first"),
    (SupervisedConfig, {"patience": 2, "evaluate_every_steps": 0}, "patience = 2", "evaluate_every_steps"),
    (PreferenceConfig, {"loss": "ipo", "label_smoothing": 0.1}, 'label_smoothing is only for loss = "dpo"', "leave"),
    (ScheduleConfig, {"overcommit": 2}, "overcommit = 2", "raise max_policy_lag"),
    (
        ScheduleConfig,
        {"max_policy_lag": 1, "overcommit": 2, "fresh_fraction": 0.5},
        "overcommit = 2 and fresh_fraction = 0.5",
        'overcommit = "adaptive"',
    ),
    (FleetConfig, {"heartbeat_timeout_s": 0.9}, "heartbeat_timeout_s = 0.9", "1 or more"),
    (
        RunSpec,
        {"algorithm": {"name": "ppo", "credit": "turn_returns"}, "env": {"name": "guess"}},
        'algorithm.advantage = "gae" does not compute',
        'credit = "outcome"',
    ),
    (
        RunSpec,
        {"algorithm": {"advantage": "mine.py:centred", "credit": "gigpo"}, "env": {"name": "guess"}},
        'algorithm.advantage = "mine.py:centred" does not compute',
        '"dr_grpo"',
    ),
    (RunSpec, {"algorithm": {"credit": "gigpo"}}, "env.name is not set", "name an environment"),
    (RunSpec, {"batch": {"prompts": 8, "minibatches": 3}}, "batch.minibatches = 3", "multiple of minibatches"),
    (
        RunSpec,
        {"batch": {"group_size": 1}, "algorithm": {"name": "ppo", "dynamic_sampling": True}},
        "algorithm.dynamic_sampling",
        "group_size",
    ),
    (RunSpec, {"scoring": {"rewards": [{"kind": "task"}]}}, 'task.kind = "arithmetic" has no scorer', '"exact"'),
    (
        RunSpec,
        {"schedule": {"max_policy_lag": 1, "overcommit": 9}},
        "schedule.overcommit = 9",
        "set it to 8",  # 1 version × 8 prompts
    ),
    (RunSpec, {"fleet": {"seeding": False}}, "fleet.seeding = false", "add workers"),
    (RunSpec, {"pool": {"kind": "ray"}}, 'pool.kind = "ray" needs runtime = "ray"', "change one"),
    (
        RunSpec,
        {"runtime": "ray", "engine": {"tick_s": 0.6}, "fleet": {"heartbeat_timeout_s": 1.0}},
        "fleet.heartbeat_timeout_s = 1",
        "lower tick_s",
    ),
    (
        RunSpec,
        {"runtime": "ray", "placement": {"critic": "actor"}, "critic": {"kind": "shared"}},
        'placement.critic = "actor" and critic.kind = "shared"',
        'critic.kind = "own"',
    ),
]


@pytest.mark.parametrize(("section", "fields", "what", "hint"), CASES)
def test_contradictory_values_are_refused(section: type[Config], fields: dict[str, Any], what: str, hint: str) -> None:
    issue = section_issue(section, **fields)
    assert what in issue.what
    assert hint in issue.hint


@pytest.mark.parametrize(
    ("section", "fields", "key"),
    [
        (ArithmeticTask, {"digits": 3, "largest": 100}, "largest"),  # with random problems, too few might be held out
        (ScoringConfig, {"rewards": []}, "rewards"),
        (OptimizerConfig, {"betas": [0.9, 1.0]}, "betas"),  # at 1, the bias correction divides by zero
    ],
)
def test_values_out_of_range_are_refused(section: type[Config], fields: dict[str, Any], key: str) -> None:
    with pytest.raises(ValidationError) as caught:
        section.model_validate(fields)
    assert [details["loc"][0] for details in caught.value.errors()] == [key]


def test_lora_is_enabled_by_its_rank() -> None:
    assert not LoraConfig().enabled
    assert LoraConfig(rank=1).enabled


@pytest.mark.parametrize("function", ["package.module:function", "rewards/mine.py:score", "/a b/c.py:f"])
def test_reward_functions_by_module_or_file(function: str) -> None:
    assert RewardConfig(kind="python", function=function).function == function


@pytest.mark.parametrize(
    ("transport", "ranks", "shares"),
    [("object_store", 1, False), ("http", 1, False), ("shm", 1, True), ("http", 2, True)],
)
def test_workers_share_snapshots_by_choice_or_if_they_have_ranks(transport: str, ranks: int, shares: bool) -> None:
    spec = RunSpec.model_validate({"runtime": "ray", "weights": {"transport": transport}, "trainer": {"shards": 2}})
    engine = spec.engine.model_copy(update={"tensor_parallel": ranks})
    assert spec.model_copy(update={"engine": engine}).shares_snapshots == shares


def test_heartbeats_are_not_needed_in_one_process() -> None:
    RunSpec(engine=EngineConfig(tick_s=0.6), fleet=FleetConfig(heartbeat_timeout_s=1.0))


def test_idle_workers_send_four_heartbeats_per_timeout_and_at_least_one_per_second() -> None:
    assert (FleetConfig(heartbeat_timeout_s=1.0).heartbeat_s, FleetConfig().heartbeat_s) == (0.25, 1.0)


@pytest.mark.parametrize("name", ["reward_model", "reference", "critic"])
def test_an_actor_needs_ray(name: str) -> None:
    placement = PlacementConfig.model_validate({name: "actor"})
    issue = section_issue(RunSpec, placement={name: "actor"})
    assert f'placement.{name} = "actor" needs runtime = "ray"' in issue.what
    assert RunSpec(runtime="ray", placement=placement).placement.on_actors == (name,)


def test_a_jsonl_task_has_no_scorer() -> None:
    task = FileTask.model_validate({"kind": "file", "path": "x.jsonl"})
    issue = section_issue(RunSpec, task=task, scoring={"rewards": [{"kind": "task"}]})
    assert 'task.kind = "file"' in issue.what


def test_the_default_k_of_pass_at_k_are_powers_of_2() -> None:
    assert EvalConfig().ks == ()
    assert EvalConfig(samples_per_prompt=1).ks == (1,)
    assert EvalConfig(samples_per_prompt=12).ks == (1, 2, 4, 8)
    assert EvalConfig(samples_per_prompt=12, pass_at=(12, 3)).ks == (3, 12)


def test_reinforcement_learning_needs_no_data() -> None:
    assert DataConfig().path is None


def test_room_for_one_token_of_prompt_is_enough() -> None:
    RunSpec(engine=EngineConfig(context_tokens=65), sampling=SamplingConfig(max_new_tokens=64))


def test_all_issues_of_a_section_are_reported() -> None:
    assert len(section_issues(CharModelConfig, hidden_size=30, alphabet="aa")) == 2


@pytest.mark.parametrize(
    ("url", "hint"),
    [
        ("http://me:hush@a/score", "use auth_env"),
        ("https://hush@a", "use auth_env"),
        ("http://me:hush@/score", "use auth_env"),
        ("http://me:hu/hush@a", "http://host:port/path"),  # "/" ends the host: "hu" is parsed as the port
        ("me:hush@a/score", "http://host:port/path"),
        ("ftp://me:hush@a/score", "use auth_env"),
    ],
)
def test_credentials_in_a_reward_url_are_refused_and_not_repeated(url: str, hint: str) -> None:
    issue = section_issue(RewardConfig, kind="http", url=url, auth_env="KEY")
    assert hint in issue.hint
    assert "hush" not in issue.line


def test_an_at_sign_in_a_path_is_not_a_credential() -> None:
    url = "https://a/@team/score?by=b@c"
    assert RewardConfig(kind="http", url=url).url == url


def test_the_default_timeout_depends_on_the_kind_of_reward() -> None:
    assert RewardConfig(kind="model", model="folder").longest_wait_s == 600
    assert RewardConfig(kind="http", url="http://a").longest_wait_s == 60
    assert RewardConfig(kind="http", url="http://a", timeout_s=5).longest_wait_s == 5
