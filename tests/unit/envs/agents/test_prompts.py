"""Prompts of agents, the tasks that an environment makes, and its demonstrations."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from tests.agent_format import LineFormat
from tests.char_codec import CharCodec
from tidemill.config.agent import EnvConfig
from tidemill.config.task import ArithmeticTask, EnvironmentTask
from tidemill.core.errors import UserError
from tidemill.core.records import unpack_tokens
from tidemill.envs.agents.builtin import Calculator, Guess
from tidemill.envs.agents.demonstrations import agent_demonstrations
from tidemill.envs.agents.environment import Environment, Step
from tidemill.envs.agents.prompts import AgentPrompts
from tidemill.envs.agents.turn_plan import task_of
from tidemill.envs.text.build_task import build_task
from tidemill.envs.text.prompts import Task

TASKS = EnvironmentTask(kind="environment", train_size=30, held_out_size=10)


class Walk(Environment):
    """All tasks have one text."""

    def reset(self, task: dict[str, Any], seed: int) -> str:
        return "go"

    def step(self, action: str) -> Step:
        return Step(done=True)


class Overlapping(Walk):
    @classmethod
    def tasks(cls, split: str, count: int) -> list[dict[str, Any]]:
        return [{"seed": number} for number in range(count)]


class Repeating(Walk):
    """Half of the rows have no answer, and each is there twice."""

    @classmethod
    def tasks(cls, split: str, count: int) -> list[dict[str, Any]]:
        return [
            {"seed": number // 2, "split": split} | ({"answer": 7} if number % 4 < 2 else {"answer": None})
            for number in range(count)
        ]


class Raising(Walk):
    def reset(self, task: dict[str, Any], seed: int) -> str:
        raise OSError("no such device")


def prompts_of(environment: type[Environment], **params: Any) -> AgentPrompts:
    config = EnvConfig(name="tests.environments:X", params=params, turns=4)
    return AgentPrompts(environment=environment, config=config, format=LineFormat())


def task(environment: type[Environment], **params: Any) -> Task:
    agent = prompts_of(environment, **params)
    return build_task(TASKS, codec=CharCodec(), batch_prompts=4, seed=0, chat_template=False, agent=agent)


def test_an_environment_makes_the_tasks_of_both_sides() -> None:
    made = task(Guess)
    assert (made.train_size, made.held_out_size, made.default_stop_strings) == (30, 10, ("\n",))
    for prompt in made.source.held_out():
        assert task_of(prompt)["split"] == "held_out"
        low, high = map(int, prompt.text.strip().split("-"))
        assert low < high


def test_tasks_with_one_text_differ_by_their_row_and_by_the_environments_arguments() -> None:
    ids = {prompt.prompt_id for prompt in task(Walk).source.held_out()}
    assert len(ids) == 10
    assert task(Guess).digest != task(Guess, guesses=5).digest
    assert task(Guess).digest == task(Guess).digest


def test_repeated_tasks_and_missing_answers_are_counted() -> None:
    made = task(Repeating)
    assert (made.train_size, made.held_out_size, made.left_out) == (15, 5, {"repeated": 20})
    assert {prompt.answer for prompt in made.source.held_out()} == {"7", None}
    assert made.held_out_rows is not None
    # Of the rows 0, 1, ..., 9 those with a rest of 2 or 3 modulo 4: 2, 3, 6, 7.
    assert (made.held_out_rows.rows, made.held_out_rows.missing("answer")) == (10, 4)


@pytest.mark.parametrize(
    ("environment", "what"), [(Overlapping, "10 training tasks are also held-out"), (Raising, "no such device")]
)
def test_tasks_that_cannot_be_used_are_refused(environment: type[Environment], what: str) -> None:
    with pytest.raises(UserError, match=what):
        task(environment)


def test_rows_of_other_tasks_are_for_tools() -> None:
    arithmetic = ArithmeticTask()
    settings: dict[str, Any] = {"codec": CharCodec(), "batch_prompts": 4, "seed": 0, "chat_template": False}
    with pytest.raises(UserError, match="makes its own tasks"):
        build_task(arithmetic, agent=prompts_of(Walk), **settings)
    made = build_task(arithmetic, agent=prompts_of(Calculator), **settings)
    prompt = made.source.held_out(1)[0]
    assert prompt.messages[0].content == Calculator.system_prompt
    assert task_of(prompt)["prompt"] == prompt.messages[-1].content
    assert unpack_tokens(prompt.token_ids)


def test_demonstrations_are_episodes_with_the_teacher() -> None:
    agent = prompts_of(Guess, careful=1.0)
    prompts = task(Guess).source.held_out()
    for prompt, row in zip(prompts, agent_demonstrations(agent, prompts, chat_template=False), strict=True):
        assert row["prompt"] == prompt.text
        assert [turn["role"] for turn in row["completion"][:2]] in (["assistant"], ["assistant", "user"])
        assert row["completion"][-1]["role"] == "assistant"
        assert len(row["completion"]) <= 7  # four guesses always find one of 15 numbers
        environment = Guess()
        environment.reset(task_of(prompt), task_of(prompt)["seed"])
        *_, last = [environment.step(turn["content"]) for turn in row["completion"] if turn["role"] == "assistant"]
        assert (last.done, last.reward) == (True, 1.0)


class Verbose(Walk):
    """Its observations are too long, and it counts open episodes."""

    open: ClassVar[int] = 0

    def reset(self, task: dict[str, Any], seed: int) -> str:
        Verbose.open += 1
        return f"go {seed}"

    def step(self, action: str) -> Step:
        return Step("x" * 500)

    def demonstrate(self) -> str:
        return "a"

    def close(self) -> None:
        Verbose.open -= 1


def test_demonstrations_have_the_observations_of_episodes_and_close_them() -> None:
    prompts = task(Verbose).source.held_out()
    assert Verbose.open == 0
    agent = prompts_of(Verbose)
    rows = agent_demonstrations(agent, prompts, chat_template=False)
    assert Verbose.open == 0
    texts = [turn["content"] for row in rows for turn in row["completion"] if turn["role"] == "user"]
    assert texts
    assert all("tokens cut" in text and len(text) <= agent.config.observation_tokens for text in texts)


def test_an_environment_without_a_teacher_has_no_demonstrations() -> None:
    with pytest.raises(UserError, match="has no teacher"):
        agent_demonstrations(prompts_of(Walk), [], chat_template=False)
