"""Every recipe through the real command line, shortened; checks the documented results."""

from __future__ import annotations

import functools
import io
import json
import math
import os
import re
import shutil
import signal
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.commands import DEADLINE_S, Ran, run_fork, run_here
from tests.forked import Forked
from tests.rotation import daily
from tests.sandboxes import need_bubblewrap
from tidemill.config.algorithm import PRESETS
from tidemill.config.load import RECIPES, load_spec
from tidemill.jobs.train import train
from tidemill.models.auto import quiet
from tidemill.models.catalog import SMOLLM2
from tidemill.models.model_source import stage_folders
from tidemill.telemetry.events import read_events
from tidemill.telemetry.fleet_figures import migrations

ALL_RECIPES = sorted(RECIPES.glob("*.toml"))
CHAR = f"@{RECIPES / 'char-addition.toml'}"
ONE_THREAD = "--trainer.threads=1"
# Sixteen steps of the recipe's sixty, at four times the learning rate: enough to raise the reward.
LEARNING = (CHAR, ONE_THREAD, "--trainer.steps=16", "--optimizer.learning_rate=1e-3", "--eval.every_steps=0")
LIKELY = """--scoring.rewards=[{kind = "regex", pattern = '^[0-4]'}]"""  # an untrained model is sometimes right
SHORT = (
    CHAR,
    ONE_THREAD,
    LIKELY,
    "--trainer.steps=2",
    "--batch.prompts=4",
    "--batch.group_size=8",
    "--eval.every_steps=0",
)
PROMISED = ("steps", "wall_s", "tokens_generated", "tokens_trained", "policy_version", "peak_rss_bytes")
PROMPTS = ("1+2=", "9+4=", "7+7=")

pytestmark = pytest.mark.timeout(300)
Train = Callable[..., dict[str, Any]]


def figures(run: Path, name: str) -> list[float]:
    """One metric of every step that has it."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line[name] for line in lines if name in line]


def check_summary(ran: Ran, run: Path) -> dict[str, Any]:
    """`--json` prints the contents of summary.json, with all documented fields."""
    assert ran.code == 0, ran.err
    summary: dict[str, Any] = ran.data
    stored = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    assert stored == {name: summary[name] for name in stored}
    assert all(summary[name] > 0 for name in PROMISED)
    assert summary["steps"] == summary["policy_version"] == summary["total_steps"]
    assert summary["tokens_trained"] <= summary["tokens_generated"]
    assert 0 <= summary["eval"]["before"]["greedy_accuracy"] <= 1
    assert 0 <= summary["eval"]["after"]["greedy_accuracy"] <= 1
    assert summary["eval"]["n"] > 0
    return summary


def check_report(run: Path) -> None:
    """One page that needs no other file and no network."""
    page = (run / "report.html").read_text(encoding="utf-8")
    assert page.lstrip().lower().startswith("<!doctype html>")
    assert not re.search(r"""(?:src|href)=["'](?!data:|#)|@import|url\((?!["']?data:)|XMLHttpRequest""", page)
    assert "Content-Security-Policy\" content=\"default-src 'none'; style-src" in page  # and so no connection


def check_checkpoint(run: Path, prompts: tuple[str, ...], *, tokens: int) -> None:
    """transformers loads the checkpoint, and completes greedily as `tidemill generate` does."""
    folder = max((run / "checkpoints").iterdir(), key=lambda path: int(path.name.removeprefix("step_")))
    asked = (f"--sampling.max_new_tokens={tokens}", "--sampling.temperature=0", "--sampling.stop=[]", ONE_THREAD)
    ours = run_here("generate", *prompts, "--checkpoint", str(run), *asked, "--json")
    assert ours.code == 0, ours.err
    with quiet():
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        for sample in ours.data["samples"]:
            ids = torch.tensor([tokenizer.encode(sample["prompt"], add_special_tokens=False)])
            theirs = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
            completion = theirs[0, ids.shape[1] :]
            assert sample["completion"] == tokenizer.decode(completion, skip_special_tokens=True)
            assert sample["tokens"] == len(completion)
            with torch.no_grad():
                logits = model(theirs).logits[0, ids.shape[1] - 1 : -1]
            chosen = logits.log_softmax(-1).gather(-1, completion[:, None]).sum().item()
            assert sample["logprob"] == pytest.approx(chosen, abs=1e-4)


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Run two steps of the character recipe in this process, with overrides; equal ones once."""
    place = tmp_path_factory.mktemp("short")

    @functools.cache
    def run(*overrides: str) -> dict[str, Any]:
        folder = place / ("run" + "".join(overrides).replace("/", ""))
        spec = load_spec([*SHORT, *overrides, f"--run.dir={folder}"], purpose="train")
        summary = train(spec, telemetry_stream=io.StringIO())
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        steps = [line for line in lines if line["step"] > 0]
        assert [line["step"] for line in steps] == [1, 2]
        for line in steps:
            assert all(math.isfinite(line[name]) for name in ("loss", "entropy", "grad_norm", "approx_kl"))
            assert line["grad_norm"] > 0
        digests = [line["weights_digest"] for line in lines]
        assert len(set(digests)) == len(digests)  # every step changed the weights
        return summary | {"metrics": steps}

    return run


def test_there_is_a_recipe_for_every_kind_of_task() -> None:
    assert {path.stem for path in ALL_RECIPES} >= {"char-addition", "jsonl", "reasoning-gym", "smollm2-addition"}


def test_the_character_recipe_is_reproducible_and_leaves_its_documented_files(tmp_path: Path) -> None:
    run, again = tmp_path / "run", tmp_path / "again"
    summary = check_summary(run_fork("train", *LEARNING, f"--run.dir={run}", "--json", cwd=tmp_path), run)
    assert summary["steps"] == summary["optimizer_steps"] == 16
    assert summary["eval"]["n"] == 20
    rewards = figures(run, "reward_mean")
    assert len(rewards) == 16
    # From 0.06 to about 0.3: a number and a line end are learned first (0.2), then some answers.
    assert fmean(rewards[-4:]) > 2 * fmean(rewards[:4])
    check_report(run)
    check_checkpoint(run, PROMPTS, tokens=3)
    # Another process, and a process that ran other things before: in canonical order both give the same weights.
    few = [*LEARNING, "--trainer.steps=3", f"--run.dir={again}"]
    assert train(load_spec(few, purpose="train"), telemetry_stream=io.StringIO())["steps"] == 3
    assert figures(again, "reward_mean") == rewards[:3]
    assert figures(again, "weights_digest") == figures(run, "weights_digest")[:4]


def test_the_seed_determines_the_weights(short: Train) -> None:
    assert short()["weights_digest"] == short("--run.name=again")["weights_digest"]
    assert short()["weights_digest"] != short("--run.seed=1")["weights_digest"]


def test_arrival_order_trains_on_the_same_samples(short: Train) -> None:
    canonical, arrival = short()["metrics"], short("--batch.order=arrival")["metrics"]
    for name in ("samples", "tokens_generated", "tokens_trained", "reward_mean", "groups_without_signal"):
        assert arrival[0][name] == canonical[0][name]  # before the first update nothing depends on the order
    assert arrival[0]["grad_norm"] == pytest.approx(canonical[0]["grad_norm"], rel=1e-4)


def test_minibatches_and_epochs_determine_the_number_of_optimizer_steps(short: Train) -> None:
    summary = short("--batch.minibatches=2", "--batch.epochs=2")
    # 2 minibatches x 2 epochs x 2 steps, and the later ones are off-policy.
    assert summary["optimizer_steps"] == 8
    assert [line["optimizer_steps"] for line in summary["metrics"]] == [4, 4]
    assert all(line["approx_kl"] > 0 for line in summary["metrics"])
    assert summary["policy_version"] == 2


def test_the_reference_is_the_initial_model(short: Train) -> None:
    first, second = short("--algorithm.kl_beta=0.1")["metrics"]
    assert first["kl_ref"] == pytest.approx(0, abs=1e-6)
    assert second["kl_ref"] > 1e-6


@pytest.mark.parametrize("name", ["ppo", *daily([name for name in PRESETS if name != "ppo"], 2)])
def test_every_algorithm_trains(short: Train, name: str) -> None:
    """The second batch trains a policy that the first one has changed."""
    summary = short(f"--algorithm.name={name}", "--batch.epochs=2")
    assert summary["optimizer_steps"] == 4
    for line in summary["metrics"]:
        assert line["approx_kl"] > 0
        assert line["lag/0"] == 1
        assert line["effective_sample_size"] == pytest.approx(1, abs=1e-6)
        assert ("explained_variance" in line) == (name == "ppo")


def test_a_critic_that_shares_the_policys_trunk(short: Train) -> None:
    own, shared = (short("--algorithm.name=ppo", f"--critic.kind={kind}") for kind in ("own", "shared"))
    # A new head outputs 0 and has no gradient for the trunk yet: the first step is the same.
    assert shared["metrics"][0]["grad_norm"] == pytest.approx(own["metrics"][0]["grad_norm"], rel=1e-4)
    assert shared["metrics"][1]["grad_norm"] != own["metrics"][1]["grad_norm"]


def test_bf16_trains_on_nearly_the_same_samples(short: Train) -> None:
    plain, half = short()["metrics"], short("--trainer.precision=bf16")["metrics"]
    assert half[0]["entropy"] == pytest.approx(plain[0]["entropy"], rel=0.05)
    assert 0 < half[0]["mismatch_kl"] < 1e-2


def test_recomputing_activations_changes_nothing(short: Train) -> None:
    plain, recomputed = short()["metrics"], short("--trainer.activation_checkpointing=true")["metrics"]
    for before, after in zip(plain, recomputed, strict=True):
        assert after["loss"] == pytest.approx(before["loss"], abs=1e-6)
        assert after["grad_norm"] == pytest.approx(before["grad_norm"], rel=1e-4)


def test_truncated_completions_can_be_excluded(short: Train) -> None:
    large = "--batch.group_size=64"  # an untrained model rarely stops by itself: enough complete samples must remain
    kept = short(large)["metrics"][0]
    masked = short(large, "--scoring.truncated=masked")["metrics"][0]
    assert kept["truncated_fraction"] == masked["truncated_fraction"] > 0
    assert kept["samples_left_out"] == 0
    assert masked["samples_left_out"] == masked["truncated_fraction"] * masked["samples"]
    # Every excluded sample was truncated at max_new_tokens = 3.
    assert masked["tokens_trained"] <= masked["tokens_generated"] - 3 * masked["samples_left_out"]


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_the_ray_recipe_trains_while_its_workers_are_killed(tmp_path: Path) -> None:
    recipe, run = f"@{RECIPES / 'ray-local.toml'}", tmp_path / "run"
    # A quarter of the recipe's steps, at three times the learning rate; a worker takes some seconds to start.
    shortened = ("--trainer.steps=25", "--optimizer.learning_rate=1e-3", "--eval.every_steps=0")
    ran = run_fork(
        "train", recipe, *shortened, "--pool.mean_time_to_eviction_s=12", f"--run.dir={run}", "--json", cwd=tmp_path
    )
    summary = check_summary(ran, run)
    assert summary["joins"] > 0
    assert summary["leases"] > 2  # there are two at a time: some were evicted and replaced
    rewards = figures(run, "reward_mean")
    assert fmean(rewards[-5:]) > fmean(rewards[:5]) + 0.05
    check_report(run)


@pytest.mark.slow  # tests/integration/cluster/test_ranks.py trains with two ranks on Ray
@pytest.mark.xdist_group("ray")
def test_the_recipe_of_shards_resumes_with_another_number_of_ranks(tmp_path: Path) -> None:
    recipe, run = f"@{RECIPES / 'shards-local.toml'}", tmp_path / "run"
    for steps, shards in ((4, 2), (6, 3)):
        shortened = [f"--trainer.steps={steps}", f"--trainer.shards={shards}", "--checkpoint.every_steps=2"]
        check_summary(run_fork("train", recipe, *shortened, f"--run.dir={run}", "--json", cwd=tmp_path), run)
    assert len(figures(run, "reward_mean")) == 6
    assert not list((run / "checkpoints").glob(".ranks-*"))


def test_the_demo_counts_evictions_that_hit_running_samples(tmp_path: Path) -> None:
    """In one process, with a machine that is there at once and is taken and replaced every two seconds, without end."""
    market = tmp_path / "market.csv"
    market.write_text("".join(f"{second},1\n{second + 1.9},0\n" for second in range(0, 1000, 2)), encoding="utf-8")
    stages = {
        "teacher": ("data_generation.prompts=200",),
        "sft": ("trainer.steps=4",),
        "rl": (
            *("runtime=inprocess", "fleet.seeding=false", "fleet.drain_margin_s=0.29", f"pool.path={market}"),
            *("pool.start_s=0", "pool.speed=1", "pool.notice_s=0.3"),
            *("batch.prompts=4", "batch.group_size=4", "engine.slots=8", "eval.prompts=4"),
        ),
    }
    changed = [f"--stage.{name}.{setting}" for name, settings in stages.items() for setting in settings]
    run = tmp_path / "run"
    demo = ("train", "@spot-market", *changed, f"--run.dir={run}", "--json")

    def hit() -> bool:
        """Whether a worker was evicted, and one with running samples had notice or was evicted."""
        events = [event for path in run.glob("stages/rl-*/events.jsonl") for event in read_events(path)]
        kept = (move["tokens_kept"] for move, cause in migrations(events) if cause != "other")
        return any(kept) and any(event["event"] == "eviction" for event in events)

    # Far more steps than it needs: no machine is so fast that they end before an eviction.
    with Forked(*demo, "--stage.rl.trainer.steps=100000", cwd=tmp_path) as process:
        until = time.monotonic() + DEADLINE_S
        while not hit():
            assert process.poll() is None, process.communicate(DEADLINE_S)
            assert time.monotonic() < until, "no eviction hit a running sample"
            time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE_S) == 130, process.communicate(DEADLINE_S)
    (path,) = run.glob("stages/rl-*/summary.json")
    summary = json.loads(path.read_text(encoding="utf-8"))
    assert summary["evictions"] > 0 < summary["tokens_kept"]

    ran = run_fork(*demo, "--stage.rl.trainer.steps=2", cwd=tmp_path)
    assert (ran.code, ran.data["outcome"]) == (0, "finished"), ran.err
    summary = json.loads((stage_folders(run)["rl"] / "summary.json").read_text(encoding="utf-8"))
    assert (summary["steps"], summary["eval"]["n"]) == (2, 4)


@pytest.fixture
def emptied(tmp_path: Path) -> Iterator[Path]:
    """A folder that is removed after the test: a checkpoint of SmolLM2 takes 1.6 GB."""
    yield tmp_path
    shutil.rmtree(tmp_path)


def settings_of(recipe: Path) -> dict[str, Any]:
    return tomllib.loads(recipe.read_text(encoding="utf-8"))


# test_documented.py trains the pretrained model, and test_equivalence.py evicts workers.
@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(path, id=path.stem)
        for path in ALL_RECIPES
        if settings_of(path).get("model", {}).get("source") == SMOLLM2 and "stage" not in settings_of(path)
    ],
)
def test_recipes_of_the_pretrained_model(recipe: Path, shared_cache: Path, emptied: Path) -> None:
    run = emptied / "run"
    shortened = ["--trainer.steps=1", "--batch.prompts=4", "--eval.prompts=2", "--eval.every_steps=0"]
    if recipe.stem == "spot-trace":
        shortened.append("--pool.mean_time_to_eviction_s=1.5")
    argv = ("train", f"@{recipe}", ONE_THREAD, *shortened, f"--run.dir={run}", "--json")
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    assert os.environ["TIDEMILL_CACHE"] == str(shared_cache)
    summary = check_summary(run_fork(*argv, cwd=emptied, env=offline), run)
    assert summary["eval"]["n"] == 2
    assert summary["model"] == SMOLLM2
    check_report(run)
    if recipe.stem == "spot-trace":
        assert summary["evictions"] > 0
    if recipe.stem == "smollm2-addition":
        check_checkpoint(run, ("3+4=7\n5+2=",), tokens=3)


FEW_EPISODES = (
    *("--task.train_size=8", "--task.held_out_size=4", "--stage.written.data_generation.prompts=8"),
    *("--stage.sft.trainer.steps=1", "--stage.rl.trainer.steps=1", "--stage.rl.batch.prompts=2"),
    *("--stage.rl.batch.group_size=2", "--stage.rl.batch.minibatches=1", "--stage.rl.eval.prompts=2"),
)
SHORT_STAGES = {
    "calc-tool": FEW_EPISODES,
    "guess": FEW_EPISODES,
    "hacked": (
        *("--stage.teacher.data_generation.prompts=200", "--stage.sft.trainer.steps=4", "--eval.prompts=4"),
        *("--stage.hacked.trainer.steps=2", "--stage.hacked.batch.prompts=4"),
    ),
    "python-tool": FEW_EPISODES,
}
TESTED_ELSEWHERE = (
    "rlhf",  # test_pipelines.py
    "robot",  # test_robot_recipe.py
    "spot-market",  # above
)


# tests/unit/pipeline/test_recipe.py plans recipes with stages, and test_pipelines.py trains rlhf.
@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(path, id=path.stem)
        for path in ALL_RECIPES
        if "stage" in settings_of(path) and path.stem not in TESTED_ELSEWHERE
    ],
)
def test_recipes_with_stages(recipe: Path, shared_cache: Path, emptied: Path) -> None:
    if recipe.stem == "python-tool":
        need_bubblewrap()
    assert os.environ["TIDEMILL_CACHE"] == str(shared_cache)
    argv = ("train", f"@{recipe}", ONE_THREAD, *SHORT_STAGES[recipe.stem], f"--run.dir={emptied / 'run'}", "--json")
    ran = run_fork(*argv, cwd=emptied)
    assert ran.code == 0, ran.err
    assert [(stage["kind"], stage["state"]) for stage in ran.data["stages"]] == [
        ("demonstrations", "done"),
        ("sft", "done"),
        ("rl", "done"),
    ]
