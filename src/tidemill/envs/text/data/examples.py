"""What a supervised stage learns from: records of both sides, and the order they are taken in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from tidemill.config.data import DataConfig
from tidemill.core.buffers import count
from tidemill.core.errors import UserError
from tidemill.core.protocols import CompletionCodec
from tidemill.core.records import Demonstration, PreferencePair
from tidemill.envs.text.content import QuestionT, content_digest
from tidemill.envs.text.data.encoding import Encoder
from tidemill.envs.text.data.schemas import read_demonstrations, read_pairs
from tidemill.envs.text.data.sides import Read, read_sides
from tidemill.envs.text.order import EpochOrder

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
    read = partial(read_demonstrations, data_format=config.format)
    return _load(config, read, encoder.demonstration, _demonstration_tokens, context_limit)


def load_pairs(
    config: DataConfig, *, codec: CompletionCodec, context_limit: int, chat_template: bool
) -> Examples[PreferencePair]:
    """The preference pairs of the `[data]` section; arguments and errors as `load_demonstrations`."""
    encoder = Encoder(codec, chat_template=chat_template, end_token=config.end_token)
    return _load(config, partial(read_pairs, data_format=config.format), encoder.pair, _pair_tokens, context_limit)


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
        cure = "give --data.path FILE (JSON lines, Parquet, or a folder that `datasets` saved)"
        raise UserError("not given, and this stage learns from a file", where="data.path", cure=cure)
    limit = _longest_allowed(config, context_limit)
    sides = read_sides(read, config.path, config.held_out_path, config.held_out_fraction, section="data")
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
            cure=f"lower it to {context_limit}, or set it to 0 to take the model's limit",
        )
    return config.max_tokens or context_limit


def _too_long(rows: list[tuple[str, int]], limit: int, *, all_of_them: bool) -> UserError:
    number = "1 row is" if len(rows) == 1 else f"{len(rows)} rows are"
    cure = "shorten the rows, or take a model with a longer context"
    return UserError(
        f"{number} longer than {limit} tokens with prompt and completion: {_named(rows)}",
        where="data.path",
        cure=f"{cure}; none is left to train on" if all_of_them else f'set data.too_long = "drop", {cure}',
    )


def _named(rows: list[tuple[str, int]]) -> str:
    named = [f"{where}, {length} tokens" for where, length in rows[:NAMED_ROWS]]
    more = [f"{len(rows) - NAMED_ROWS} more"] if len(rows) > NAMED_ROWS else []
    return "; ".join(named + more)
