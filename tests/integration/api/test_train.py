"""`tidemill.train` on a small model: results, extensions, resume, interrupts and errors."""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import tidemill as tm
from tests.commands import run_fork
from tests.rewards import digits
from tidemill.telemetry.metrics import read_metrics

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b), "level": a} for a in range(8) for b in range(8)]
SMALL: dict[str, Any] = {
    "model.char.layers": 1,
    "model.char.hidden_size": 32,
    "model.char.heads": 2,
    "batch.prompts": 4,
    "batch.group_size": 4,
    "trainer.steps": 3,
    "trainer.threads": 1,
    "engine.batch_invariant": True,
    "eval.every_steps": 0,
    "checkpoint.every_steps": 1,
    "sampling.max_new_tokens": 2,
}

BUILT_IN = {"scoring.rewards": [{"kind": "regex", "pattern": "^[0-9]"}]}
"""Rewards that need no process of functions."""


def small(tmp_path: Path, name: str = "run", **arguments: Any) -> tm.Run:
    overrides = SMALL | arguments.pop("overrides", {})
    if "rewards" not in arguments:
        overrides = BUILT_IN | overrides
    arguments.setdefault("data", ROWS)
    return tm.train("char-addition", overrides=overrides, run_dir=tmp_path / name, **arguments)


@tm.advantage
def like_grpo(rewards: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    from tidemill.algos.advantages import grpo

    return grpo(rewards, valid)


def test_a_run_has_metrics_samples_checkpoints_and_a_report(tmp_path: Path) -> None:
    run = small(tmp_path, rewards=[digits])
    assert run.finished
    assert [line["step"] for line in run.metrics] == [0, 1, 2, 3]
    assert len(run.samples(training=True)) == 3 * 4 * 4
    assert run.checkpoint == tmp_path / "run" / "checkpoints" / "step_3"
    assert run.report().read_text().lstrip().startswith("<!doctype html>")
    assert "step" in tm.Run(tmp_path / "run")._repr_html_()
    assert tm.generate("1+2=", model=run)[0]["prompt"] == "1+2="
    assert tm.evaluate(model=run, data=ROWS[:5], rewards=[digits])["n"] == 5


def test_an_advantage_equal_to_grpo_gives_the_bits_of_the_built_in_one(tmp_path: Path) -> None:
    assert small(tmp_path, "own", advantage=like_grpo).weights_digest == small(tmp_path, "built-in").weights_digest


def test_functions_of_a_file_give_the_same_weights_as_from_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import tidemill as tm\n"
        "@tm.reward\ndef digits(completion):\n    return sum(map(str.isdigit, completion)) / 2\n"
        "@tm.advantage\ndef centred(rewards, valid):\n    return (rewards - rewards[valid].mean()) * valid\n"
        "@tm.loss_term\ndef pull(logprobs, advantages, mask):\n    return -logprobs * mask * (advantages > 0)\n"
    )
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(f'{{"prompt": "{row["prompt"]}", "answer": "{row["answer"]}"}}' for row in ROWS))
    run = small(
        tmp_path,
        data=data,
        rewards=[f"{file}:digits"],
        advantage=f"{file}:centred",
        loss_terms=[(0.1, f"{file}:pull")],
    )
    words = [f"--{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in SMALL.items()]
    command = [
        *("train", "@char-addition", "--task.kind=file", f"--task.path={data}", *words),
        f'--scoring.rewards=[{{ kind = "python", function = "{file}:digits" }}]',
        f"--algorithm.advantage={file}:centred",
        f'--algorithm.loss_terms=[{{ function = "{file}:pull", weight = 0.1 }}]',
        f"--run.dir={tmp_path / 'cli'}",
    ]
    ran = run_fork(*command, cwd=tmp_path)
    assert ran.code == 0, ran.err
    assert tm.Run(tmp_path / "cli").weights_digest == run.weights_digest
    plain = small(tmp_path, "plain", data=data, rewards=[f"{file}:digits"], advantage=f"{file}:centred")
    assert plain.weights_digest != run.weights_digest  # the term has an effect


SCRIPT = """
    import os, sys
    import tidemill as tm
    from tests.integration.api.test_train import ROWS, SMALL, like_grpo
    from tests.rewards import digits

    class Kill(tm.Callback):
        def on_step(self, step, metrics):
            if sys.argv[2:] == [str(step)]:
                os.kill(os.getpid(), 9)

    def right(completion, answer):  # defined in this script: cannot be imported
        return float(completion.strip() == answer) + 0.1

    if __name__ == "__main__":
        run = tm.train("char-addition", data=ROWS, rewards=[right, digits], advantage=like_grpo, overrides=SMALL,
                       callbacks=[Kill()], run_dir=sys.argv[1])
        print(run.weights_digest)
"""


def script(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    file = tmp_path / "script.py"
    file.write_text(textwrap.dedent(SCRIPT))
    root = Path(__file__).resolve().parents[3]
    start = f"import runpy, sys; sys.path.insert(0, {str(root)!r}); runpy.run_path({str(file)!r}, run_name='__main__')"
    command = [sys.executable, "-c", start, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, cwd=tmp_path)


@pytest.mark.slow  # test_durability.py resumes killed runs, and the test below a run of Python functions
def test_a_killed_run_resumes_from_python_with_the_same_weights(tmp_path: Path) -> None:
    whole = script(tmp_path, "whole")
    assert script(tmp_path, "killed", "2").returncode == -signal.SIGKILL
    resumed = script(tmp_path, "killed")
    assert resumed.returncode == 0, resumed.stderr
    assert resumed.stdout == whole.stdout


def test_a_callback_stops_the_run_and_the_same_call_resumes_it(tmp_path: Path) -> None:
    class Stop(tm.Callback):
        def on_step(self, step: int, metrics: Any) -> None:
            seen.append(step)
            if step == 2:
                self.stop("far enough")
                raise ValueError("reported, not fatal")

    seen: list[int] = []
    whole = small(tmp_path, "whole")
    first = small(tmp_path, callbacks=[Stop()])
    assert first.interrupted
    assert seen == [1, 2]
    assert small(tmp_path).weights_digest == whole.weights_digest
    (failed,) = (event for event in first.events if event["event"] == "callback_failed")
    assert failed["error"] == "ValueError: reported, not fatal"


def test_a_continued_run_keeps_its_learning_rate_schedule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where all its steps are repeated from the journal, because no checkpoint was left."""
    falling = {"optimizer.schedule": "linear", "optimizer.min_learning_rate_ratio": 0.25, "batch.minibatches": 2}
    first, longer = (falling | {"optimizer.learning_rate": 4e-3, "trainer.steps": steps} for steps in (2, 3))
    small(tmp_path, overrides=first)
    before = read_metrics(tmp_path / "run" / "metrics.jsonl")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    assert "stay at the minimum" not in capsys.readouterr().err
    run = small(tmp_path, overrides=longer)
    after = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [line.weights_digest for line in after[:3]] == [line.weights_digest for line in before]
    # of the last optimizer step: 2 and 4 of 4 on the line 4, 3, 2, 1
    assert [line["learning_rate"] for line in run.metrics[1:]] == pytest.approx([3e-3, 1e-3, 1e-3])
    assert "steps 5 to 6 of the run stay at the minimum, 0.001" in capsys.readouterr().err


def test_callbacks_see_samples_evaluations_and_checkpoints(tmp_path: Path) -> None:
    class Watch(tm.Callback):
        def on_samples(self, step: int, samples: Any) -> None:
            seen.append(("samples", step, len(samples)))

        def on_evaluate(self, step: int, metrics: Any) -> None:
            seen.append(("evaluation", step, round(metrics["reward_mean"], 6) >= 0))

        def on_checkpoint(self, step: int, path: Path) -> None:
            seen.append(("checkpoint", step, (path / "config.json").is_file()))

    seen: list[Any] = []
    small(tmp_path, callbacks=[Watch()], overrides={"trainer.steps": 1})
    assert ("samples", 1, 16) in seen
    assert ("evaluation", 0, True) in seen
    assert ("checkpoint", 1, True) in seen


@tm.prompt_sampler
def hardest(step: int, count: int, rows: list[dict[str, Any]], results: list[list[float]]) -> list[int]:
    """Never visited prompts first, then those with the lowest reward."""
    if step == 1:
        assert {"prompt", "answer", "level"} <= set(rows[0])
        assert not any(results)
    if step == 3:
        assert sum(map(len, results)) == 2 * count
    return sorted(range(len(rows)), key=lambda row: (len(results[row]), results[row], row))[:count]


def test_a_prompt_sampler_selects_the_prompts_and_is_resumed(tmp_path: Path) -> None:
    run = small(tmp_path, prompt_sampler=hardest)
    prompts = [{sample.prompt for sample in run.samples(training=True) if sample.step == step} for step in (1, 2, 3)]
    assert [len(each) for each in prompts] == [4, 4, 4]
    assert len(set().union(*prompts)) == 12
    small(tmp_path, "parts", prompt_sampler=hardest, overrides={"trainer.steps": 1})
    assert small(tmp_path, "parts", prompt_sampler=hardest).weights_digest == run.weights_digest


@pytest.mark.parametrize(("result", "says"), [([0, 0, 1, 2], "returned [0, 0, 1, 2]"), (None, "TypeError")])
def test_a_prompt_sampler_that_returns_something_else_is_refused(tmp_path: Path, result: Any, says: str) -> None:
    def sampler(step: int) -> Any:
        return result

    with pytest.raises(tm.TidemillError) as caught:
        small(tmp_path, prompt_sampler=sampler)
    assert says in str(caught.value)


def test_a_task_is_a_function_that_returns_rows(tmp_path: Path) -> None:
    @tm.task
    def sums(largest: int) -> dict[str, Any]:
        rows = [{"prompt": f"{a}+1=", "answer": a + 1} for a in range(largest)]
        return {"train": rows[2:], "held_out": rows[:2]}

    run = small(tmp_path, data=None, task=sums, task_params={"largest": 9})
    assert run.summary["eval"]["n"] == 2
    with pytest.raises(tm.TidemillError, match="unexpected keyword"):
        small(tmp_path, "other", data=None, task=sums, task_params={"smallest": 9})


def test_callbacks_and_functions_of_a_recipe(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import tidemill as tm\n"
        "class Watch(tm.Callback):\n    def on_step(self, step, metrics):\n        self.stop('once')\n"
    )
    assert small(tmp_path, overrides={"telemetry.callbacks": [f"{file}:Watch"]}).summary["steps"] == 1
    with pytest.raises(tm.TidemillError, match="is not a callback"):
        small(tmp_path, "other", overrides={"telemetry.callbacks": ["math:sqrt"]})


def test_a_changed_function_is_refused_on_resume(tmp_path: Path) -> None:
    def reward_with(constant: float) -> Any:
        def score(completion: str) -> float:
            return len(completion) * constant

        return score

    small(tmp_path, rewards=[reward_with(1.0)], overrides={"trainer.steps": 1})
    small(tmp_path, rewards=[reward_with(1.0)])
    with pytest.raises(tm.TidemillError, match="reward session:score has changed since this run started"):
        small(tmp_path, rewards=[reward_with(2.0)], overrides={"trainer.steps": 4})


def test_rows_that_changed_are_refused_on_resume(tmp_path: Path) -> None:
    small(tmp_path, overrides={"trainer.steps": 1})
    with pytest.raises(tm.TidemillError, match="the rows have changed"):
        small(tmp_path, data=ROWS[1:])


def test_evaluation_sets_are_saved_and_reported(tmp_path: Path) -> None:
    sums = [{"prompt": f"{a}+9=", "answer": str(a + 9)} for a in range(5)]
    first = {"trainer.steps": 1}
    run = small(tmp_path, eval_sets={"sums": sums, "of-a-file": tmp_path / "run/inputs/train.jsonl"}, overrides=first)
    assert [run.metrics[-1][f"eval/{name}/n"] for name in ("sums", "of-a-file")] == [5, 64]
    assert (tmp_path / "run/inputs/eval-sums.jsonl").is_file()
    again = small(tmp_path, eval_sets={"sums": sums, "new": ROWS[:3]})
    assert again.metrics[-1]["eval/new/n"] == 3
    assert tm.evaluate(again)["sets"]["new"]["n"] == 3
    assert "sets" not in tm.evaluate(again, data=sums)
    with pytest.raises(tm.TidemillError, match="eval_sets, sums: the rows have changed"):
        small(tmp_path, eval_sets={"sums": sums[1:]})
    (tmp_path / "other.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}')
    with pytest.raises(tm.TidemillError, match=r"eval\.sets, sums: the prompts of this set have changed"):
        small(tmp_path, eval_sets={"sums": tmp_path / "other.jsonl"}, overrides={"trainer.steps": 4})


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (ROWS, "eval_sets: expected a dict, found list"),
        ({"a/b": ROWS}, "eval_sets: 'a/b' is not a folder name"),
        ({"a": [1]}, 'eval_sets["a"][0]: expected a dict, found int'),
        ({"a": [{"answer": "1"}]}, 'eval_sets["a"][0]: expected either `prompt` or `messages`, found `answer`'),
    ],
)
def test_invalid_evaluation_sets_are_refused(tmp_path: Path, given: Any, says: str) -> None:
    with pytest.raises(tm.TidemillError) as caught:
        small(tmp_path, eval_sets=given)
    assert says in str(caught.value)


def test_a_run_directory_alone_resumes_the_run(tmp_path: Path) -> None:
    small(tmp_path, overrides={"trainer.steps": 1})
    run = tm.train(run_dir=tmp_path / "run", overrides={"trainer.steps": 2})
    assert run.summary["steps"] == 2


async def test_train_async_leaves_the_event_loop_free(tmp_path: Path) -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0.01)

    ticking = asyncio.create_task(tick())
    run = await tm.train_async("char-addition", data=ROWS, rewards=[digits], overrides=SMALL, run_dir=tmp_path / "run")
    ticking.cancel()
    assert run.finished
    assert ticks > 10


async def test_train_blocks_inside_a_running_event_loop(tmp_path: Path) -> None:
    assert small(tmp_path).finished  # as in a notebook


async def test_a_cancelled_run_ends_with_a_checkpoint(tmp_path: Path) -> None:
    started = asyncio.Event()
    loop = asyncio.get_running_loop()

    class Started(tm.Callback):
        def on_step(self, step: int, metrics: Any) -> None:
            loop.call_soon_threadsafe(started.set)

    overrides = SMALL | {"trainer.steps": 10_000, "checkpoint.every_steps": 0}
    arguments: dict[str, Any] = {"data": ROWS, "rewards": [digits], "callbacks": [Started()]}
    task = asyncio.create_task(
        tm.train_async("char-addition", overrides=overrides, run_dir=tmp_path / "run", **arguments)
    )
    await asyncio.wait_for(started.wait(), 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    run = tm.Run(tmp_path / "run")
    assert run.interrupted
    assert run.checkpoint.name == f"step_{run.summary['steps']}"


def test_a_second_run_at_the_same_time_is_refused(tmp_path: Path) -> None:
    refused: list[str] = []

    class Second(tm.Callback):
        def on_step(self, step: int, metrics: Any) -> None:
            def start() -> None:
                try:
                    small(tmp_path, "second")
                except tm.TidemillError as error:
                    refused.append(str(error))

            thread = threading.Thread(target=start)
            thread.start()
            thread.join(30)

    small(tmp_path, callbacks=[Second()], overrides={"trainer.steps": 1})
    assert refused
    assert "a run is in progress" in refused[0]


def test_the_process_is_left_as_it_was(tmp_path: Path) -> None:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    threads = torch.get_num_threads()
    small(tmp_path)
    assert {number: signal.getsignal(number) for number in handlers} == handlers
    assert torch.get_num_threads() == threads


def returns(value: Any) -> Any:
    @tm.advantage
    def advantage(rewards: torch.Tensor) -> Any:
        return value

    return advantage


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ([1.0], "returned 1 values for 4 samples"),
        ("text", "returned a str"),
        ([1.0, 2.0, 3.0, float("nan")], "not finite"),
        ([[1.0]] * 4, "for a sample of"),
    ],
)
def test_an_advantage_that_returns_something_else_is_refused(tmp_path: Path, value: Any, says: str) -> None:
    with pytest.raises(tm.TidemillError) as caught:
        small(tmp_path, advantage=returns(value))
    assert says in str(caught.value)


def test_data_from_several_sources_with_weights(tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text("".join(f'{{"prompt": "{a}+1+1=", "answer": {a}, "level": 0}}\n' for a in range(9)))
    run = small(tmp_path, data=[(3, ROWS), (1, other)])
    assert {sample.prompt.count("+") for sample in run.samples(training=True)} == {1, 2}
    assert [each["weight"] for each in run.config.model_dump()["task"]["sources"]] == [3, 1]


def test_other_arguments_that_cannot_work_are_refused(tmp_path: Path) -> None:
    @tm.advantage
    def unknown(rewards: Any, prices: Any) -> Any:
        return rewards

    @tm.loss_term
    def constant(advantages: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(advantages)

    def raises(logprobs: torch.Tensor) -> torch.Tensor:
        raise KeyError("x")

    cases: list[tuple[dict[str, Any], str]] = [
        ({"advantage": unknown}, "`prices`, which does not exist"),
        ({"advantage": digits}, "decorated as a reward"),
        ({"advantage": "nothing"}, "neither one of grpo"),
        ({"loss_terms": [constant]}, "has no gradient"),
        ({"loss": raises}, "raised KeyError: 'x'"),
        ({"rewards": [digits, digits]}, "two rewards are named digits"),
        ({"rewards": [3]}, "is not a function"),
        ({"data": {"prompt": []}}, "expected rows"),
        ({"data": [3]}, "data[0]"),
        ({"task": lambda: ROWS}, "data and task are both given"),
        ({"data": [(1, ROWS), ("a", ROWS)]}, "expected a (weight, data) pair"),
        ({"data": [(0, ROWS)]}, "weights of sources sum to zero"),
        ({"model": object()}, "expected a name, a folder or a transformers model"),
        ({"callbacks": [print]}, "is not a tidemill.Callback"),
        ({"overrides": {"trainer.stepz": 3}}, "did you mean trainer.steps?"),
    ]
    for number, (arguments, says) in enumerate(cases):
        with pytest.raises(tm.TidemillError) as caught:
            small(tmp_path, f"run-{number}", **arguments)
        assert says in str(caught.value)
    with pytest.raises(tm.TidemillError, match="no such file"):
        tm.train("no-such-recipe")


def test_a_loaded_model_is_saved_and_not_changed(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    start = small(tmp_path, "start").checkpoint
    model = transformers.AutoModelForCausalLM.from_pretrained(start)
    tokenizer = transformers.AutoTokenizer.from_pretrained(start)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    run = small(tmp_path, model=model, tokenizer=tokenizer)
    assert run.weights_digest != tm.Run(tmp_path / "start").weights_digest
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    with pytest.raises(tm.TidemillError, match="a transformers model needs its tokenizer"):
        small(tmp_path, "none", model=model)
