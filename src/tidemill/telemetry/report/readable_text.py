"""Texts as a reader of the report wants them: chats as roles and contents, marks of templates muted, long texts folded.

The messages in samples files are what the chat template was given; the prompt's text is what it made of them. The text
is read by the marks of known templates, because it can contain more than the messages: a default system message, tools.
It is believed only if it contains every message in one piece: a content may contain marks, too, which are text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tidemill.core.formatting import number
from tidemill.core.records import Message, Record

FOLDED = 600
"""Longer texts are folded, with their start and their end visible."""
START_SHOWN, END_SHOWN = 200, 360
LONGEST = 20_000
"""Characters of one text on the page; of a longer one the middle is left out."""

MARK = re.compile(
    r"<\|[^\s<>|]{1,40}\|>|<｜[^\s<>｜]{1,40}｜>|<\|?turn\|?>|</?(?:s|bos|eos|pad|unk|start_of_turn|end_of_turn)>"
    r"|</?(?:think|thinking|tool|tool_call|tool_calls|tool_response|tool_responses|tools|start_of_image)>"
    r"|\[/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS|TOOL_CONTENT|ARGS|THINK)\]|<</?SYS>>"
)
"""What looks like a special token, or like a marker of thinking and calls."""
ROLES = {
    "model": "assistant",
    "ipython": "tool",
    "observation": "tool",
    "[INST]": "user",
    "[/INST]": "assistant",
    "[SYSTEM_PROMPT]": "system",
    "[AVAILABLE_TOOLS]": "tools",
    "[TOOL_CALLS]": "assistant",
    "[TOOL_RESULTS]": "tool",
    "[/TOOL_RESULTS]": "assistant",
    "<<SYS>>": "system",
    "<</SYS>>": "user",
}


@dataclass(frozen=True, slots=True)
class ChatMarks:
    """How a family of templates starts and ends a message; the group of `start` is the role."""

    start: re.Pattern[str]
    end: re.Pattern[str]  # before the next start
    unmarked_system: bool = False  # a system message stands before the first start


def _marks(start: str, end: str, *, unmarked_system: bool = False) -> ChatMarks:
    return ChatMarks(re.compile(start), re.compile(rf"(?:{end})?\s*\Z"), unmarked_system)


CHAT_MARKS = {
    "ChatML": _marks(r"<\|im_start\|>([\w-]+)\n", r"<\|im_end\|>"),
    "Llama 3": _marks(r"<\|start_header_id\|>([\w-]+)<\|end_header_id\|>\n\n", r"<\|eot_id\|>|<\|eom_id\|>"),
    "Llama 4": _marks(r"<\|header_start\|>([\w-]+)<\|header_end\|>\n\n", r"<\|eot\|>|<\|eom\|>"),
    "Gemma": _marks(r"<start_of_turn>(\w+)\n", r"<end_of_turn>"),
    "Gemma 4": _marks(r"<\|turn>(\w+)\n", r"<turn\|>"),
    "Mistral": _marks(
        r"(\[/?INST\]|\[SYSTEM_PROMPT\]|\[AVAILABLE_TOOLS\]|\[TOOL_CALLS\]|\[/?TOOL_RESULTS\]|<</?SYS>>) ?",
        r"(?:</s>|\[/SYSTEM_PROMPT\]|\[/AVAILABLE_TOOLS\])\s*(?:<s>)?",
    ),
    "Harmony": _marks(
        r"<\|start\|>(\w+)[^<]*(?:<\|channel\|>[^<]*)?<\|message\|>",
        r"<\|(?:end|return|call)\|>(?:<\|start\|>assistant)?",
    ),
    "Phi, Zephyr, GLM": _marks(
        r"<\|(system|developer|user|assistant|tool|observation)\|>\n?", r"<\|(?:end|endoftext)\|>|</s>"
    ),
    "DeepSeek": _marks(r"<｜(User|Assistant|System)｜>", r"<｜end▁of▁sentence｜>", unmarked_system=True),
}


class PromptView(Record):
    """A prompt as the page shows it."""

    text: str  # shown without messages
    messages: tuple[Message, ...] = ()
    raw: str = ""  # as the model reads it, on demand; empty if `text` is the same


def prompt_view(text: str, messages: Sequence[Message] = ()) -> PromptView:
    """A prompt as messages, if it is a chat.

    Args:
        messages: those that the chat template was given, if they are known.
    """
    read = read_chat(text)
    remaining = iter(read)
    contained = all(any(wanted.content.strip() in one.content for one in remaining) for wanted in messages)
    shown = read if contained else tuple(messages)
    return PromptView(text=text, messages=shown, raw=text if shown else "")


def read_chat(text: str) -> tuple[Message, ...]:
    """The messages of a rendered chat by its marks; empty if it does not start with those of a known template. The
    start of the assistant's turn is left out."""
    for marks in CHAT_MARKS.values():
        starts = list(marks.start.finditer(text))
        if not starts:
            continue
        before = MARK.sub("", text[: starts[0].start()]).strip()
        if before and not (marks.unmarked_system and MARK.match(text)):
            continue
        ends = [start.start() for start in starts[1:]] + [len(text)]
        found = [Message(role="system", content=before)] if before else []
        for start, end in zip(starts, ends, strict=True):
            role = ROLES.get(start.group(1), start.group(1).lower())
            found.append(Message(role=role, content=marks.end.sub("", text[start.end() : end]).strip()))
        return tuple(message for message in found if message.content)
    return ()


def shared_start(views: Sequence[PromptView]) -> tuple[PromptView | None, list[PromptView]]:
    """What all prompts start with (few-shot examples, a system message), and the prompts without it."""
    if len({view.raw or view.text for view in views}) < 2:
        return None, list(views)
    if all(view.messages for view in views):
        least = min(len(view.messages) for view in views) - 1
        lead = next((at for at in range(least) if len({view.messages[at] for view in views}) > 1), least)
        rest = [PromptView(text=view.text, messages=view.messages[lead:], raw=view.raw) for view in views]
        return PromptView(text="", messages=views[0].messages[:lead]) if lead else None, rest
    if any(view.messages for view in views):
        return None, list(views)
    low, high = min(view.text for view in views), max(view.text for view in views)
    same = next((index for index, pair in enumerate(zip(low, high, strict=False)) if pair[0] != pair[1]), len(low))
    characters = low[:same].rfind("\n") + 1  # in the complete lines that all prompts start with
    rest = [PromptView(text=view.text[characters:]) for view in views]
    return PromptView(text=views[0].text[:characters]) if characters else None, rest


class TextPart(Record):
    """A part of a text."""

    text: str
    mark: bool


class ReadableText(Record):
    """A text as the page shows it."""

    whole: tuple[TextPart, ...]
    start: tuple[TextPart, ...] = ()  # of a long text, which is folded
    end: tuple[TextPart, ...] = ()
    hidden: str = ""  # characters between start and end; empty for a short text


def readable(text: str, *, marks: bool = True) -> ReadableText:
    """A text in pieces; a long one is folded, and opens to the whole.

    Args:
        marks: what looks like a special token is one.
    """

    def cut(part: str) -> tuple[TextPart, ...]:
        return pieces(part) if marks else (TextPart(text=part, mark=False),)

    whole = cut(shortened(text))
    if len(text) <= FOLDED:
        return ReadableText(whole=whole)
    hidden = number(len(text) - START_SHOWN - END_SHOWN)
    return ReadableText(whole=whole, start=cut(text[:START_SHOWN]), end=cut(text[-END_SHOWN:]), hidden=hidden)


def shortened(text: str) -> str:
    """A text of more than `LONGEST` characters without its middle."""
    if len(text) <= LONGEST:
        return text
    half = LONGEST // 2
    return f"{text[:half]}\n… {number(len(text) - 2 * half)} characters left out …\n{text[-half:]}"


def pieces(text: str) -> tuple[TextPart, ...]:
    """The text cut at its marks."""
    found, position = list[TextPart](), 0
    for mark in MARK.finditer(text):
        found += [TextPart(text=text[position : mark.start()], mark=False), TextPart(text=mark.group(), mark=True)]
        position = mark.end()
    return tuple(piece for piece in (*found, TextPart(text=text[position:], mark=False)) if piece.text)
