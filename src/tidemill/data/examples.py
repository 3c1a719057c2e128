"""Loads the examples of supervised stages: splits them, encodes them and orders them reproducibly."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import msgspec

from tidemill.config.task import DataConfig
from tidemill.core.errors import UserError
from tidemill.core.formatting import left_out_text
from tidemill.core.protocols import CompletionCodec, ReplyCodec, TurnFormat
from tidemill.core.records import (
    Call,
    Demonstration,
    Episode,
    PreferencePair,
    Prompt,
    Ranges,
    SampleId,
    TokenBuffer,
    Turn,
    count,
    pack_tokens,
    unpack_tokens,
)
from tidemill.data.prompts import (
    Order,
    RawPrompt,
    content_id,
    encode_question,
    in_chat,
    with_location,
)
from tidemill.data.row_split import read_split
from tidemill.data.row_table import Progress, RowUse
from tidemill.data.rows import (
    ASSISTANT,
    DEMONSTRATION_SHAPE,
    PAIR_SHAPE,
    DemonstrationText,
    PairText,
    Reply,
    identical_replies,
    to_demonstration,
    to_pair,
)

TurnFormats: TypeAlias = Callable[[bool], TurnFormat]
"""The format of turns with a chat template (True) and of plain text (False)."""
THOUGHT_MARK = re.compile(r"[<\[◁]\W?[\w:]*(?:think|thought|reason)\w*\W?[>\]▷]", re.IGNORECASE)
"""`<think>`, `</think>`, `[THINK]` and others."""
OPENING = re.compile(rf"(?:{THOUGHT_MARK.pattern}\s*){{1,2}}\Z", re.IGNORECASE)
NO_SAMPLE = SampleId(run_seed=0, purpose="data", prompt_id="", epoch=0, index=0)


class Encoded(NamedTuple):
    """A reply; fields as in `Demonstration`."""

    token_ids: TokenBuffer
    trained: Ranges = ()
    branches: tuple[int, ...] = ()


class Encoder:
    """Encodes rows as a model sees them during generation: prompt and completion separately, then concatenated. A row
    with tools or several turns has the token ids of an agent's episode with the same texts.

    Args:
        chat_template: also apply the model's chat template to plain prompts.
        end_token: append the token that ends the model's turn to completions that do not end with one.
        turn_formats: needed for rows with tools or several turns.
    """

    def __init__(
        self,
        codec: CompletionCodec,
        *,
        chat_template: bool,
        end_token: bool,
        turn_formats: TurnFormats | None = None,
    ) -> None:
        self._codec, self._chat_template, self._end_token = codec, chat_template, end_token
        self._turn_formats = turn_formats

    def demonstration(self, row: DemonstrationText) -> Demonstration:
        """Raises UserError: the codec rejects the text."""
        if not row.completion:  # a text as it is written, learned from its second token on
            _, token_ids = encode_question(row, self._codec, chat_template=False)
            if self._end_token and token_ids[-1] not in self._codec.stop_token_ids:
                token_ids = [*token_ids, self._codec.end_token_id(chat=False)]
            if len(token_ids) < 2:
                raise UserError("`text` has one token, and nothing follows it", where=row.where, hint="remove the row")
            first, rest = pack_tokens(token_ids[:1]), pack_tokens(token_ids[1:])
            return Demonstration(id=content_id(row), prompt_ids=first, completion_ids=rest)
        prompt_ids, (reply,) = self._encode(row, row.completion)
        return Demonstration(
            id=content_id(row),
            prompt_ids=prompt_ids,
            completion_ids=reply.token_ids,
            trained=reply.trained,
            branches=reply.branches,
            chat=in_chat(row, chat_template=self._chat_template),
        )

    def pair(self, row: PairText) -> PreferencePair:
        """Raises UserError: the codec rejects the text, or both sides have the same tokens."""
        prompt_ids, (chosen, rejected) = self._encode(row, row.chosen, row.rejected)
        if chosen == rejected:
            raise identical_replies(row)
        return PreferencePair(
            id=content_id(row),
            prompt_ids=prompt_ids,
            chosen_ids=chosen.token_ids,
            rejected_ids=rejected.token_ids,
            margin=row.margin,
            chosen_trained=chosen.trained,
            chosen_branches=chosen.branches,
            rejected_trained=rejected.trained,
            rejected_branches=rejected.branches,
            chat=in_chat(row, chat_template=self._chat_template),
        )

    def _encode(self, row: RawPrompt, *replies: Reply) -> tuple[TokenBuffer, list[Encoded]]:
        """The prompt and its replies."""
        chat = in_chat(row, chat_template=self._chat_template)
        try:
            if not row.tools and all(isinstance(reply, str) for reply in replies):
                text, token_ids = encode_question(row, self._codec, chat_template=self._chat_template)
                opening = thinking_opening(row, text) if chat else ""
                encoded = [Encoded(self._completion(row, str(reply), opening)) for reply in replies]
                return pack_tokens(token_ids), encoded
            assert self._turn_formats is not None
            turns = self._turn_formats(chat)
            text, token_ids = turns.prompt(row.messages, tools=row.tools)
            prompt_ids = pack_tokens(token_ids)
            prompt = Prompt(prompt_id="", token_ids=prompt_ids, text=text, answer="", messages=row.messages)
            return prompt_ids, [self._episode(row, turns, prompt, reply) for reply in replies]
        except UserError as error:
            raise with_location(error, row) from error

    def _episode(self, row: RawPrompt, turns: TurnFormat, prompt: Prompt, reply: Reply) -> Encoded:
        """The reply as an agent would have generated it, with its observations."""
        chat = in_chat(row, chat_template=self._chat_template)
        opening = thinking_opening(row, prompt.text) if chat else ""
        if isinstance(reply, str):
            return Encoded(self._completion(row, reply, opening))
        start_ids = unpack_tokens(prompt.token_ids)
        opening_tokens = len(self._codec.encode_completion(opening))
        context, token_ids = start_ids, list[int]()
        done, trained, branches = list[Turn](), list[tuple[int, int]](), list[int]()
        places = [at for at, message in enumerate(reply) if message.role == ASSISTANT]
        for at, following in pairwise([*places, len(reply)]):
            # A template may open thinking only in some turns.
            opens = opening and context[-opening_tokens:] == start_ids[-opening_tokens:]
            generated = unpack_tokens(self._completion(row, reply[at].content, opening if opens else ""))
            start, end = len(token_ids), len(token_ids) + len(generated)
            token_ids, context = token_ids + generated, context + generated
            trained.append((start, end))
            if following == len(reply):
                break
            turn, seen = Turn(start=start, end=end, text=turns.decode(generated)), reply[at + 1 : following]
            episode = Episode(sample_id=NO_SAMPLE, prompt=prompt, turns=(*done, turn), token_ids=pack_tokens(context))
            added, new_branch = turns.answer(episode, seen, tools=row.tools)
            if new_branch:
                branches.append(end)
            token_ids, context = token_ids + added, added if new_branch else context + added
            texts = [message.content for message in seen]  # the results of tools, or one message
            calls = [Call(call_id="", name="", arguments="", result=text) for text in texts if seen[0].role == "tool"]
            done.append(msgspec.structs.replace(turn, observation="\n".join(texts), calls=tuple(calls)))
        return Encoded(pack_tokens(token_ids), tuple(trained), tuple(branches))

    def _completion(self, row: RawPrompt, text: str, opening: str) -> TokenBuffer:
        """Token ids of a turn.

        Args:
            opening: the thinking that the prompt has begun. The turn does not repeat it.
        """
        chat = in_chat(row, chat_template=self._chat_template)
        codec = self._codec
        text = _after(opening, text, row) if opening else text
        if chat and isinstance(codec, ReplyCodec):
            token_ids = codec.encode_reply(text)
        else:
            token_ids = codec.encode_completion(text)
        if self._end_token and token_ids[-1:] and token_ids[-1] not in codec.stop_token_ids:
            token_ids = [*token_ids, codec.end_token_id(chat=chat)]
        return pack_tokens(token_ids)


def thinking_opening(row: RawPrompt, prompt: str) -> str:
    """The end of a rendered chat that begins the model's thinking: `<think>` and white space, or an empty thought."""
    found = OPENING.search(prompt)
    # A template without a start of the assistant's turn ends with the user's text.
    said = row.messages[-1].content.strip()
    by_user = prompt.rstrip().endswith(said) and prompt.count(said) == 1
    return found.group() if found and not by_user else ""


def _after(opening: str, text: str, row: RawPrompt) -> str:
    """The part of a completion that follows an opening; the completion may repeat the opening.

    Raises:
        UserError: the opening has ended the thinking and the completion begins it again, or nothing follows.
    """
    marks = THOUGHT_MARK.findall(opening)
    repeated = re.match(r"\s*" + r"\s*".join(map(re.escape, marks)), text)
    if repeated is None:
        if len(marks) > 1 and text.lstrip().startswith(marks[0]):
            raise UserError(
                f"the chat template ends the thinking before an answer ({opening.strip()!r:.60}), but the row has some",
                where=row.where,
                hint="remove the thinking from the row, or give the model a chat template that leaves it open",
            )
        return text
    rest = text[repeated.end() :]
    blank = opening[len(opening.rstrip()) :]
    while not rest.startswith(blank):
        blank = blank[:-1]
    rest = rest.removeprefix(blank)
    if not rest.strip():
        raise UserError(
            f"nothing follows {repeated.group().strip()!r:.60}",
            where=row.where,
            hint="the chat template writes it already; remove the row, or add the completion",
        )
    return rest


def _longest_row(prompt_ids: TokenBuffer, completion_ids: TokenBuffer, branches: Sequence[int]) -> int:
    """Tokens of the longest sequence that the model sees."""
    return max(end - start for start, end in pairwise([-count(prompt_ids), *branches, count(completion_ids)]))


ExampleT = TypeVar("ExampleT", bound=Demonstration | PreferencePair)
NAMED_ROWS = 3
"""Number of rows that are too long to list in the message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Examples(Generic[ExampleT]):
    """Both sides of a data set, tokenized. No question is on both sides."""

    train: Sequence[ExampleT]
    held_out: Sequence[ExampleT]
    longest_tokens: int  # prompt plus the longer completion, over both sides
    left_out: Mapping[str, int]  # rows of both sides that are not used, by reason
    digest: str  # of the texts of both sides, including dropped ones; changes if the data change
    description: str  # the files, and what was left out
    make_order: Callable[..., Order]  # from `batch` and `seed`

    @property
    def dropped(self) -> int:
        """Rows of both sides that were too long."""
        return self.left_out.get("too_long", 0)

    def order(self, *, batch: int, seed: int) -> ExampleOrder[ExampleT]:
        """The training examples in steps of `batch`, shuffled in every epoch."""
        return ExampleOrder(self.train, self.make_order(batch=batch, seed=seed))


class ExampleOrder(Generic[ExampleT]):
    """Training examples by step; to resume, only the step is needed."""

    def __init__(self, examples: Sequence[ExampleT], order: Order) -> None:
        self._examples, self._order = examples, order

    def train_batch(self, step: int) -> list[tuple[int, ExampleT]]:
        """The (epoch, example) pairs of 1-based `step`, a pure function of seed, step and the training side."""
        return [(epoch, self._examples[index]) for epoch, index in self._order.batch(step)]


def load_demonstrations(
    config: DataConfig,
    *,
    codec: CompletionCodec,
    context_limit: int,
    chat_template: bool,
    turn_formats: TurnFormats | None = None,
    progress: Progress = lambda _: None,
) -> Examples[Demonstration]:
    """The demonstrations of the `[data]` section.

    Args:
        context_limit: maximum sequence length of the model, in tokens.
        chat_template: also apply the model's chat template to plain prompts (`model.chat_template`).
        turn_formats: as for `Encoder`.

    Raises:
        UserError: a row is invalid; names file, row and field.
    """
    encoder = Encoder(codec, chat_template=chat_template, end_token=config.end_token, turn_formats=turn_formats)

    def use(**settings: Any) -> RowUse[DemonstrationText, Demonstration]:
        return RowUse(
            section="data",
            shape=DEMONSTRATION_SHAPE,
            parse=partial(to_demonstration, **settings),
            encode=encoder.demonstration,
            tokens=lambda example: _longest_row(example.prompt_ids, example.completion_ids, example.branches),
            settings=repr(("demonstrations", settings)),
        )

    return _load(config, use, context_limit, progress)


def load_pairs(
    config: DataConfig,
    *,
    codec: CompletionCodec,
    context_limit: int,
    chat_template: bool,
    turn_formats: TurnFormats | None = None,
    progress: Progress = lambda _: None,
) -> Examples[PreferencePair]:
    """The preference pairs of the `[data]` section; arguments and errors as `load_demonstrations`."""
    encoder = Encoder(codec, chat_template=chat_template, end_token=config.end_token, turn_formats=turn_formats)

    def use(**settings: Any) -> RowUse[PairText, PreferencePair]:
        return RowUse(
            section="data",
            shape=PAIR_SHAPE,
            parse=partial(to_pair, **settings),
            encode=encoder.pair,
            tokens=lambda pair: max(
                _longest_row(pair.prompt_ids, pair.chosen_ids, pair.chosen_branches),
                _longest_row(pair.prompt_ids, pair.rejected_ids, pair.rejected_branches),
            ),
            settings=repr(("pairs", settings)),
        )

    return _load(config, use, context_limit, progress)


def _load(
    config: DataConfig, use: Callable[..., RowUse[Any, ExampleT]], context_limit: int, progress: Progress
) -> Examples[ExampleT]:
    if not config.all_sources:
        hint = "give --data.path FILE (JSON lines, Parquet, or a folder that `datasets` saved)"
        raise UserError("is not set, but this stage needs a data file", where="data.path", hint=hint)
    if config.max_tokens > context_limit:
        raise UserError(
            f"{config.max_tokens} tokens exceed the model's limit of {context_limit}",
            where="data.max_tokens",
            hint=f"lower it to {context_limit}, or set it to 0 to use the model's limit",
        )
    limit = config.max_tokens or context_limit
    split = read_split(config, use, section="data", progress=progress)
    short, long = split.at_most(limit)
    left_out, reasons = split.left_out, left_out_text(split.left_out)
    if dropped := sum(map(len, long)):
        rows = [(side, at) for side in long for at in range(min(len(side), NAMED_ROWS))][:NAMED_ROWS]
        named = [f"{side.table.location(int(side.rows[at]))}, {side.tokens[at]} tokens" for side, at in rows]
        named += [f"{dropped - len(rows)} more"] if dropped > len(rows) else []
        if config.too_long == "refuse" or not len(short.train):
            number = "1 row is" if dropped == 1 else f"{dropped} rows are"
            what = f"{number} longer than {limit} tokens with prompt and completion: {'; '.join(named)}"
            hint = "shorten the rows, or use a model with a longer context"
            hint = f'set data.too_long = "drop", {hint}' if len(short.train) else f"{hint}; no training data is left"
            raise UserError(what, where="data.path", hint=hint)
        left_out |= {"too_long": dropped}
        too_long = f"{dropped} longer than {limit} tokens ({'; '.join(named)})"
        reasons = ", ".join(filter(None, (reasons, too_long)))
    return Examples(
        train=short.train.examples(),
        held_out=short.held_out.examples(),
        longest_tokens=max((int(side.tokens.max()) for side in (short.train, short.held_out) if len(side)), default=0),
        left_out=left_out,
        digest=split.digest,
        description=config.description + (f" (left out: {reasons})" if reasons else ""),
        make_order=short.order,
    )
