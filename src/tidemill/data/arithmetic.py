"""Few-shot arithmetic: prompts such as "2+3=5\\n4+1=5\\n7+6=", which the model completes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from tidemill.config.task import ArithmeticTask
from tidemill.core.errors import UserError
from tidemill.core.protocols import PromptSource
from tidemill.core.records import Record
from tidemill.data.prompts import (
    Item,
    ListedSource,
    LongestPrompt,
    Render,
    SampledSource,
    Task,
    content_digest,
    hash_number,
    hash_share,
    in_content_order,
    longest_prompt,
    text_item,
)

STOP = "\n"
OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": lambda left, right: left + right,
    "-": lambda left, right: left - right,
    "*": lambda left, right: left * right,
}
COMMUTATIVE = "+*"
LISTED_DIGITS = 2
"""Up to this number of digits all problems are listed (at most 30,000); above, they are drawn at random."""
MEASURED_ITEMS = 1000
"""Up to this number of prompts, each is tokenized at the start to find the longest; above, a bound is used."""
SAMPLED_HELD_OUT = 1024
"""Number of held-out prompts if problems are drawn at random."""
RAREST_SHARE = 0.01
"""Smallest share of either side; below it, drawing one problem would take hundreds of attempts."""


class Problem(Record):
    """left ∘ right, both non-negative."""

    operator: str
    left: int
    right: int

    @property
    def answer(self) -> str:
        return str(OPERATIONS[self.operator](self.left, self.right))

    @property
    def question(self) -> str:
        return f"{self.left}{self.operator}{self.right}="

    @property
    def kind(self) -> tuple[str, int, int]:
        """Equal for a problem and its commuted form."""
        left, right = self.left, self.right
        if self.operator in COMMUTATIVE:
            left, right = min(left, right), max(left, right)
        return (self.operator, left, right)


def format_prompt(shots: Sequence[Problem], problem: Problem) -> str:
    """Worked examples, one per line, then the question; all prompts share the examples as a prefix."""
    return "".join(f"{shot.question}{shot.answer}{STOP}" for shot in shots) + problem.question


def draw_problem(config: ArithmeticTask, *key: object) -> Problem:
    """The problem of a key: operator and operands are uniform and independent."""
    return Problem(
        operator=config.operators[hash_number("operator", key) % len(config.operators)],
        left=hash_number("left", key) % config.operands,
        right=hash_number("right", key) % config.operands,
    )


def choose_shots(config: ArithmeticTask) -> list[Problem]:
    """The worked examples, equal for every seed: operators alternate, no two are commuted forms, no 0 or 1."""
    shots: dict[tuple[str, int, int], Problem] = {}
    number = 0
    while len(shots) < config.shots:
        problem = draw_problem(config, "shot", number)
        turn = config.operators[len(shots) % len(config.operators)]
        if problem.operator == turn and min(problem.left, problem.right) >= 2:
            shots.setdefault(problem.kind, problem)
        number += 1
    return list(shots.values())


def split_listed(config: ArithmeticTask, shots: Sequence[Problem]) -> tuple[list[Problem], list[Problem]]:
    """(training, held-out) of all problems except the shots; of each operator the kinds with the lowest hash are held
    out."""
    train: list[Problem] = []
    held_out: list[Problem] = []
    shot_kinds = {shot.kind for shot in shots}
    operands = range(config.operands)
    for operator in config.operators:
        problems = [Problem(operator=operator, left=left, right=right) for left in operands for right in operands]
        problems = [problem for problem in problems if problem.kind not in shot_kinds]
        kinds = sorted({problem.kind for problem in problems}, key=lambda kind: hash_number("held out", kind))
        kept = min(max(round(config.held_out_fraction * len(kinds)), 1), len(kinds) - 1)
        held_out_kinds = set(kinds[:kept])
        for problem in problems:
            (held_out if problem.kind in held_out_kinds else train).append(problem)
    return train, held_out


def build_arithmetic(config: ArithmeticTask, *, batch_prompts: int, seed: int, render: Render) -> Task:
    """The arithmetic task. The split depends only on the task's settings; `seed` orders the training prompts.

    Raises:
        UserError: the held-out share is too small or too large to draw from.
    """
    config = config.model_copy(update={"operators": "".join(dict.fromkeys(config.operators))})
    shots = choose_shots(config)

    def item(problem: Problem) -> Item:
        return text_item(
            format_prompt(shots, problem), problem.answer, metadata={"question": problem.question}, where="task"
        )

    widest = Problem(operator=config.operators[0], left=config.operands - 1, right=config.operands - 1)
    # A byte-level tokenizer makes at most one token per byte, so another question adds at most its bytes.
    longest = longest_prompt([item(widest)], render)
    longest = LongestPrompt(tokens=longest.tokens + len(widest.question), text=longest.text, where=longest.where)
    train_size = round(len(config.operators) * config.operands**2 * (1 - config.held_out_fraction))
    train: list[Item] = []
    if config.digits <= LISTED_DIGITS:
        train, held_out = ([item(problem) for problem in side] for side in split_listed(config, shots))
        train_size, held_out = len(train), in_content_order(held_out)
        if train_size + len(held_out) <= MEASURED_ITEMS:
            longest = longest_prompt([*train, *held_out], render)
        source: PromptSource = ListedSource(train, held_out, batch_prompts=batch_prompts, seed=seed, render=render)
    else:
        draw = draw_from(config, shots)
        drawn: dict[tuple[str, int, int], Problem] = {}
        numbers = itertools.count()
        while len(drawn) < SAMPLED_HELD_OUT:
            problem = draw(True, "evaluation", next(numbers))
            drawn.setdefault(problem.kind, problem)
        held_out = [item(problem) for problem in drawn.values()]
        source = SampledSource(
            lambda key, number: item(draw(False, key, number)),
            held_out,
            batch_prompts=batch_prompts,
            seed=seed,
            render=render,
        )
    return Task(
        source=source,
        default_stop_strings=(STOP,),
        check=None,
        train_size=train_size,
        held_out_size=len(held_out),
        longest=longest,
        digest=content_digest(train, held_out),
        description=f"arithmetic {' '.join(config.operators)}, up to {config.operands - 1}, shots {len(shots)}",
    )


def draw_from(config: ArithmeticTask, shots: Sequence[Problem]) -> Callable[..., Problem]:
    """Returns draw(held_out, *key): the problem of that side for a key."""
    if not RAREST_SHARE <= config.held_out_fraction <= 1 - RAREST_SHARE:
        raise UserError(
            f"{config.held_out_fraction} leaves one side too rare to draw from {config.digits}-digit problems",
            where="task.held_out_fraction",
            hint=f"set a share between {RAREST_SHARE} and {1 - RAREST_SHARE}",
        )
    shot_kinds = {shot.kind for shot in shots}

    def draw(held_out: bool, *key: object) -> Problem:
        attempt = 0
        while True:
            problem = draw_problem(config, *key, attempt)
            is_held_out = hash_share("held out", problem.kind) < config.held_out_fraction
            if is_held_out == held_out and problem.kind not in shot_kinds:
                return problem
            attempt += 1

    return draw
