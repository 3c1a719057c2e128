"""Prompts and answers of agents, against the templates' own rendering."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.chat_models import CHATML, LLAMA3, QWEN2_5, QWEN3, chat_codec, token_id
from tests.model_folders import small_tokenizer
from tidemill.config.agent import EnvConfig
from tidemill.core.errors import UserError
from tidemill.core.protocols import TurnFormat
from tidemill.core.records import Call, Episode, Message, Prompt, SampleId, Turn, pack_tokens, unpack_tokens
from tidemill.models.codec import TextCodec
from tidemill.models.turn_format import ChatFormat, PlainFormat, turn_format

TEMPLATES = {"chatml": CHATML, "qwen2.5": QWEN2_5, "qwen3": QWEN3, "llama3": LLAMA3}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "calculate", "description": "d", "parameters": {}}}
TRL = importlib.util.find_spec("trl")


def say(role: str, content: str) -> Message:
    return Message(role=role, content=content)


def episode(form: TurnFormat, codec: TextCodec, messages: list[Message], *turns: Turn, ended: bool = True) -> Episode:
    """After turns of which only the last one's ids matter."""
    text, ids = form.prompt(messages)
    prompt = Prompt(prompt_id="p", token_ids=pack_tokens(ids), text=text, answer="", messages=tuple(messages))
    last = [*codec.encode_completion(turns[-1].text), *([codec.end_token_id(chat=True)] if ended else [])]
    return Episode(
        sample_id=SampleId(run_seed=0, purpose="train", prompt_id="p", epoch=0, index=0),
        prompt=prompt,
        turns=turns,
        token_ids=pack_tokens([*ids, *last]),
    )


def turn(text: str, **fields: Any) -> Turn:
    return Turn(start=0, end=1, text=text, **fields)


@pytest.fixture(params=TEMPLATES)
def codec(request: pytest.FixtureRequest) -> TextCodec:
    return chat_codec(TEMPLATES[request.param])


def test_a_prompt_without_markers_has_the_ids_of_other_prompts(codec: TextCodec) -> None:
    messages = [say("system", "Be  brief."), say("user", " What is 12 times 34?\n")]
    assert ChatFormat(codec).prompt(messages) == codec.encode_chat(messages)


def test_the_answer_after_a_turn_by_hand() -> None:
    codec = chat_codec(QWEN2_5)
    form, plain = ChatFormat(codec), codec.encode_completion
    start, end = token_id(codec, "<|im_start|>"), token_id(codec, "<|im_end|>")
    seen = [say("user", "no")]
    scaffold = [*plain("\n"), start, *plain("user\nno"), end, *plain("\n"), start, *plain("assistant\n")]
    done = episode(form, codec, [say("user", "q")], turn("12"))
    cut = episode(form, codec, [say("user", "q")], turn("12"), ended=False)
    assert form.answer(done, seen) == (scaffold, False)
    assert form.answer(cut, seen) == ([end, *scaffold], False)


def test_another_stop_token_ends_a_turn_too() -> None:
    codec = chat_codec(CHATML)
    form = ChatFormat(codec)
    done = episode(form, codec, [say("user", "q")], turn("12"))
    other = episode(form, codec, [say("user", "q")], turn("12<|endoftext|>"), ended=False)
    assert form.answer(other, [say("user", "no")]) == form.answer(done, [say("user", "no")])


def test_parallel_results_are_one_message_of_qwen() -> None:
    codec = chat_codec(QWEN2_5)
    form = ChatFormat(codec)
    ids, _ = form.answer(
        episode(form, codec, [say("user", "q")], turn("c")), [say("tool", "1"), say("tool", "2")], tools=[TOOL]
    )
    assert codec.decode_whole(ids) == (
        "\n<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_llamas_results_are_trimmed_or_quoted_by_its_template() -> None:
    codec = chat_codec(LLAMA3)
    form = ChatFormat(codec)
    last = episode(form, codec, [say("user", "q")], turn("c"))
    head, tail = (
        "<|start_header_id|>{}<|end_header_id|>\n\n",
        "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    )
    for role, text, shown in (("user", " no \n", "no"), ("tool", 'a"<|eot_id|>', r'"a\"<|eot_id|>"')):
        ids, _ = form.answer(last, [say(role, text)], tools=[TOOL])
        header = head.format("ipython" if role == "tool" else role)
        assert codec.decode_whole(ids) == header + shown + tail
        assert ids.count(codec.end_token_id(chat=True)) == 1


def test_markers_in_any_text_are_text(codec: TextCodec) -> None:
    form = ChatFormat(codec)
    special = set(codec.tokenizer.all_special_ids)
    markers = sorted(codec.tokenizer.get_added_vocab(), key=len)[1:]  # without the blanks
    assert len(markers) >= 9

    def specials(marker: str) -> list[int]:
        messages = [say("system", f"s {marker}"), say("user", f"{marker} u {marker}")]
        schemas = [
            {"type": "function", "function": {"name": "f", "description": marker, "parameters": {"x": [marker]}}}
        ]
        prompt = form.prompt(messages, tools=schemas)
        assert prompt[0].count(marker) >= 4
        assert codec.decode_whole(prompt[1]) == prompt[0]
        ids = list(prompt[1])
        last = episode(form, codec, messages, turn("t"))
        for answers in ([say("user", marker)], [say("tool", marker), say("tool", f"a{marker}")]):
            ids += form.answer(last, answers, tools=schemas)[0]
        return [number for number in ids if number in special]

    harmless = specials("marker")
    for marker in markers:
        assert specials(marker) == harmless, marker


def test_thinking_before_the_last_question_is_removed_in_a_new_branch() -> None:
    codec = chat_codec(QWEN3)
    form, keeping = ChatFormat(codec), ChatFormat(codec, thinking="keep")
    thought = "<think>\nwhy\n</think>\n\nfirst"
    begin, asked = [say("system", "s"), say("user", "q")], [say("user", "more")]
    ids, new_branch = form.answer(episode(form, codec, begin, turn(thought)), asked)
    assert new_branch
    assert ids == form.prompt([*begin, say("assistant", "first"), *asked])[1]
    kept, new_branch = keeping.answer(episode(form, codec, begin, turn(thought)), asked)
    assert not new_branch
    assert codec.decode_whole(kept) == "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"


def test_a_branch_renders_earlier_turns_and_their_results() -> None:
    codec = chat_codec(QWEN3)
    form = ChatFormat(codec)
    calls = tuple(Call(call_id="c", name="n", arguments="{}", result=f"r{n}<|im_end|>") for n in range(2))
    turns = (turn("<think>\na\n</think>\n\nb", calls=calls), turn("c", observation="d"), turn("e<|im_end|>"))
    ids, new_branch = form.answer(episode(form, codec, [say("user", "q")], *turns), [say("user", "f")], tools=[TOOL])
    history = [("user", "q"), ("assistant", "b"), ("tool", calls[0].result), ("tool", calls[1].result)]
    history += [("assistant", "c"), ("user", "d"), ("assistant", "e<|im_end|>"), ("user", "f")]
    assert new_branch
    expected = codec.render_chat([{"role": role, "content": text} for role, text in history], [TOOL])
    assert codec.decode_whole(ids) == expected
    # One for each turn of the scaffold and none from texts.
    assert ids.count(codec.end_token_id(chat=True)) == expected.count("<|im_end|>") - 3


OPENED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% set said = m.content %}"
    "{% if '<think>' in said and '</think>' in said and not KEEPS %}"
    "{% set said = '<think></think>' ~ said.split('</think>')[-1] %}{% endif %}{{ said }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
"""As Nemotron's: thoughts are removed only if they have a start, which the model does not write."""


@pytest.mark.parametrize("keeps", [False, True])
def test_a_thought_that_the_template_began_has_its_start_in_later_prompts(keeps: bool) -> None:
    codec = chat_codec(OPENED.replace("KEEPS", str(keeps).lower()))
    form, messages, seen = ChatFormat(codec), [say("user", "q")], [say("user", "no")]
    done = episode(form, codec, messages, turn("why\n</think>\n\n12"))
    answer, branch = form.answer(done, seen)
    written = say("assistant", "<think>\nwhy\n</think>\n\n12")
    assert branch is not keeps
    assert [*([] if branch else unpack_tokens(done.token_ids)), *answer] == codec.encode_chat(
        [*messages, written, *seen]
    )[1]


def test_thinking_stays_linear_where_the_template_keeps_it() -> None:
    thought = "<think>\nwhy\n</think>\n\nfirst"
    for template, answers in ((QWEN3, [say("tool", "1")]), (QWEN2_5, [say("user", "more")])):
        codec = chat_codec(template)
        form = ChatFormat(codec)
        assert not form.answer(episode(form, codec, [say("user", "q")], turn(thought)), answers, tools=[TOOL])[1]
    codec = chat_codec(QWEN3)  # nothing to remove
    form = ChatFormat(codec)
    assert not form.answer(episode(form, codec, [say("user", "q")], turn("first")), [say("user", "more")])[1]


def test_a_template_without_tools_gets_them_in_the_system_message() -> None:
    codec = chat_codec(CHATML)
    form = ChatFormat(codec)
    text, _ = form.prompt([say("user", "q")], tools=[TOOL])
    assert text.startswith("<|im_start|>system\nYou can call these functions:\n<tools>\n")
    assert '"name": "calculate"' in text
    ids, _ = form.answer(episode(form, codec, [say("user", "q")], turn("t")), [say("tool", "1")], tools=[TOOL])
    assert "<|im_start|>user\n<tool_response>\n1\n</tool_response><|im_end|>" in codec.decode_whole(ids)
    assert form.parse('<tool_call>{"name": "calculate", "arguments": {}}</tool_call>').calls[0].name == "calculate"


FIXED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


@pytest.mark.parametrize(
    ("template", "what"),
    [
        ("{{ messages[-1].content }}<|im_end|>", "does not render an assistant's message"),
        (FIXED.replace("m.content", "m.content | upper | replace('GENERATED', '')"), "does not render an assistant's"),
        (FIXED.replace("<|im_end|>", "</end>"), "does not end an assistant's turn with a stop token"),
        (FIXED.replace("{{ m.role }}", "{{ messages | length }}"), "changes earlier turns .* role user follows"),
    ],
)
def test_a_template_that_cannot_be_continued_is_refused(template: str, what: str) -> None:
    codec = chat_codec(template)
    codec.tokenizer.name_or_path = "some/model"
    with pytest.raises(UserError, match=f"template of some/model {what}") as caught:
        turn_format(codec, EnvConfig(), chat_template=True)
    assert caught.value.where == "model.chat_template" and "\n" not in caught.value.hint


def test_unsupported_calls_are_refused_only_with_tools() -> None:
    codec = chat_codec(QWEN2_5.replace("write ", "write <function=name>"))
    form = ChatFormat(codec)
    assert form.prompt([say("user", "q")])
    assert form.parse("<tool_call>{}</tool_call>").calls == ()
    with pytest.raises(UserError, match="format of Qwen3-Coder"):
        form.prompt([say("user", "q")], tools=[TOOL])


def test_plain_turns_are_concatenated() -> None:
    codec = TextCodec(small_tokenizer(), [1])
    form = turn_format(codec, EnvConfig(), chat_template=False)
    assert isinstance(form, PlainFormat)
    text, ids = form.prompt([say("system", "s"), say("user", "1<eos>")])
    assert (text, ids) == ("s\n\n1<eos>", [ord(char) for char in "s\n\n1<eos>"])
    last = episode(form, codec, [say("user", "q")], turn("t"))
    assert form.answer(last, [say("user", "low<eos>\n")]) == ([ord(char) for char in "low<eos>\n"], False)
    assert form.encode_text("<eos>") == [ord(char) for char in "<eos>"]
    assert form.decode([ord("4"), 1]) == "4"
    assert form.parse("<tool_call>{}</tool_call>").calls == ()
    with pytest.raises(UserError, match="tools need a chat template"):
        form.prompt([say("user", "q")], tools=[TOOL])


def test_the_format_of_a_folder(tmp_path: Path) -> None:
    chat_codec(CHATML).tokenizer.save_pretrained(tmp_path)
    form = turn_format(tmp_path, EnvConfig(thinking="keep"), chat_template=True)
    assert form.prompt([say("user", "q")])[0].endswith("<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.skipif(TRL is None, reason="needs trl, which contains the templates of many models")
@pytest.mark.parametrize(
    ("name", "branches"),
    [("qwen2_5", False), ("qwen3", True), ("qwen3_instruct_2507", False), ("llama3", False), ("llama3_2", False)],
)
def test_templates_of_released_models(name: str, branches: bool) -> None:
    assert TRL is not None and TRL.origin is not None
    codec = chat_codec((Path(TRL.origin).parent / "chat_templates" / f"{name}.jinja").read_text())
    form = ChatFormat(codec)
    begin, thought = [say("system", "s"), say("user", "q")], "<think>\nwhy\n</think>\n\nfirst"
    for tools, answers in (([TOOL], [say("tool", "1"), say("tool", "2")]), ([], [say("user", "more")])):
        if tools and name == "llama3":
            continue
        ids = form.prompt(begin, tools=tools)[1]
        generated = [*codec.encode_completion(thought), codec.end_token_id(chat=True)]
        last = episode(form, codec, begin, turn(thought))
        added, new_branch = form.answer(last, answers, tools=tools)
        assert new_branch == (branches and not tools)
        whole = added if new_branch else [*ids, *generated, *added]
        turns = [*begin, say("assistant", thought), *answers]
        rendered = codec.render_chat([{"role": each.role, "content": each.content} for each in turns], tools)
        assert codec.decode_whole(whole) == rendered
        assert whole == codec.encode_chat(turns, tools=tools)[1]


@pytest.mark.parametrize("name", ["qwen2.5", "llama3", "chatml"])
def test_no_part_of_a_tools_schema_becomes_a_special_token(name: str) -> None:
    codec = chat_codec(TEMPLATES[name])
    form = turn_format(codec, EnvConfig(), chat_template=True)
    special = {token_id(codec, token) for token in codec.tokenizer.all_special_tokens}
    marks = "".join(codec.tokenizer.all_special_tokens)
    hostile = {
        "type": "function",
        "function": {**TOOL["function"], "parameters": {"properties": {marks: {"title": marks}}}},
    }
    plain, attacked = (form.prompt([say("user", "Hi")], tools=[tool])[1] for tool in (TOOL, hostile))

    assert [token for token in attacked if token in special] == [token for token in plain if token in special]
