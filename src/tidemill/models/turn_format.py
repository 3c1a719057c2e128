"""Turns of agents as token ids: as plain text, or in the model's chat template."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from tidemill.config.agent import EnvConfig
from tidemill.core.errors import UserError
from tidemill.core.protocols import TurnFormat
from tidemill.core.records import Episode, Message, ParsedTurn, view_tokens
from tidemill.models.codec import TextCodec, load_codec
from tidemill.models.text_tokens import END, MARK, TextTokens
from tidemill.models.tool_calls import THINKING_END, describe_tools, find_parser, results_as_user

BETWEEN = "\n\n"
"""Between the messages of a plain prompt or observation, as in `encode_question`."""
GENERATED = Message(role="assistant", content=f"{MARK}generated{END}")
"""Stands for a generated turn. No disarmed text contains its content."""
GENERATED_TURN = {"role": GENERATED.role, "content": GENERATED.content}
PROBE: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "probe",
        "parameters": {"type": "object", "properties": {"x": {"type": "string", "description": "x"}}},
    },
}
THINKING, THOUGHT = "<think>", "reason\n</think>\n\n"
OPENING = [Message(role="user", content="question")]
QUESTION = [{"role": "user", "content": "question"}]


def turn_format(model: TextCodec | Path, config: EnvConfig, *, chat_template: bool) -> TurnFormat:
    """The format of turns of a model.

    Args:
        model: its codec, or its folder.
        chat_template: use the model's chat template, and not plain text.

    Raises:
        UserError: the template cannot be continued over turns, or the tokenizer cannot keep text and special tokens
            apart.
    """
    codec = load_codec(model) if isinstance(model, Path) else model
    return ChatFormat(codec, thinking=config.thinking) if chat_template else PlainFormat(codec)


class _Texts:
    """What both formats do with single texts."""

    def __init__(self, codec: TextCodec, tokens: TextTokens) -> None:
        self._codec, self._tokens = codec, tokens

    def encode_text(self, text: str) -> list[int]:
        return self._tokens.encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._codec.decode(token_ids)

    def token_bytes(self, token_id: int) -> bytes:
        return self._codec.token_bytes(token_id)


class PlainFormat(_Texts):
    """Implements `core.protocols.TurnFormat` without a template: prompt, turns and observations are concatenated."""

    def __init__(self, codec: TextCodec) -> None:
        super().__init__(codec, TextTokens(codec))

    def prompt(self, messages: Sequence[Message], *, tools: Sequence[dict[str, Any]] = ()) -> tuple[str, list[int]]:
        """See `TurnFormat`. Raises UserError: there are tools, or the vocabulary lacks a character."""
        if tools:
            raise UserError(
                "tools need a chat template",
                where="model.chat_template",
                hint="set model.chat_template = true, or use an environment without tools",
            )
        text = BETWEEN.join(message.content for message in messages)
        return text, [*self._codec.prefix_ids, *self._tokens.encode(text)]

    def parse(self, text: str) -> ParsedTurn:
        return ParsedTurn(text=text)

    def answer(
        self, episode: Episode, messages: Sequence[Message], *, tools: Sequence[dict[str, Any]] = ()
    ) -> tuple[list[int], bool]:
        return self._tokens.encode(BETWEEN.join(message.content for message in messages)), False


class ChatFormat(_Texts):
    """Implements `core.protocols.TurnFormat` with the model's chat template.

    The token ids after a turn are what the template renders after an assistant's message: the end of the turn, if it
    was not generated, the new messages and the start of the next turn. Generated ids stay as they are. This equals
    the template's rendering of the whole conversation if the template keeps earlier turns.

    Some templates remove the thinking from earlier turns (Qwen3's before the last message of the user). With
    `thinking` "template" an answer that removes thinking from the context is a new branch: the whole conversation,
    rendered by the template. With "keep" earlier thinking stays.

    A template that does not render tools, such as SmolLM2's, gets Hermes's format: schemas in the system message, and
    results in a user message.

    Raises:
        UserError: the template cannot be continued.
    """

    def __init__(self, codec: TextCodec, *, thinking: Literal["template", "keep"] = "template") -> None:
        super().__init__(codec, codec.text_tokens)
        self._thinking = thinking
        self._template = str(codec.tokenizer.chat_template or "")
        self._own_tools = PROBE["function"]["name"] in codec.render_chat(QUESTION, [PROBE])
        self._parser: Callable[[str], ParsedTurn] | UserError
        try:
            self._parser = find_parser(self._template, codec.tokenizer.get_vocab(), own_tools=self._own_tools)
        except UserError as error:  # raised once there are tools
            self._parser = error
        self._end = self._end_of_turn()
        self._linear: dict[tuple[str, bool], bool] = {}
        self._opening = self._missing_opening()
        self._branches(["user"], thinks=False)

    def prompt(self, messages: Sequence[Message], *, tools: Sequence[dict[str, Any]] = ()) -> tuple[str, list[int]]:
        """See `TurnFormat`.

        Raises:
            UserError: the template refuses the messages, or there are tools, whose calls the model writes in a format
                that is not supported.
        """
        if tools:
            if isinstance(self._parser, UserError):
                raise self._parser
            if self._own_tools:
                self._branches(["tool"], thinks=False)
        rendered = self._render(messages, tools)
        return self._tokens.readable(rendered), self._tokens.encode_rendered(rendered)

    def parse(self, text: str) -> ParsedTurn:
        return ParsedTurn(text=text) if isinstance(self._parser, UserError) else self._parser(text)

    def answer(
        self, episode: Episode, messages: Sequence[Message], *, tools: Sequence[dict[str, Any]] = ()
    ) -> tuple[list[int], bool]:
        """See `TurnFormat`. A new branch needs `episode.prompt.messages`. Raises UserError: as `prompt`."""
        thinks = any(THINKING_END in turn.text for turn in episode.turns)
        if self._branches([message.role for message in messages], thinks=thinks):
            history = [*episode.prompt.messages]
            for turn in episode.turns[:-1]:
                results = [Message(role="tool", content=call.result) for call in turn.calls]
                answered = results or [Message(role="user", content=turn.observation)]
                history += [self._said(turn.text), *answered]
            history += [self._said(episode.turns[-1].text), *messages]
            return self._tokens.encode_rendered(self._render(history, tools)), True
        token_ids = self._tokens.encode_rendered(self._after_turn(messages, tools))
        ended = view_tokens(episode.token_ids)[-1] in self._codec.stop_token_ids
        return token_ids[len(self._end) :] if ended else token_ids, False

    def _render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> str:
        """The rendered chat, its texts disarmed."""
        if not self._own_tools:
            messages = results_as_user(describe_tools(messages, tools) if tools else messages)
        turns = [GENERATED_TURN if each is GENERATED else self._tokens.disarm_message(each) for each in messages]
        schemas = [self._tokens.disarm_schema(tool) for tool in tools] if self._own_tools else ()
        return self._codec.render_chat(turns, schemas)

    def _after_turn(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> str:
        """What the template renders after a generated turn."""
        parts = self._render([*OPENING, GENERATED, *messages], tools).split(GENERATED.content)
        if len(parts) != 2:
            raise self._refusal("does not render an assistant's message as it is")
        return parts[1]

    def _end_of_turn(self) -> list[int]:
        """The tokens that end a turn, up to its stop token."""
        token_ids = self._tokens.encode_rendered(self._after_turn(OPENING, ()))
        stops = [at for at, number in enumerate(token_ids) if number in self._codec.stop_token_ids]
        other = self._tokens.encode_rendered(self._after_turn([Message(role="user", content="another")], ()))
        if not stops or token_ids[: stops[0] + 1] != other[: stops[0] + 1]:
            raise self._refusal("does not end an assistant's turn with a stop token of the model")
        return token_ids[: stops[0] + 1]

    def _branches(self, roles: Sequence[str], *, thinks: bool) -> bool:
        """Whether an answer with messages of these roles starts a new branch. Raises UserError: the template changes
        earlier turns, and not only their thinking."""
        for role in dict.fromkeys(roles):
            role = role if self._own_tools or role != "tool" else "user"
            if (role, thinks) not in self._linear:
                self._linear[role, thinks] = self._keeps_turns(role, thinks=thinks)
            if not self._linear[role, thinks]:
                if THINKING_END not in self._template:
                    raise self._refusal(f"changes earlier turns when a message of the role {role} follows")
                return self._thinking == "template"
        return False

    def _keeps_turns(self, role: str, *, thinks: bool) -> bool:
        """Whether two turns, with thinking or without, stay as they are when messages of a role follow each."""
        tools = [PROBE] if role == "tool" else []
        start = self._render(OPENING, tools)
        thought = THOUGHT if start.rstrip().endswith(THINKING) else f"{THINKING}\n{THOUGHT}"
        texts = [(thought if thinks else "") + text for text in ("first", "second")]
        answers = [
            [Message(role=role, content=f"{text} answer {n}") for n in range(2 if tools else 1)] for text in texts
        ]
        conversation, expected = [*OPENING], start
        for text, answer in zip(texts, answers, strict=True):
            conversation += [self._said(text), *answer]
            expected += text + self._after_turn(answer, tools)
        return self._render(conversation, tools) == expected

    def _said(self, text: str) -> Message:
        """A generated turn for the template."""
        return Message(role="assistant", content=self._opening + text if THINKING_END in text else text)

    def _missing_opening(self) -> str:
        """The start of a thought that the template writes before a turn, and does not write when it renders the turn
        again, as Nemotron's."""
        start = self._render(OPENING, ())
        if not start.rstrip().endswith(THINKING):
            return ""

        def whole(turn: str) -> bool:
            after = [Message(role="assistant", content=turn), Message(role="user", content="another")]
            rendered = self._render([*OPENING, *after], ())
            written = rendered.rpartition("another")[0].rpartition(OPENING[0].content)[2]
            return written.count(THINKING) == written.count(THINKING_END) <= 1

        opening = start[start.rindex(THINKING) :]
        return opening if not whole(f"{THOUGHT}first") and whole(f"{opening}{THOUGHT}first") else ""

    def _refusal(self, what: str) -> UserError:
        name = self._codec.tokenizer.name_or_path or "the model"
        hint = "set model.chat_template = false, or use a model with another template"
        return UserError(f"the chat template of {name} {what}", where="model.chat_template", hint=hint)
