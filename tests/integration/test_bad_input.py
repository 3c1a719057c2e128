"""A user's mistake ends with exit code 2 and one or two lines with what, where and a hint; nothing is lost."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.char_task import char_task
from tests.commands import Ran, run_fork, run_here
from tidemill.trainer.policy import PolicyTrainer

CHAR = (
    char_task()
    + """\
[sampling]
max_new_tokens = 3
[eval]
prompts = 4
[batch]
prompts = 2
group_size = 4
[trainer]
steps = 4
threads = 1
[checkpoint]
every_steps = 1
"""
)
REWARDS = """\
import asyncio
import time


def raises(prompt, completion, answer, metadata):
    if len(completion) == 3:
        raise ValueError("no idea what to think of it")
    return len(completion)


def hangs(prompt, completion, answer, metadata):
    if len(completion) == 3:
        time.sleep(1000)
    return len(completion)


def surrogate(prompt, completion, answer, metadata):
    if len(completion) == 3:
        raise ValueError("half a pair: \\ud800")
    return len(completion)


class Speechless(Exception):
    def __str__(self):
        raise KeyError("message")


def speechless(prompt, completion, answer, metadata):
    if len(completion) == 3:
        raise Speechless
    return len(completion)


async def stubborn(prompt, completion, answer, metadata):
    while len(completion) == 3:
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            pass
    return len(completion)


class SlowNumber:
    def __float__(self):
        time.sleep(1000)


def slow_number(prompt, completion, answer, metadata):
    return SlowNumber() if len(completion) == 3 else len(completion)


def always(prompt, completion, answer, metadata):
    raise ValueError(f"cannot read {completion!r}")
"""
KEPT = ("steps", "weights_digest", "tokens_generated", "tokens_trained", "optimizer_steps")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # where tracebacks of bugs are written
    (tmp_path / "char.toml").write_text(CHAR, encoding="utf-8")
    (tmp_path / "rewards.py").write_text(REWARDS, encoding="utf-8")
    return tmp_path


def train(*argv: str) -> Ran:
    return run_here("train", "@char.toml", "--run.dir=D", *argv, "--json")


def assert_refused(ran: Ran, *says: str) -> None:
    """Exit code 2; the last one or two lines contain all of `says`; the same as JSON for programs."""
    assert ran.code == 2, ran.err
    _, told, error = ran.err.rpartition("error: ")
    assert told
    assert error.count("\n") <= 2
    for part in says:
        assert part in error
    assert "Traceback" not in ran.err
    assert ran.data["exit_code"] == 2
    assert ran.data["error"]["kind"] == "input"


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--trainer.stepz=3"], ["trainer.stepz", "unknown key", "did you mean trainer.steps?"]),
        (["--trianer.steps=3"], ["trianer", "unknown section", "did you mean trainer?"]),
        (["--trainer.steps=many"], ["trainer.steps", "needs integer >= 1", '"many"']),
        (["--batch.prompts=1.5"], ["batch.prompts", "needs integer", "1.5"]),
        (["--batch.prompts=3", "--batch.minibatches=2"], ["does not divide batch.prompts", "make prompts a multiple"]),
        (["--sampling.top_p=0.9"], ["sampling.top_p", "1"]),
        (["--engine.context_tokens=3"], ["sampling.max_new_tokens: 3", "raise context_tokens"]),
        (["--engine.context_tokens=4", "--eval.max_new_tokens=4"], ["eval.max_new_tokens: 4", "raise context_tokens"]),
        (["@nowhere.toml"], ["nowhere.toml"]),
        (["--task.kind=arithmatic"], ["task.kind", "arithmetic"]),
        (["--run.name=../outside"], ["run.name", "not a folder name", "run.dir"]),
        (["--trainer=3", "--trainer.steps=2"], ["trainer: needs a table, was given 3"]),
        (["--runtime=ray", "--ray.trainer_gpus=64"], ["ray.trainer_gpus", "the run needs 64 GPUs"]),
    ],
    ids=lambda value: value[0] if value[0].startswith(("-", "@")) else "",
)
def test_configuration_errors_are_reported_before_any_output(argv: list[str], says: list[str]) -> None:
    assert_refused(train(*argv), *says)
    assert not Path("D").exists()


def test_a_wrong_type_in_a_recipe_names_file_and_line(folder: Path) -> None:
    (folder / "wrong.toml").write_text('[trainer]\nsteps = "four"\n', encoding="utf-8")
    assert_refused(train("@wrong.toml"), "wrong.toml:2", "trainer.steps")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--model.source=./nowhere"], ["nowhere", "no such folder", "config.json"]),
        (["--model.source=smolm2-135m"], ["smolm2-135m", "smollm2-135m"]),
        (["--task.kind=file", "--task.path=nowhere.jsonl"], ["nowhere.jsonl", "task.path"]),
        (["--task.kind=file", "--task.path=rewards.py"], ["rewards.py, line 1", "one JSON object per line"]),
        (['--scoring.rewards=[{kind="python",function="rewards.py:rises"}]'], ["rewards.py", "rises", "did you mean"]),
        (["--engine.context_tokens=1000"], ["engine.context_tokens", "limit of 512", "lower it to 512"]),
    ],
    ids=["missing model", "unknown model", "missing prompts", "no prompts", "missing reward", "too long a context"],
)
def test_a_corrected_path_can_use_the_same_run_directory(argv: list[str], says: list[str]) -> None:
    assert_refused(train(*argv), *says)
    ran = train("--trainer.steps=1")  # another configuration: nothing was started, so it is accepted
    assert ran.code == 0, ran.err
    assert ran.data["steps"] == 1


def test_a_broken_line_is_reported_with_its_number(folder: Path) -> None:
    whole = json.dumps({"prompt": "1+1=", "answer": "2"})
    (folder / "prompts.jsonl").write_text(f'{whole}\n\n{whole}\n{{"prompt": "1+2=", "ans\n', encoding="utf-8")
    asked = ("--task.kind=file", "--task.path=prompts.jsonl")
    assert_refused(train(*asked), "prompts.jsonl, line 4", "broken JSON", "one JSON object per line")


def test_a_prompt_longer_than_the_context_is_reported(folder: Path) -> None:
    lines = [json.dumps({"prompt": f"{number}=", "answer": "1"}) for number in (*range(5), int("7" * 520))]
    (folder / "prompts.jsonl").write_text("\n".join(lines), encoding="utf-8")
    asked = ("--task.kind=file", "--task.path=prompts.jsonl")
    assert_refused(
        train(*asked), "prompts.jsonl, line 6", "'7777", "521 tokens", "context of 512", "shorten the prompt"
    )
    generated = run_here("generate", "7" * 520, "@char.toml", "--json")
    assert_refused(generated, "7777", "520 tokens", "512")


@pytest.mark.parametrize("damage", ["cut", "overwritten", "missing"])
def test_a_damaged_model_file_is_reported(folder: Path, damage: str) -> None:
    model = Path(run_here("model", "get", "char", "--model.char.hidden_size=32", "--json").data["path"])
    copy = folder / "model"
    copy.mkdir()
    for path in model.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    weights = copy / "model.safetensors"
    if damage == "cut":
        os.truncate(weights, weights.stat().st_size // 2)
    elif damage == "overwritten":
        weights.write_bytes(b"not a model" * 1000)
    else:
        weights.unlink()
    assert_refused(train(f"--model.source={copy}"), "model", "safetensors")


def test_a_tokenizer_with_more_ids_than_embeddings_is_refused(folder: Path) -> None:
    small, large = (
        Path(run_here("model", "get", "char", f"--model.char.alphabet={alphabet}", "--json").data["path"])
        for alphabet in ("0123456789+=", "0123456789+=abcdefgh")
    )
    shutil.copytree(small, folder / "model")
    shutil.copy(large / "tokenizer.json", folder / "model")
    assert_refused(train("--model.source=./model"), "model", "but the model has only", "embeddings")


def test_an_unwritable_run_directory_is_reported(folder: Path) -> None:
    (folder / "file").write_text("mine", encoding="utf-8")
    for place in ("file", "file/below"):
        assert_refused(
            train(f"--run.dir={place}"), place, "a file is in the way of the run directory", "another --run.dir"
        )
    assert (folder / "file").read_text(encoding="utf-8") == "mine"
    if Path("/proc").is_dir():
        assert_refused(train("--run.dir=/proc/run"), "/proc/run")


def test_an_unwritable_cache_is_reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = [folder / "char.toml" / "cache", Path("/proc/cache")] if Path("/proc").is_dir() else [folder / "char.toml"]
    for place in places:
        monkeypatch.setenv("TIDEMILL_CACHE", str(place))
        assert_refused(train(), str(place), "cache", "TIDEMILL_CACHE")


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("raises", "ValueError: no idea what to think of it (rewards.py:7 in raises)"),
        ("hangs", "no result within 0.2 s"),
        # tests/unit/scoring/test_scorer.py has more of the same kinds.
        pytest.param(
            "surrogate", "ValueError: half a pair: \\ud800 (rewards.py:19 in surrogate)", marks=pytest.mark.slow
        ),
        pytest.param("speechless", "Speechless: its __str__ raised KeyError", marks=pytest.mark.slow),
        ("stubborn", "no result within 0.2 s"),
        pytest.param("slow_number", "no result within 0.2 s", marks=pytest.mark.slow),
    ],
)
def test_a_failing_reward_invalidates_its_samples_and_is_reported(function: str, reason: str) -> None:
    rewards = f'--scoring.rewards=[{{kind="python",function="rewards.py:{function}"}}]'
    # In a new process: it must end although threads hang in the reward.
    shape = ("--trainer.steps=1", "--batch.prompts=4", "--batch.group_size=4", "--scoring.timeout_s=0.2")
    argv = ("train", "@char.toml", "--run.dir=D", rewards, *shape, "--scoring.concurrency=32", "--json")
    ran = run_fork(*argv, cwd=Path.cwd())
    assert ran.code == 0, ran.err
    lines = [json.loads(line) for line in Path("D/samples/step_000001.jsonl").read_text(encoding="utf-8").splitlines()]
    failed = [line for line in lines if len(line["completion"]) == 3]
    assert 0 < len(failed) < len(lines) == 16
    for line in lines:
        assert line["valid"] is (len(line["completion"]) < 3)
        assert line["weight"] == line["valid"]
    assert all(reason in line["reason"] and line["prompt_id"] in line["reason"] for line in failed)
    step = json.loads(Path("D/metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    assert step["samples_invalid"] == len(failed)
    # Reported once, for the first sample: in the evaluation before the first step, which calls this reward too.
    assert "warning: 3 of 4 samples of step 0 got no valid reward" in ran.err
    assert ran.err.count(reason) == 1


@pytest.mark.parametrize("steps", [1, 2])
def test_a_reward_that_always_fails_stops_the_run_with_its_first_exception(steps: int) -> None:
    rewards = '--scoring.rewards=[{kind="python",function="rewards.py:always"}]'
    argv = (rewards, f"--trainer.steps={steps}", "--batch.prompts=4", "--batch.group_size=4")
    for _ in range(2):  # the second session starts again, because nothing was learned
        ran = train(*argv)
        assert ran.code == 3, ran.err
        assert "no sample of this run got a valid reward" in ran.err.rpartition("error: ")[2]
    events = [json.loads(line) for line in Path("D/events.jsonl").read_text(encoding="utf-8").splitlines()]
    failed, _ = [event for event in events if event["event"] == "reward_failed"]
    assert failed["reason"].startswith(f"reward always: ValueError: cannot read {failed['response']!r} (rewards.py:")
    assert failed["prompt"]


def test_credentials_in_a_reward_url_are_not_written_to_files(folder: Path) -> None:
    ran = train('--scoring.rewards=[{kind="http",url="http://me:hush@localhost/score"}]')
    assert_refused(ran, "scoring.rewards", "credentials", "auth_env")
    assert "hush" not in ran.err + ran.out
    assert not (folder / "D").exists()


def test_weights_of_another_model_are_refused_on_resume(folder: Path) -> None:
    first, second = (
        run_here("model", "get", "char", "--model.char.hidden_size=32", f"--model.char.seed={seed}", "--json").data[
            "path"
        ]
        for seed in (0, 1)
    )
    (folder / "model").symlink_to(first)
    assert train("--model.source=./model", "--trainer.steps=1").code == 0
    (folder / "model").unlink()
    (folder / "model").symlink_to(second)
    assert_refused(train("--model.source=./model", "--trainer.steps=2"), "the model has changed", "another --run.dir")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The summary of an undisturbed run."""
    place = tmp_path_factory.mktemp("quiet")
    (place / "char.toml").write_text(CHAR, encoding="utf-8")
    summary: dict[str, Any] = run_here("train", f"@{place / 'char.toml'}", f"--run.dir={place / 'D'}", "--json").data
    return summary


def checkpoints(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_a_disk_that_fills_during_a_checkpoint(
    folder: Path, monkeypatch: pytest.MonkeyPatch, uninterrupted: dict[str, Any]
) -> None:
    write, written = PolicyTrainer.write_state, []

    def fills_up(trainer: PolicyTrainer, place: Path) -> None:
        written.append(place)
        if len(written) > 2:
            (place / "model.safetensors").write_bytes(b"half of it")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(place))
        write(trainer, place)

    with monkeypatch.context() as patch:
        patch.setattr(PolicyTrainer, "write_state", fills_up)
        assert_refused(train(), "disk is full", "checkpoint", "free")
    assert checkpoints(folder / "D") == ["step_1", "step_2"]
    assert json.loads((folder / "D/metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])["step"] == 3
    resumed = train()
    assert resumed.code == 0, resumed.err
    assert {name: resumed.data[name] for name in KEPT} == {name: uninterrupted[name] for name in KEPT}


@pytest.fixture
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system of 48 MB: little more than a checkpoint's free-space check asks for."""
    place = folder / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", str(place)], check=False, capture_output=True, timeout=10
    )
    if mounted.returncode:
        pytest.skip("no right to mount a small file system")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True, timeout=10)


@pytest.mark.parametrize("free_bytes", [200_000, 60_000, 4096, 0])
def test_a_full_disk(small_disk: Path, free_bytes: int, uninterrupted: dict[str, Any]) -> None:
    """In a checkpoint, a samples file, the ledger or the first file of the run."""
    run = small_disk / "run"
    begun = train(f"--run.dir={run}", "--trainer.steps=1", "--eval.every_steps=0")
    assert begun.code == 0, begun.err
    ballast = small_disk / "ballast"
    stat = os.statvfs(small_disk)
    ballast.write_bytes(b"x" * max(0, stat.f_bavail * stat.f_frsize - free_bytes))
    ran = train(f"--run.dir={run}", "--eval.every_steps=0")
    assert_refused(ran, str(run), "disk", "run the same command again")
    assert (run / "checkpoints" / "step_1").is_dir()
    assert not list((run / "checkpoints").glob(".*"))
    ballast.unlink()
    resumed = train(f"--run.dir={run}", "--eval.every_steps=0")
    assert resumed.code == 0, resumed.err
    assert {name: resumed.data[name] for name in KEPT} == {name: uninterrupted[name] for name in KEPT}


def test_a_small_checkpoint_needs_little_free_space(small_disk: Path) -> None:
    run = small_disk / "run"
    once = ("--eval.every_steps=0", "--checkpoint.keep_last=1", "--checkpoint.keep_best=false")
    begun = train(f"--run.dir={run}", "--trainer.steps=1", *once)
    assert begun.code == 0, begun.err
    files = [path for path in (run / "checkpoints" / "step_1").rglob("*") if path.is_file()]
    stat = os.statvfs(small_disk)
    free = 2 * sum(path.stat().st_size for path in files) + (1 << 20)  # two while one replaces the other; the ledger
    (small_disk / "ballast").write_bytes(b"x" * (stat.f_bavail * stat.f_frsize - free))
    ran = train(f"--run.dir={run}", *once)
    assert ran.code == 0, ran.err
