"""Prompts of agents, the tasks that an environment makes, and its demonstrations."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests import agent_environments as envs
from tests.agent_format import LineFormat
from tests.char_codec import CharCodec
from tests.task_environments import Overlapping, Raising, Repeating, Rows, Walk
from tidemill.agents.builtin import Calculator, Guess
from tidemill.agents.demonstrations import agent_demonstrations
from tidemill.agents.environment import Environment
from tidemill.agents.prompts import AgentPrompts
from tidemill.agents.turn_plan import task_of
from tidemill.config.agent import EnvConfig
from tidemill.config.task import ArithmeticTask, EnvironmentTask
from tidemill.core.errors import UserError
from tidemill.core.records import Prompt, unpack_tokens
from tidemill.data.build_task import build_task
from tidemill.data.prompts import Task

TASKS = EnvironmentTask(kind="environment", train_size=30, held_out_size=10)


def prompts_of(environment: type[Environment], **settings: Any) -> AgentPrompts:
    """With settings of the environment and of its class."""
    keys = {key: value for key, value in settings.items() if key in EnvConfig.model_fields}
    params = {key: value for key, value in settings.items() if key not in keys}
    config = EnvConfig(name="tests.environments:X", params=params, turns=4, **keys)
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


def lesson(environment: type[Environment] = envs.Lesson, count: int = 2, **params: Any) -> tuple[Any, list[Prompt]]:
    """What makes its demonstrations, and prompts of an undisturbed environment."""
    rows = [{"seed": number, "prompt": f"go {number}"} for number in range(count)]
    prompts = [
        Prompt(prompt_id=str(number), token_ids=b"", text=f"go {number}", answer="", metadata={"task": row})
        for number, row in enumerate(rows)
    ]
    return prompts_of(environment, call_timeout_s=0.6, **params), prompts


def test_demonstrations_have_the_observations_of_episodes_and_close_them(tmp_path: Path) -> None:
    agent, prompts = lesson(count=6, folder=str(tmp_path))
    rows = agent_demonstrations(agent, prompts, chat_template=False)
    assert [row["prompt"] for row in rows] == [prompt.text for prompt in prompts]
    texts = [turn["content"] for row in rows for turn in row["completion"] if turn["role"] == "user"]
    assert len(texts) == 6 * 2
    assert all("tokens cut" in text and len(text) <= agent.config.observation_tokens for text in texts)
    lines = [line for file in tmp_path.iterdir() for line in file.read_text().splitlines()]
    assert (lines.count("reset"), lines.count("close")) == (6, 6)


@pytest.mark.parametrize(
    ("environment", "method", "how", "what"),
    [
        (envs.Lesson, "step", "exit", "Lesson.step: its process ended with exit code 0"),
        (envs.Lesson, "step", "sleep", "Lesson.step did not return within 0.6 s"),
        (envs.Lesson, "step", "raise", "Lesson.step raised ConnectionError: no service"),
        (envs.Lesson, "demonstrate", "raise", "Lesson.demonstrate raised ConnectionError: no service (agent_environ"),
        (envs.ToolLesson, "look", "sleep", "ToolLesson.look did not return within 0.6 s"),
        (envs.ToolLessonOnce, "look", "exit", "ToolLessonOnce.look: its process ended with exit code 0"),
    ],
)
def test_failing_demonstrations_end_with_the_name_of_what_failed(
    environment: type[Environment], method: str, how: str, what: str, tmp_path: Path
) -> None:
    agent, prompts = lesson(environment, attempts=2, method=method, how=how)
    reports: list[str] = []
    with pytest.raises(UserError, match=re.escape(f"2 episodes of tests.environments:X failed; the first: {what}")):
        agent_demonstrations(agent, prompts, chat_template=False, report=reports.append)
    assert [report.partition(";")[0][:60] for report in reports] == [f"warning: {what}"[:60]]
    once, prompts = lesson(environment, method=method, how=how, mark=str(tmp_path / "mark"))
    undisturbed, _ = lesson(environment)
    expected = agent_demonstrations(undisturbed, prompts, chat_template=False)
    rows = agent_demonstrations(once, prompts, chat_template=False)
    if environment is envs.ToolLessonOnce:
        assert len(rows) == len(expected) - 1
    else:
        assert rows == expected


@pytest.mark.parametrize(
    ("method", "how", "what"),
    [
        ("tasks", "exit", "Lesson.tasks: its process ended with exit code 0\n  correct tasks()"),
        ("tasks", "raise", "Lesson.tasks raised ConnectionError: no service (agent_environments.py:"),
        ("reset", "exit", "Lesson.reset: its process ended with exit code 0\n  correct reset()"),
        ("reset", "sleep", "Lesson.reset did not return within 0.6 s\n  correct reset()"),
    ],
)
def test_tasks_that_cannot_be_made_are_refused(method: str, how: str, what: str) -> None:
    with pytest.raises(UserError, match=re.escape(f"tests.environments:X, train: {what}")):
        task(envs.Lesson, call_timeout_s=0.6, attempts=2, method=method, how=how)


def test_rows_may_have_scalars_of_numpy() -> None:
    made = task(Rows, kind="scalars")
    assert [task_of(prompt) for prompt in made.source.held_out(2)] == [{"seed": each, "share": 0.5} for each in (0, 1)]


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("empty", "Rows.tasks returned no rows"),
        ("none", "Rows.tasks returned NoneType instead of a list of tables"),
        ("numbers", "Rows.tasks returned int instead of a table"),
        ("sets", "Rows.tasks returned a row that JSON cannot express: TypeError: set is not a type of JSON"),
        ("surrogates", "Rows.tasks returned a row that JSON cannot express: UnicodeEncodeError: .* surrogates not"),
    ],
)
def test_rows_that_are_no_tables_are_refused(kind: str, what: str) -> None:
    with pytest.raises(UserError, match=what):
        task(Rows, kind=kind)


async def test_tasks_are_made_while_an_event_loop_runs() -> None:
    assert task(Walk).train_size == 30


def test_an_environment_without_a_teacher_has_no_demonstrations() -> None:
    with pytest.raises(UserError, match="has no teacher"):
        agent_demonstrations(prompts_of(Walk), [], chat_template=False)
