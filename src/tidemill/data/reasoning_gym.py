"""Tasks of the reasoning-gym package, scored by its own functions, which evaluate answers as Python, in a sandbox."""

from __future__ import annotations

import dataclasses
import difflib
import json
import pickle
import random
import time
from collections.abc import Mapping
from typing import Any

from tidemill.config.task import ReasoningGymTask
from tidemill.core.errors import UserError
from tidemill.core.records import Message
from tidemill.data.prompts import (
    Item,
    ListedSource,
    PackageCheck,
    Render,
    Task,
    after_system,
    content_digest,
    content_id,
    hash_share,
    in_content_order,
    longest_prompt,
    question_key,
)
from tidemill.data.row_files import import_extra

DATA_SEED = 0
"""Seed of the generator; every run seed trains and evaluates on the same prompts."""
GENERATION_TIMEOUT_S = 300
"""Checked between prompts."""
TRIES_PER_PROMPT = 20
"""After this number of repeated prompts in a row, the generator is considered exhausted."""
OPENS, CLOSES = "<answer>", "</answer>"


def build_reasoning_gym(config: ReasoningGymTask, *, batch_prompts: int, seed: int, render: Render) -> Task:
    """The task of one generator.

    Raises:
        UserError: the package is missing, the generator unknown, its parameters invalid or its prompts too few.
    """
    dataset = _create(config)
    entries, train, held_out = _collect(config, dataset)
    return Task(
        source=ListedSource(train, in_content_order(held_out), batch_prompts=batch_prompts, seed=seed, render=render),
        default_stop_strings=(),
        check=package_check(config, entries),
        train_size=len(train),
        held_out_size=len(held_out),
        longest=longest_prompt([*train, *held_out], render),
        digest=content_digest(train, held_out),
        description=f"reasoning-gym {config.name}",
    )


def answer_of(completion: str) -> str:
    """The answer in a completion: the content of its last <answer> tag, else all of it, stripped."""
    answer, end = completion, 0
    while (start := completion.find(OPENS, end)) >= 0 and (closed := completion.find(CLOSES, start)) >= 0:
        answer = completion[start + len(OPENS) : closed]
        end = closed + len(CLOSES)
    return answer.strip()


def package_check(config: ReasoningGymTask, entries: Mapping[str, Any]) -> PackageCheck:
    """How the package scores completions. Raises UserError: as `build_reasoning_gym`.

    Args:
        entries: by prompt id. They are not made again in the sandbox: some depend on PYTHONHASHSEED.
    """
    return PackageCheck(
        package="reasoning_gym",
        params={"name": config.name, "settings": _settings(config)},
        entry=lambda prompt: pickle.dumps(entries[prompt.prompt_id]),
        answer=answer_of,
    )


def scorer_of(config: ReasoningGymTask) -> PackageCheck | None:
    """How the package scores completions, without prompts; None if the task cannot be made, which its build reports."""
    try:
        _create(config)
    except UserError:
        return None
    return package_check(config, {})


def _create(config: ReasoningGymTask) -> Any:
    package = import_extra("reasoning_gym", package="reasoning-gym", needed_by=f"the task {config.name!r}")
    datasets = import_extra("reasoning_gym.factory", package="reasoning-gym", needed_by="the task").DATASETS
    if config.name not in datasets:
        close = difflib.get_close_matches(config.name, datasets, n=3)
        raise UserError(
            f"reasoning-gym has no generator {config.name!r}",
            where="task.name",
            hint=f"did you mean {' or '.join(close)}?" if close else f"it has {', '.join(sorted(datasets))}",
        )
    try:
        return package.create_dataset(config.name, **_settings(config))
    except Exception as error:
        known = sorted(field.name for field in dataclasses.fields(datasets[config.name][1]))
        raise UserError(
            f"{config.name} rejects its parameters: {type(error).__name__}: {error}",
            where="task.params",
            hint=f"its parameters are {', '.join(known)}",
        ) from error


def _settings(config: ReasoningGymTask) -> dict[str, Any]:
    return {"seed": DATA_SEED, "size": _most_tries(config), **config.params}


def _most_tries(config: ReasoningGymTask) -> int:
    return TRIES_PER_PROMPT * (config.train_size + config.held_out_size)


def _collect(config: ReasoningGymTask, dataset: Any) -> tuple[dict[str, Any], list[Item], list[Item]]:
    """Entries by prompt id, training items and held-out items; the content of a question decides its side."""
    fraction = config.held_out_size / (config.train_size + config.held_out_size)
    entries: dict[str, Any] = {}
    train: list[Item] = []
    held_out: list[Item] = []
    asked: set[str] = set()
    deadline = time.monotonic() + GENERATION_TIMEOUT_S
    for index in range(min(_most_tries(config), len(dataset))):
        if time.monotonic() > deadline:
            break
        # Some generators also draw from the global random state: a prompt must not depend on what ran before.
        before = random.getstate()
        random.seed(index)
        try:
            entry = dataset[index]
        except Exception as error:
            what = f"{config.name} fails at prompt {index}: {type(error).__name__}: {error}"
            hint = "change the parameters, or use another generator"
            raise UserError(what, where="task.params", hint=hint) from error
        finally:
            random.setstate(before)
        item = Item(
            messages=after_system((Message(role="user", content=entry["question"]),), config.system_prompt),
            answer=None if entry["answer"] is None else str(entry["answer"]),
            # Entries hold sets, dates and fractions; the prompt's metadata must be plain data.
            metadata=json.loads(json.dumps(entry["metadata"], default=str, skipkeys=True)),
            where="task",
        )
        question = question_key(item)
        is_held_out = hash_share("held out", question) < fraction
        side, wanted = (held_out, config.held_out_size) if is_held_out else (train, config.train_size)
        if question in asked or len(side) == wanted:
            continue
        asked.add(question)
        side.append(item)
        entries[content_id(item)] = entry
        if len(train) == config.train_size and len(held_out) == config.held_out_size:
            return entries, train, held_out
    raise UserError(
        f"{config.name} has too few different prompts, or takes over {GENERATION_TIMEOUT_S} s: "
        f"{len(train)} of {config.train_size} for training, {len(held_out)} of {config.held_out_size} for evaluation",
        where="task.train_size",
        hint="lower task.train_size and task.held_out_size together, or extend task.params",
    )
