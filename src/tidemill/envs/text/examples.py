"""Loads the examples of supervised stages: splits them, encodes them and orders them reproducibly."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from tidemill.config.task import DataConfig
from tidemill.core.errors import UserError
from tidemill.core.protocols import CompletionCodec
from tidemill.core.records import Demonstration, PreferencePair, TokenBuffer, count, pack_tokens
from tidemill.envs.text.prompts import (
    EpochOrder,
    Question,
    QuestionT,
    content_digest,
    content_id,
    distinct,
    encode_question,
    in_chat,
    in_content_order,
    question_key,
    split_by_content,
    with_location,
)
from tidemill.envs.text.rows import DemonstrationText, PairText, identical_replies, read_demonstrations, read_pairs


class Encoder:
    """Encodes rows as a model sees them during generation: prompt and completion separately, then concatenated.

    Args:
        chat_template: also apply the model's chat template to plain prompts.
        end_token: append the token that ends the model's turn to completions that do not end with one.
    """

    def __init__(self, codec: CompletionCodec, *, chat_template: bool, end_token: bool) -> None:
        self._codec, self._chat_template, self._end_token = codec, chat_template, end_token

    def demonstration(self, row: DemonstrationText) -> Demonstration:
        """Raises UserError: the codec rejects the text."""
        return Demonstration(
            id=content_id(row), prompt_ids=self._prompt(row), completion_ids=self._completion(row, row.completion)
        )

    def pair(self, row: PairText) -> PreferencePair:
        """Raises UserError: the codec rejects the text, or both sides have the same tokens."""
        chosen, rejected = self._completion(row, row.chosen), self._completion(row, row.rejected)
        if chosen == rejected:
            raise identical_replies(row)
        return PreferencePair(
            id=content_id(row),
            prompt_ids=self._prompt(row),
            chosen_ids=chosen,
            rejected_ids=rejected,
            margin=row.margin,
        )

    def _prompt(self, row: Question) -> TokenBuffer:
        return pack_tokens(encode_question(row, self._codec, chat_template=self._chat_template)[1])

    def _completion(self, row: Question, text: str) -> TokenBuffer:
        try:
            token_ids = self._codec.encode_completion(text)
        except UserError as error:
            raise with_location(error, row) from error
        if self._end_token and token_ids[-1:] and token_ids[-1] not in self._codec.stop_token_ids:
            chat = in_chat(row, chat_template=self._chat_template)
            token_ids = [*token_ids, self._codec.end_token_id(chat=chat)]
        return pack_tokens(token_ids)


Read = Callable[[Path], Iterable[QuestionT]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainEvalSplit(Generic[QuestionT]):
    """Rows split by question: no question is on both sides."""

    train: list[QuestionT]
    held_out: list[QuestionT]  # in content order: any first n are a random sample
    repeated: int  # duplicate rows of `path`
    kept: int  # rows of `path` left out of training because the evaluation file has the same question

    @property
    def left_out(self) -> str:
        """`3 repeated, 1 kept for evaluation`; empty if none."""
        counts = {"repeated": self.repeated, "kept for evaluation": self.kept}
        return ", ".join(f"{count} {why}" for why, count in counts.items() if count)


def read_split(
    read: Read[QuestionT], path: Path, held_out_path: Path | None, held_out_fraction: float, *, section: str
) -> TrainEvalSplit[QuestionT]:
    """Split one file, or read a training and an evaluation file.

    Appending or moving rows does not change the side of any other row. A duplicate row is used once. A question in
    both files, or with several answers in one file, is on one side only.

    Args:
        held_out_fraction: share of the questions of `path`; 0 holds out none.
        section: of the configuration: "task" or "data".

    Raises:
        UserError: a file cannot be read or has an invalid row; one side would be empty.
    """
    rows = list(read(path))
    items = distinct(rows)
    repeated = len(rows) - len(items)
    if held_out_path is None:
        train, held_out = split_by_content(items, held_out_fraction) if held_out_fraction else (items, [])
        if held_out_fraction and not (train and held_out):
            raise UserError(
                "a single question cannot be split into training and evaluation",
                where=str(path),
                hint=f"add rows, or give {section}.held_out_path",
            )
        return TrainEvalSplit(train=train, held_out=in_content_order(held_out), repeated=repeated, kept=0)
    held_out = distinct(read(held_out_path))
    asked = {question_key(item) for item in held_out}
    train = [item for item in items if question_key(item) not in asked]
    if not train:
        raise UserError(
            "every question is also an evaluation question; no training data is left",
            where=str(path),
            hint=f"remove the shared rows from {held_out_path}",
        )
    kept = len(items) - len(train)
    return TrainEvalSplit(train=train, held_out=in_content_order(held_out), repeated=repeated, kept=kept)


ExampleT = TypeVar("ExampleT", bound=Demonstration | PreferencePair)
NAMED_ROWS = 3
"""Number of rows that are too long to list in the message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Examples(Generic[ExampleT]):
    """Both sides of a data set, tokenized. No question is on both sides."""

    train: tuple[ExampleT, ...]
    held_out: tuple[ExampleT, ...]
    longest_tokens: int  # prompt plus the longer completion, over both sides
    dropped: int  # rows of both sides that were too long
    digest: str  # of the texts of both sides, including dropped ones; changes if the data change
    description: str  # the file, and what was left out

    def order(self, *, batch: int, seed: int) -> ExampleOrder[ExampleT]:
        """The training examples in steps of `batch`, shuffled in every epoch."""
        return ExampleOrder(self.train, batch=batch, seed=seed)


class ExampleOrder(Generic[ExampleT]):
    """Training examples by step; to resume, only the step is needed."""

    def __init__(self, examples: tuple[ExampleT, ...], *, batch: int, seed: int) -> None:
        self._examples, self._batch = examples, batch
        self._order = EpochOrder([example.id for example in examples], batch=batch, seed=seed)

    @property
    def steps_per_epoch(self) -> int:
        """Steps until every example has been used; the last one may include the start of the next epoch."""
        return -(-len(self._examples) // self._batch)

    def train_batch(self, step: int) -> list[tuple[int, ExampleT]]:
        """The (epoch, example) pairs of 1-based `step`, a pure function of seed, step and the training side."""
        return [(epoch, self._examples[index]) for epoch, index in self._order.batch(step)]


def load_demonstrations(
    config: DataConfig, *, codec: CompletionCodec, context_limit: int, chat_template: bool
) -> Examples[Demonstration]:
    """The demonstrations of the `[data]` section.

    Args:
        context_limit: maximum sequence length of the model, in tokens.
        chat_template: also apply the model's chat template to plain prompts (`model.chat_template`).

    Raises:
        UserError: a row is invalid; names file, row and field.
    """
    encoder = Encoder(codec, chat_template=chat_template, end_token=config.end_token)

    def tokens(example: Demonstration) -> int:
        return count(example.prompt_ids) + count(example.completion_ids)

    return _load(config, read_demonstrations, encoder.demonstration, tokens, context_limit)


def load_pairs(
    config: DataConfig, *, codec: CompletionCodec, context_limit: int, chat_template: bool
) -> Examples[PreferencePair]:
    """The preference pairs of the `[data]` section; arguments and errors as `load_demonstrations`."""
    encoder = Encoder(codec, chat_template=chat_template, end_token=config.end_token)

    def tokens(example: PreferencePair) -> int:
        return count(example.prompt_ids) + max(count(example.chosen_ids), count(example.rejected_ids))

    return _load(config, read_pairs, encoder.pair, tokens, context_limit)


def _load(
    config: DataConfig,
    read: Read[QuestionT],
    encode: Callable[[QuestionT], ExampleT],
    tokens: Callable[[ExampleT], int],
    context_limit: int,
) -> Examples[ExampleT]:
    if config.path is None:
        hint = "give --data.path FILE (JSON lines, Parquet, or a folder that `datasets` saved)"
        raise UserError("is not set, but this stage needs a data file", where="data.path", hint=hint)
    limit = _longest_allowed(config, context_limit)
    sides = read_split(read, config.path, config.held_out_path, config.held_out_fraction, section="data")
    kept: list[list[ExampleT]] = []
    longest, too_long = 0, list[tuple[str, int]]()
    for side in (sides.train, sides.held_out):
        kept.append([])
        for row in side:
            example = encode(row)
            if (length := tokens(example)) > limit:
                too_long.append((row.where, length))
            else:
                kept[-1].append(example)
                longest = max(longest, length)
    if too_long and (config.too_long == "refuse" or not kept[0]):
        raise _too_long(too_long, limit, all_of_them=not kept[0])
    dropped = f"{len(too_long)} longer than {limit} tokens ({_named(too_long)})" if too_long else ""
    left_out = ", ".join(filter(None, (sides.left_out, dropped)))
    return Examples(
        train=tuple(kept[0]),
        held_out=tuple(kept[1]),
        longest_tokens=longest,
        dropped=len(too_long),
        digest=content_digest(sides.train, sides.held_out),
        description=f"{config.path.name}" + (f" (left out: {left_out})" if left_out else ""),
    )


def _longest_allowed(config: DataConfig, context_limit: int) -> int:
    if config.max_tokens > context_limit:
        raise UserError(
            f"{config.max_tokens} tokens exceed the model's limit of {context_limit}",
            where="data.max_tokens",
            hint=f"lower it to {context_limit}, or set it to 0 to use the model's limit",
        )
    return config.max_tokens or context_limit


def _too_long(rows: list[tuple[str, int]], limit: int, *, all_of_them: bool) -> UserError:
    number = "1 row is" if len(rows) == 1 else f"{len(rows)} rows are"
    hint = "shorten the rows, or use a model with a longer context"
    return UserError(
        f"{number} longer than {limit} tokens with prompt and completion: {_named(rows)}",
        where="data.path",
        hint=f"{hint}; no training data is left" if all_of_them else f'set data.too_long = "drop", {hint}',
    )


def _named(rows: list[tuple[str, int]]) -> str:
    named = [f"{where}, {length} tokens" for where, length in rows[:NAMED_ROWS]]
    more = [f"{len(rows) - NAMED_ROWS} more"] if len(rows) > NAMED_ROWS else []
    return "; ".join(named + more)
