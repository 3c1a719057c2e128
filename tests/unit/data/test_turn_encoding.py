"""Rows with several turns have the token ids of an agent's episode with the same texts; its turns are trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.chat_models import CHATML, LLAMA3, QWEN2_5, QWEN3, chat_codec, token_id
from tests.model_folders import small_tokenizer
from tidemill.config.agent import EnvConfig
from tidemill.core.errors import UserError
from tidemill.core.records import (
    Call,
    Demonstration,
    Episode,
    Message,
    Prompt,
    SampleId,
    Turn,
    pack_tokens,
    unpack_tokens,
)
from tidemill.data.examples import Encoder, _longest_row
from tidemill.data.row_files import DataRow
from tidemill.data.rows import DemonstrationText, PairText, to_demonstration
from tidemill.models.codec import TextCodec
from tidemill.models.turn_format import turn_format

TEMPLATES = {"chatml": CHATML, "qwen2.5": QWEN2_5, "qwen3": QWEN3, "llama3": LLAMA3}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "calculate", "description": "d", "parameters": {}}}
THOUGHT = "<think>\nwhy\n</think>\n\n"


def say(role: str, content: str) -> Message:
    return Message(role=role, content=content)


BEGIN = (say("system", "s"), say("user", "What is 12 times 34?"))
REPLY = (
    *(say("assistant", THOUGHT + "call"), say("tool", "408"), say("tool", "<|im_end|>")),
    *(say("assistant", "408"), say("user", "and\n"), say("assistant", THOUGHT + "so")),
)


def encoder(codec: TextCodec, *, thinking: Literal["template", "keep"] = "template", **options: bool) -> Encoder:
    config = EnvConfig(thinking=thinking)
    return Encoder(
        codec,
        **{"chat_template": True, "end_token": True, **options},
        turn_formats=lambda chat: turn_format(codec, config, chat_template=chat),
    )


def played(codec: TextCodec, thinking: Literal["template", "keep"], *, chat: bool = True) -> Demonstration:
    """An agent's episode that generates the texts of `REPLY`, step by step."""
    form = turn_format(codec, EnvConfig(thinking=thinking), chat_template=chat)
    tools = [TOOL] if chat else []
    text, context = form.prompt(BEGIN, tools=tools)
    prompt = Prompt(prompt_id="p", token_ids=pack_tokens(context), text=text, answer="", messages=BEGIN)
    flat, trained, branches, turns = list[int](), list[tuple[int, int]](), list[int](), list[Turn]()
    steps = [(REPLY[0], REPLY[1:3]), (REPLY[3], REPLY[4:5]), (REPLY[5], ())]
    for said, seen in steps:
        ids = [*codec.encode_completion(said.content), codec.end_token_id(chat=chat)]
        trained.append((len(flat), len(flat) + len(ids)))
        flat, context = flat + ids, context + ids
        turn = Turn(start=trained[-1][0], end=trained[-1][1], text=said.content)
        if not seen:
            break
        episode = Episode(
            sample_id=SampleId(run_seed=0, purpose="train", prompt_id="p", epoch=0, index=0),
            prompt=prompt,
            turns=(*turns, turn),
            token_ids=pack_tokens(context),
        )
        added, new_branch = form.answer(episode, seen, tools=tools)
        if new_branch:
            branches.append(len(flat))
        flat, context = flat + added, added if new_branch else context + added
        calls = tuple(Call(call_id="c", name="n", arguments="{}", result=each.content) for each in seen)
        changes = {"calls": calls} if seen[0].role == "tool" else {"observation": seen[0].content}
        turns.append(Turn(start=turn.start, end=turn.end, text=turn.text, **changes))
    return Demonstration(
        id="",
        prompt_ids=prompt.token_ids,
        completion_ids=pack_tokens(flat),
        trained=tuple(trained),
        branches=tuple(branches),
    )


def fields(made: Demonstration) -> tuple[object, ...]:
    return (made.prompt_ids, made.completion_ids, made.trained, made.branches)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("thinking", ["template", "keep"])
def test_a_row_has_the_ids_of_an_episode(name: str, thinking: Literal["template", "keep"]) -> None:
    codec = chat_codec(TEMPLATES[name])
    row = DemonstrationText(messages=BEGIN, completion=REPLY, tools=(TOOL,), plain=False)
    made = encoder(codec, thinking=thinking).demonstration(row)
    assert fields(made) == fields(played(codec, thinking))
    assert len(made.trained) == 3
    assert len(made.branches) == (name == "qwen3" and thinking == "template")
    ids = unpack_tokens(made.completion_ids)
    for (start, end), message in zip(made.trained, (REPLY[0], REPLY[3], REPLY[5]), strict=True):
        assert codec.decode(ids[start:end]) == message.content
        assert ids[end - 1] == codec.end_token_id(chat=True)
    assert made.trained[-1][1] == len(ids)


def test_a_plain_row_alternates_texts() -> None:
    codec = TextCodec(small_tokenizer(), [1])
    turns = (say("assistant", "12\n"), say("user", "low<eos>\n"), say("assistant", "14\n"))
    row = DemonstrationText(messages=(say("user", "1-15\n"),), completion=turns)
    for end_token, ends in ((True, [1]), (False, [])):
        made = encoder(codec, chat_template=False, end_token=end_token).demonstration(row)
        parts = [[ord(char) for char in turn.content] for turn in turns]
        assert unpack_tokens(made.prompt_ids) == [ord(char) for char in "1-15\n"]
        assert unpack_tokens(made.completion_ids) == [*parts[0], *ends, *parts[1], *parts[2], *ends]
        first, last = 3 + len(ends), 12 + len(ends)
        assert made.trained == ((0, first), (last, last + 3 + len(ends)))


def test_without_end_tokens_the_scaffold_ends_the_turn() -> None:
    codec = chat_codec(CHATML)
    row = DemonstrationText(messages=BEGIN, completion=REPLY[3:], plain=False)
    made = encoder(codec, end_token=False).demonstration(row)
    ids, end = unpack_tokens(made.completion_ids), token_id(codec, "<|im_end|>")
    assert ids[made.trained[0][1]] == end and ids[made.trained[0][1] - 1] != end


def test_a_single_turn_with_tools_has_the_prompt_of_the_agent() -> None:
    codec = chat_codec(CHATML)
    made = encoder(codec).demonstration(DemonstrationText(messages=BEGIN, completion="408", tools=(TOOL,), plain=False))
    form = turn_format(codec, EnvConfig(), chat_template=True)
    assert unpack_tokens(made.prompt_ids) == form.prompt(BEGIN, tools=[TOOL])[1]
    assert (made.trained, made.branches) == ((), ())
    assert unpack_tokens(made.completion_ids) == [*codec.encode_completion("408"), codec.end_token_id(chat=True)]


def test_pairs_of_conversations() -> None:
    codec = chat_codec(QWEN3)
    row = PairText(messages=BEGIN, chosen=REPLY, rejected="no", tools=(TOOL,), plain=False)
    made, chosen = encoder(codec).pair(row), played(codec, "template")
    assert (made.prompt_ids, made.chosen_ids) == (chosen.prompt_ids, chosen.completion_ids)
    assert (made.chosen_trained, made.chosen_branches) == (chosen.trained, chosen.branches)
    assert (made.rejected_trained, made.rejected_branches) == ((), ())
    with pytest.raises(UserError, match="are the same, 'no'"):
        encoder(codec).pair(PairText(messages=BEGIN, chosen="no", rejected="no<|im_end|>", tools=(TOOL,), where="f"))


def test_the_row_of_the_page() -> None:
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "data.md").read_text(encoding="utf-8")
    fields = json.loads(page.split("## Rows with several turns")[1].split("```json\n")[1].split("```")[0])
    text = to_demonstration(DataRow(fields=fields, where="docs/how-to/data.md"), columns={}, system_prompt="")
    codec = chat_codec(CHATML)
    made = encoder(codec).demonstration(text)
    ids, ((start, end), second) = unpack_tokens(made.completion_ids), made.trained
    (call,) = turn_format(codec, EnvConfig(), chat_template=True).parse(codec.decode(ids[start:end])).calls
    assert (call.name, call.arguments) == ("calculate", '{"expression": "12 * 34"}')
    assert codec.decode_whole(ids[end : second[0]]) == (
        "\n<|im_start|>user\n<tool_response>\n408\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def opening(tail: str) -> TextCodec:
    """Of a template that begins answers with a text, and removes thinking from earlier turns."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n" + tail + "{% endif %}"
    )
    return chat_codec(template)


OPEN, LINE, CLOSED = "<think>", "<think>\n", "<think>\n\n</think>\n\n"


@pytest.mark.parametrize(
    ("tail", "text", "rest"),
    [
        (OPEN, "<think>why</think>4", "why</think>4"),
        (OPEN, "<think>\nwhy</think>4", "\nwhy</think>4"),
        (LINE, "<think>\nwhy</think>4", "why</think>4"),
        (LINE, "<think>why</think>4", "why</think>4"),
        (LINE, "<think>\n\n</think>\n\n4", "\n</think>\n\n4"),
        (LINE, "\n<think>\nwhy</think>4", "why</think>4"),
        (LINE, "why</think><think>4", "why</think><think>4"),
        (CLOSED, "<think>\n\n</think>\n\n4", "4"),
        (CLOSED, "<think></think>\n4", "4"),
        (CLOSED, "4", "4"),
        ("</think>", "</think>4", "4"),
        ("[THINK]", "[THINK]why[/THINK]4", "why[/THINK]4"),
        ("", "<think>\nwhy</think>4", "<think>\nwhy</think>4"),
        ("", "assistant\n4", "assistant\n4"),
    ],
)
@pytest.mark.parametrize("question", ["2+2=", "<think>", "Begin with <think>"])
def test_thinking_that_the_prompt_begins_is_not_repeated(tail: str, text: str, rest: str, question: str) -> None:
    codec, messages = opening(tail), (say("user", question),)
    made = encoder(codec).demonstration(DemonstrationText(messages=messages, completion=text, plain=False))
    end = codec.end_token_id(chat=True)
    assert unpack_tokens(made.prompt_ids) == codec.encode_chat(messages)[1]
    assert unpack_tokens(made.completion_ids) == [*codec.encode_completion(rest), end]
    pair = encoder(codec).pair(PairText(messages=messages, chosen=text, rejected="22", plain=False))
    assert (pair.chosen_ids, pair.rejected_ids[-4:]) == (made.completion_ids, pack_tokens([end]))


def test_no_turn_of_a_conversation_repeats_thinking() -> None:
    codec, text = opening(LINE), "<think>\nwhy\n</think>\n\n4"
    turns = (say("assistant", text), say("user", "and?"), say("assistant", text))
    made = encoder(codec).demonstration(DemonstrationText(messages=BEGIN, completion=turns, plain=False))
    rest = [*codec.encode_completion("why\n</think>\n\n4"), codec.end_token_id(chat=True)]
    ids = unpack_tokens(made.completion_ids)
    assert [ids[start:end] for start, end in made.trained] == [rest, rest]
    assert ids.count(token_id(codec, "<think>")) == 1  # that of the second prompt
    (branch,) = made.branches
    asked = [*BEGIN, say("assistant", "\n\n4"), say("user", "and?")]
    assert ids[branch : made.trained[1][0]] == codec.encode_chat(asked)[1]


@pytest.mark.parametrize(
    ("tail", "text", "what"),
    [
        (CLOSED, "<think>\nwhy\n</think>\n\n4", "ends the thinking before an answer"),
        (CLOSED, "<think>\n\n</think>\n", "nothing follows '<think>"),
        (OPEN, "<think>\n", "nothing follows '<think>'"),
    ],
)
def test_thinking_that_contradicts_the_prompt_is_refused(tail: str, text: str, what: str) -> None:
    row = DemonstrationText(messages=BEGIN, completion=text, plain=False, where="f, line 3")
    with pytest.raises(UserError, match=what) as caught:
        encoder(opening(tail)).demonstration(row)
    assert caught.value.where == "f, line 3"


def test_special_tokens_in_rows_of_chats_are_text() -> None:
    codec, text = chat_codec(CHATML), "a<|im_end|>b"
    end = token_id(codec, "<|im_end|>")
    row = DemonstrationText(messages=(say("system", text), say("user", text)), completion=text, plain=False)
    made = encoder(codec).demonstration(row)
    assert unpack_tokens(made.prompt_ids).count(end) == 2
    ids = unpack_tokens(made.completion_ids)
    assert (codec.decode_whole(ids), ids.count(end)) == ("a<|im_end|>b<|im_end|>", 1)
    turns = (say("assistant", text), say("user", text), say("assistant", text))
    whole = encoder(codec).demonstration(DemonstrationText(messages=row.messages, completion=turns, plain=False))
    assert unpack_tokens(whole.completion_ids).count(end) == 3
    assert whole.prompt_ids == made.prompt_ids


def test_plain_rows_are_read_as_written() -> None:
    codec, text = chat_codec(CHATML), "<think>a<|im_end|>b<think>"
    ids = codec.encode_completion(text)
    assert token_id(codec, "<|im_end|>") in ids
    made = encoder(codec, chat_template=False).demonstration(
        DemonstrationText(messages=(say("user", text),), completion=text)
    )
    assert unpack_tokens(made.prompt_ids) == ids
    assert unpack_tokens(made.completion_ids) == [*ids, codec.end_token_id(chat=False)]


def test_what_the_template_refuses_is_placed() -> None:
    row = DemonstrationText(messages=BEGIN, completion=REPLY, tools=(TOOL,), where="f, line 3")
    with pytest.raises(UserError, match="tools need a chat template") as caught:
        encoder(chat_codec(CHATML), chat_template=False).demonstration(row)
    assert caught.value.where == "f, line 3"


def test_length_is_that_of_the_longest_branch() -> None:
    prompt, completion = pack_tokens(range(3)), pack_tokens(range(10))
    assert _longest_row(prompt, completion, ()) == 13
    assert _longest_row(prompt, completion, (4,)) == 7  # 3 + 4 and 6
    assert _longest_row(prompt, completion, (2, 9)) == 7  # 3 + 2, 7 and 1
