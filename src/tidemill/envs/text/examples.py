"""Training and evaluation examples of a supervised stage: split, encoded, in a reproducible order."""

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
    placed,
    question_key,
    split_by_content,
)
from tidemill.envs.text.rows import DemonstrationText, PairText, identical_replies, read_demonstrations, read_pairs


class Encoder:
    """Prompt and completions of a row as a model would see them while generating: the prompt's ids first, then the
    completion's, encoded apart.

    Args:
        chat_template: wrap plain prompts too in the model's chat template.
        end_token: close every completion with the token that ends the model's turn, unless it ends with one already.
    """

    def __init__(self, codec: CompletionCodec, *, chat_template: bool, end_token: bool) -> None:
        self._codec, self._chat_template, self._end_token = codec, chat_template, end_token

    def demonstration(self, row: DemonstrationText) -> Demonstration:
        """Raises UserError: the codec refuses the text."""
        return Demonstration(
            id=content_id(row), prompt_ids=self._prompt(row), completion_ids=self._completion(row, row.completion)
        )

    def pair(self, row: PairText) -> PreferencePair:
        """Raises UserError: the codec refuses the text, or both sides have the same tokens."""
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
            raise placed(error, row) from error
        if self._end_token and token_ids[-1:] and token_ids[-1] not in self._codec.stop_token_ids:
            chat = in_chat(row, chat_template=self._chat_template)
            token_ids = [*token_ids, self._codec.end_token_id(chat=chat)]
        return pack_tokens(token_ids)


Read = Callable[[Path], Iterable[QuestionT]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainEvalSplit(Generic[QuestionT]):
    """Rows apart: no question is on both sides."""

    train: list[QuestionT]
    held_out: list[QuestionT]  # in content order: any first n are a fair selection
    repeated: int  # rows of `path` that say what another says
    kept: int  # of `path`, left out of training because the evaluation file asks the same

    @property
    def left_out(self) -> str:
        """`3 repeated, 1 kept for evaluation`; empty where nothing is."""
        counts = {"repeated": self.repeated, "kept for evaluation": self.kept}
        return ", ".join(f"{count} {why}" for why, count in counts.items() if count)


def read_split(
    read: Read[QuestionT], path: Path, held_out_path: Path | None, held_out_fraction: float, *, section: str
) -> TrainEvalSplit[QuestionT]:
    """One file split, or a training and an evaluation file.

    Rows appended or moved leave every other on its side. A row repeated is taken once. A question in both files, or in
    one file with several answers, is on one side only.

    Args:
        held_out_fraction: share of the questions of `path`; 0 keeps none.
        section: of the configuration: "task" or "data".

    Raises:
        UserError: a file cannot be read or has a faulty row; one side would be empty.
    """
    rows = list(read(path))
    items = distinct(rows)
    repeated = len(rows) - len(items)
    if held_out_path is None:
        train, held_out = split_by_content(items, held_out_fraction) if held_out_fraction else (items, [])
        if held_out_fraction and not (train and held_out):
            raise _one_question(path, section)
        return TrainEvalSplit(train=train, held_out=in_content_order(held_out), repeated=repeated, kept=0)
    held_out = distinct(read(held_out_path))
    asked = {question_key(item) for item in held_out}
    train = [item for item in items if question_key(item) not in asked]
    if not train:
        raise _none_left(path, held_out_path)
    kept = len(items) - len(train)
    return TrainEvalSplit(train=train, held_out=in_content_order(held_out), repeated=repeated, kept=kept)


def _one_question(path: Path, section: str) -> UserError:
    return UserError(
        "one question alone cannot be split into training and evaluation",
        where=str(path),
        hint=f"add rows, or give {section}.held_out_path",
    )


def _none_left(path: Path, held_out_path: Path) -> UserError:
    return UserError(
        "every question is also an evaluation question, so none is left to train on",
        where=str(path),
        hint=f"take the shared rows out of {held_out_path}",
    )


ExampleT = TypeVar("ExampleT", bound=Demonstration | PreferencePair)
NAMED_ROWS = 3
"""So many of the rows that are too long are named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Examples(Generic[ExampleT]):
    """Both sides of a data set, tokenized. No question is on both."""

    train: tuple[ExampleT, ...]
    held_out: tuple[ExampleT, ...]
    longest_tokens: int  # prompt plus the longer completion, over both sides
    dropped: int  # rows of both sides that were too long
    digest: str  # of the texts of both sides, dropped ones included: another one on resume means other data
    description: str  # the file, and what was left out of it

    def order(self, *, batch: int, seed: int) -> ExampleOrder[ExampleT]:
        """The training examples in steps of `batch`, shuffled by `seed` in every epoch anew."""
        return ExampleOrder(self.train, batch=batch, seed=seed)


class ExampleOrder(Generic[ExampleT]):
    """Training examples by position: a resumed stage needs to know its step and nothing else."""

    def __init__(self, examples: tuple[ExampleT, ...], *, batch: int, seed: int) -> None:
        self._examples, self._batch = examples, batch
        self._order = EpochOrder([example.id for example in examples], batch=batch, seed=seed)

    @property
    def steps_per_epoch(self) -> int:
        """Steps until every example has been taken; the last of them may begin the next epoch."""
        return -(-len(self._examples) // self._batch)

    def train_batch(self, step: int) -> list[tuple[int, ExampleT]]:
        """The (epoch, example) pairs of 1-based `step`: a pure function of seed, step and the training side."""
        return [(epoch, self._examples[index]) for epoch, index in self._order.batch(step)]


def load_demonstrations(
    config: DataConfig, *, codec: CompletionCodec, context_limit: int, chat_template: bool
) -> Examples[Demonstration]:
    """The demonstrations of the `[data]` section.

    Args:
        context_limit: the longest sequence the model was made for, in tokens.
        chat_template: wrap plain prompts too in the model's chat template (`model.chat_template`).

    Raises:
        UserError: naming file, row and field of the first fault, and what to do.
    """
    encoder = Encoder(codec, chat_template=chat_template, end_token=config.end_token)
    return _load(config, read_demonstrations, encoder.demonstration, _demonstration_tokens, context_limit)


def load_pairs(
    config: DataConfig, *, codec: CompletionCodec, context_limit: int, chat_template: bool
) -> Examples[PreferencePair]:
    """The preference pairs of the `[data]` section; arguments and errors as `load_demonstrations`."""
    encoder = Encoder(codec, chat_template=chat_template, end_token=config.end_token)
    return _load(config, read_pairs, encoder.pair, _pair_tokens, context_limit)


def _demonstration_tokens(example: Demonstration) -> int:
    return count(example.prompt_ids) + count(example.completion_ids)


def _pair_tokens(example: PreferencePair) -> int:
    return count(example.prompt_ids) + max(count(example.chosen_ids), count(example.rejected_ids))


def _load(
    config: DataConfig,
    read: Read[QuestionT],
    encode: Callable[[QuestionT], ExampleT],
    tokens: Callable[[ExampleT], int],
    context_limit: int,
) -> Examples[ExampleT]:
    if config.path is None:
        hint = "give --data.path FILE (JSON lines, Parquet, or a folder that `datasets` saved)"
        raise UserError("not given, and this stage learns from a file", where="data.path", hint=hint)
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
            f"{config.max_tokens} tokens are more than the model's own limit of {context_limit}",
            where="data.max_tokens",
            hint=f"lower it to {context_limit}, or set it to 0 to take the model's limit",
        )
    return config.max_tokens or context_limit


def _too_long(rows: list[tuple[str, int]], limit: int, *, all_of_them: bool) -> UserError:
    number = "1 row is" if len(rows) == 1 else f"{len(rows)} rows are"
    hint = "shorten the rows, or take a model with a longer context"
    return UserError(
        f"{number} longer than {limit} tokens with prompt and completion: {_named(rows)}",
        where="data.path",
        hint=f"{hint}; none is left to train on" if all_of_them else f'set data.too_long = "drop", {hint}',
    )


def _named(rows: list[tuple[str, int]]) -> str:
    named = [f"{where}, {length} tokens" for where, length in rows[:NAMED_ROWS]]
    more = [f"{len(rows) - NAMED_ROWS} more"] if len(rows) > NAMED_ROWS else []
    return "; ".join(named + more)
