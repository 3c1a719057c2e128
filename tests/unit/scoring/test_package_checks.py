"""Answers scored by a package in the sandbox: the package's own scores, whatever other answers do."""

from __future__ import annotations

import asyncio
import pickle
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.char_codec import CharCodec
from tests.sandboxes import need_bubblewrap
from tidemill.config.sandbox import SandboxConfig
from tidemill.config.task import ReasoningGymTask
from tidemill.core.errors import UserError
from tidemill.core.records import Prompt, SampleId
from tidemill.data.build_task import build_task
from tidemill.data.prompts import PackageCheck, Task
from tidemill.extensions.calls import CallError
from tidemill.scoring import package_checks
from tidemill.scoring.batch_rewards import RewardInput
from tidemill.scoring.package_checks import PackageReward, check_program

gym = pytest.importorskip("reasoning_gym")
pytestmark = pytest.mark.xdist_group("package checks")  # share the programs of `judges`

GENERATORS = [
    ("countdown", "simple_integration", "string_insertion"),
    pytest.param(
        ("puzzle24", "polynomial_multiplication", "polynomial_equations", "intermediate_integration", "spiral_matrix"),
        marks=pytest.mark.slow,  # each starts a program
    ),
]
"""All but polynomial_equations evaluate an answer as Python."""
RIGHT = {"countdown": lambda prompt: prompt.metadata["expression"]}


@cache
def task_of(name: str) -> Task:
    config = ReasoningGymTask.model_validate(
        {"kind": "reasoning_gym", "name": name, "train_size": 10, "held_out_size": 17}
    )
    return build_task(config, codec=CharCodec(), batch_prompts=5, seed=0, chat_template=False)


def sample(prompt: Prompt, answer: str) -> RewardInput:
    named = SampleId(run_seed=0, purpose="train", prompt_id=prompt.prompt_id, epoch=0, index=0)
    return RewardInput(prompt=prompt, completion=f"<answer>{answer}</answer>", completion_tokens=1, sample_id=named)


class Judges:
    """A reward for each generator, kept for several tests."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._rewards: dict[str, PackageReward] = {}

    def scores(self, asked: dict[str, list[RewardInput]]) -> dict[str, list[Any]]:
        return self._runner.run(self._scores(asked))

    def close(self) -> None:
        for reward in self._rewards.values():
            self._runner.run(reward.close())
        self._runner.close()

    async def _scores(self, asked: dict[str, list[RewardInput]]) -> dict[str, list[Any]]:
        results = await asyncio.gather(*(self._of_one(name, samples) for name, samples in asked.items()))
        return dict(zip(asked, results, strict=True))

    async def _of_one(self, name: str, samples: list[RewardInput]) -> list[Any]:
        if name not in self._rewards:
            check = task_of(name).check
            assert check is not None
            self._rewards[name] = PackageReward(check, SandboxConfig(), timeout_s=30, most=1)
        return await asyncio.gather(*map(self._rewards[name], samples), return_exceptions=True)


@pytest.fixture(scope="module")
def judges() -> Iterator[Judges]:
    need_bubblewrap()
    made = Judges()
    yield made
    made.close()


def right_answer(name: str, prompt: Prompt) -> str:
    return str(RIGHT.get(name, lambda prompt: prompt.answer)(prompt))


@pytest.mark.parametrize("names", GENERATORS)
def test_ordinary_answers_get_the_packages_own_scores(names: tuple[str, ...], judges: Judges) -> None:
    draw = random.Random(0)
    asked, own = {}, {}
    for name in names:
        check = task_of(name).check
        assert check is not None
        dataset = gym.create_dataset(name, **check.params["settings"])
        samples, scores = [], []
        for prompt in task_of(name).source.held_out():
            right = right_answer(name, prompt)
            assert prompt.answer is not None
            wrong = [prompt.answer[::-1], f"{draw.randrange(99)} + sqrt(4)*x", str(draw.choice(["", "?", "[1, 2]"]))]
            for answer in (right, *wrong):
                samples.append(sample(prompt, answer))
                scores.append(float(dataset.score_answer(answer.strip(), pickle.loads(check.entry(prompt)))))
        asked[name], own[name] = samples, scores
    assert sum(map(len, own.values())) >= 200
    assert len({score for scores in own.values() for score in scores}) > 3
    assert judges.scores(asked) == own


@pytest.mark.parametrize("names", GENERATORS)
def test_an_answer_that_runs_code_reaches_nothing_and_changes_no_other_score(
    names: tuple[str, ...], judges: Judges, tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    hostile = (
        f'__import__("os").system("touch {mark}")',
        f'["x", __import__("os").system("touch {mark}")]',
        f'open("{mark}", "w")',
        '__import__("os")._exit(0)',
        'eval("exit()")',
        f'Sum(Symbol(\'__import__("os").system("touch {mark}")\')**n/factorial(n), (n, 0, oo))',
        "(" * 3000 + "1" + ")" * 3000,
    )
    asked = {}
    for name in names:
        first = task_of(name).source.held_out()[0]
        right = sample(first, right_answer(name, first))
        asked[name] = [each for text in hostile for each in (sample(first, text), right)]
    for name, scores in judges.scores(asked).items():
        assert scores[1::2] == [1.0] * len(hostile), name
        assert all(isinstance(score, CallError) or score < 1 for score in scores[::2]), name
    assert not mark.exists()


def test_an_answer_does_not_read_the_right_one(judges: Judges) -> None:
    reads = {
        "n_queens": "[row.split() for row in valid_solutions[0].splitlines()]",
        "spiral_matrix": "oracle_answer.split()",
        "binary_matrix": 'entry["answer"].split()',
    }
    asked = {name: [sample(task_of(name).source.held_out()[0], text)] for name, text in reads.items()}
    assert judges.scores(asked) == {name: [0.0] for name in reads}


def test_an_answer_does_not_change_what_scores_the_next_one(judges: Judges) -> None:
    first = task_of("simple_integration").source.held_out()[0]
    right = right_answer("simple_integration", first)
    change = "[0 for Add.diff in [Integer]]"
    texts = [f"{change}", f"[{right}, {change}][0]", f'"{change}"', f'["{change}"]', right]
    (scores,) = judges.scores({"simple_integration": [sample(first, text) for text in texts]}).values()
    assert scores == [0.0, 0.0, 0.0, 0.0, 1.0]


async def test_the_sandbox_holds_where_the_hook_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_bubblewrap()
    program, mark = tmp_path / "programs" / "check_answers.py", tmp_path / "mark"
    program.parent.mkdir()
    text = package_checks.PROGRAM.read_text()
    assert text.count("sys.addaudithook(_refuse)") == 1
    program.write_text(text.replace("sys.addaudithook(_refuse)", "pass"))
    monkeypatch.setattr(package_checks, "PROGRAM", program)
    monkeypatch.setattr(package_checks, "ATTEMPTS", 1)
    check = task_of("countdown").check
    assert check is not None
    reward = PackageReward(check, SandboxConfig(), timeout_s=1, most=1)
    first = task_of("countdown").source.held_out()[0]
    code = '__import__("os").'
    expected: dict[str, float | str] = {
        f'{code}system("touch {mark}")': 0.05,  # no fork is left to it: -1, which is a wrong number
        f"{code}_exit(0)": "the process that scored it ended",
        f"{code}abort()": "the process that scored it ended",
        f"{code}kill({code}getppid(), 9)": "the sandbox of reasoning_gym ended 1 times",
        '__import__("time").sleep(9)': "no result within 1 s",
        "9**9**9**9": "no result within 1 s",
        "99999999!": "no result within 1 s",
        '"x" * 10**9': 0.01,
    }
    for answer, outcome in expected.items():
        (found,) = await asyncio.gather(reward(sample(first, answer)), return_exceptions=True)
        assert found == outcome or str(outcome) in str(found), answer
        assert await reward(sample(first, right_answer("countdown", first))) == 1.0, answer
    await reward.close()
    assert not mark.exists()


def test_a_program_that_does_not_start_is_an_error_with_its_reason() -> None:
    need_bubblewrap()
    check = PackageCheck(package="math_verify", params={"a": 1}, entry=lambda _: b"", answer=str)
    with pytest.raises(UserError, match="math_verify does not start in the sandbox: TypeError"):
        check_program(check, SandboxConfig())


async def test_math_verify_can_be_scored_in_the_sandbox_too() -> None:
    need_bubblewrap()
    check = PackageCheck(package="math_verify", entry=lambda prompt: pickle.dumps(prompt.answer), answer=str)
    reward = PackageReward(check, SandboxConfig(), timeout_s=20, most=1)
    prompt = Prompt(prompt_id="p", token_ids=b"", text="", answer=r"$\sqrt{2}$")
    runs_code = r"$\sum_{n=0}^{\infty} \text{[0for[copyright.__class__.a]in[[1]]]}^n/n!$"
    assert await reward(sample(prompt, r"$\frac{2}{\sqrt{2}}$")) == 1.0
    assert await reward(sample(prompt, runs_code)) == 0.0
    assert await reward(sample(prompt, r"$\sqrt{2}$")) == 1.0
    await reward.close()
