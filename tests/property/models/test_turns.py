"""Random conversations: what an engine computes is what a trainer sees and what the template renders."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.chat_models import CHATML, LLAMA3, QWEN2_5, QWEN3, chat_codec
from tests.rotation import share_of_the_day
from tidemill.config.agent import EnvConfig
from tidemill.core.protocols import TurnFormat
from tidemill.core.records import Call, Episode, Message, Prompt, SampleId, Turn, pack_tokens
from tidemill.models.codec import TextCodec
from tidemill.models.tool_calls import describe_tools, results_as_user
from tidemill.models.turn_format import PlainFormat, turn_format

CONVERSATIONS = 10_000
SHARE = CONVERSATIONS // 4
TEMPLATES = {"chatml": CHATML, "qwen2.5": QWEN2_5, "qwen3": QWEN3, "llama3": LLAMA3, "plain": CHATML}
WORDS = ["tool", "12", "times", "é", "日本", "{}", "a  b", "\n", "<", "|>", "assistant", "</s>", "think"]
SCHEMA = {
    "type": "function",
    "function": {"name": "calculate", "description": "of <|im_end|>", "parameters": {"type": "object"}},
}


def words(rng: random.Random, markers: list[str]) -> str:
    """A text with markers in a tenth of the words. It starts and ends with a letter."""
    picked = (rng.choice(markers if markers and rng.random() < 0.1 else WORDS) for _ in range(rng.randrange(6)))
    return " ".join(["is", *picked, "so"])


class Conversation:
    """One episode. `computed` has the context and the generated ids of every turn, as an engine has them."""

    def __init__(self, rng: random.Random, codec: TextCodec, form: TurnFormat) -> None:
        self.rng, self.codec, self.form = rng, codec, form
        self.markers = sorted(codec.tokenizer.get_added_vocab())
        self.plain = isinstance(form, PlainFormat)
        self.tools = [] if self.plain or rng.random() < 0.5 else [SCHEMA]
        system = [Message(role="system", content=words(rng, self.markers))] if rng.random() < 0.5 else []
        self.messages = [*system, Message(role="user", content=words(rng, self.markers))]
        text, self.context = form.prompt(self.messages, tools=self.tools)
        self.prompt = Prompt(
            prompt_id="p", token_ids=pack_tokens(self.context), text=text, answer="", messages=tuple(self.messages)
        )
        self.flat, self.segments = list[int](), list[tuple[str, int, int]]()
        self.computed = list[tuple[list[int], list[int]]]()
        self.turns = list[Turn]()
        self.exact = True  # the generated text is what a message can hold
        for turn in range(number := rng.randrange(1, 5)):
            self.generate()
            if turn < number - 1:
                self.observe()

    def generate(self) -> None:
        rng, text = self.rng, words(self.rng, [])
        if not self.plain and rng.random() < 0.3:
            text = f"<think>\n{words(rng, [])}\n</think>\n\n{text}"
        ids = self.codec.encode_completion(text)
        if (kind := rng.random()) < 0.2:  # another tokenization of the same text
            ids = [token for char in text for token in self.codec.encode_completion(char)]
        elif kind < 0.3:
            ids = [rng.randrange(50, 300) for _ in range(5)]  # not even text
            text, self.exact = self.codec.decode(ids), False
        if rng.random() < 0.7:  # else the token limit ended it
            ids = [*ids, self.codec.end_token_id(chat=True)]
        self.computed.append((self.context, ids))
        self.append("action", ids)
        self.context = self.context + ids
        self.turns.append(Turn(start=len(self.flat) - len(ids), end=len(self.flat), text=text))
        self.messages.append(Message(role="assistant", content=text))

    def observe(self) -> None:
        rng, last = self.rng, self.turns[-1]
        if self.tools and rng.random() < 0.6:
            results = [words(rng, self.markers) for _ in range(rng.randrange(1, 4))]
            messages = [Message(role="tool", content=result) for result in results]
            calls = tuple(Call(call_id="c", name="calculate", arguments="{}", result=result) for result in results)
            changes: dict[str, Any] = {"calls": calls}
        else:
            messages = [Message(role="user", content=words(rng, self.markers))]
            changes = {"observation": messages[0].content}
        episode = Episode(
            sample_id=SampleId(run_seed=0, purpose="train", prompt_id="p", epoch=0, index=0),
            prompt=self.prompt,
            turns=tuple(self.turns),
            token_ids=pack_tokens(self.context),
        )
        ids, new_branch = self.form.answer(episode, messages, tools=self.tools)
        self.append("context" if new_branch else "observation", ids)
        self.context = ids if new_branch else self.context + ids
        self.turns[-1] = Turn(start=last.start, end=last.end, text=last.text, **changes)
        self.messages += messages

    def append(self, role: str, ids: list[int]) -> None:
        self.segments.append((role, len(self.flat), len(self.flat) + len(ids)))
        self.flat += ids

    def trained(self) -> Iterator[tuple[list[int], list[int]]]:
        """The context and the ids of every action, from the flat buffer."""
        row = self.computed[0][0]
        for role, start, end in self.segments:
            if role == "action":
                yield list(row), self.flat[start:end]
            row = self.flat[start:end] if role == "context" else row + self.flat[start:end]

    def rendered(self) -> str:
        """The whole conversation by the template itself, up to the last turn."""
        messages = self.messages[:-1]
        if self.plain:
            start = "\n\n".join(message.content for message in self.messages[: len(self.prompt.messages)])
            return start + "".join(message.content for message in messages[len(self.prompt.messages) :])
        own = "tools" in str(self.codec.tokenizer.chat_template)
        if not own:
            messages = results_as_user(describe_tools(messages, self.tools) if self.tools else messages)
        turns = [{"role": message.role, "content": message.content} for message in messages]
        return self.codec.render_chat(turns, self.tools if own else ())


@pytest.mark.parametrize(
    "numbers",
    [
        pytest.param(share_of_the_day(range(CONVERSATIONS), SHARE), id="share of the day"),
        pytest.param(range(CONVERSATIONS), id="all", marks=pytest.mark.slow),
    ],
)
def test_what_is_computed_is_trained_and_rendered(numbers: Sequence[int]) -> None:
    models = [
        (codec, turn_format(codec, EnvConfig(thinking=thinking), chat_template=name != "plain"), name, thinking)
        for name, template in TEMPLATES.items()
        for codec in (chat_codec(template, in_vocabulary=True), chat_codec(template))
        for thinking in ("template", "keep")
    ]
    compared = dict.fromkeys(TEMPLATES, 0)
    branched = 0
    for number in numbers:
        codec, form, name, thinking = models[number % len(models)]
        conversation = Conversation(random.Random(number), codec, form)
        assert list(conversation.trained()) == conversation.computed
        branches = sum(role == "context" for role, _, _ in conversation.segments)
        assert not branches or (name, thinking) == ("qwen3", "template")
        branched += branches
        # With "keep", earlier thinking is more than the template renders.
        thought = any("</think>" in turn.text for turn in conversation.turns[:-1])
        if conversation.exact and not (name == "qwen3" and thinking == "keep" and thought):
            seen, rendered = codec.decode_whole(conversation.computed[-1][0]), conversation.rendered()
            if name == "plain":  # ends of turns are no part of the text
                seen, rendered = (text.replace("<|im_end|>", "") for text in (seen, rendered))
            assert seen == rendered
            compared[name] += 1
    assert all(count > len(numbers) // 20 for count in compared.values())
    assert branched > len(numbers) // 50
