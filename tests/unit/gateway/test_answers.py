"""Answers of /v1/chat/completions and /v1/completions, whole and as streams."""

from __future__ import annotations

from tests.unit.gateway.scripted import (
    CALL,
    CHAT,
    COMPLETIONS,
    TOOL,
    Scripted,
    chat,
    events,
    gateway,
)
from tidemill.core.records import unpack_tokens


async def test_a_chat_is_answered() -> None:
    served = Scripted()
    async with gateway(served) as client:
        answer = (await client.post(CHAT, json=chat(return_token_ids=True, logprobs=True, n=2))).json()

    assert [choice["message"]["content"] for choice in answer["choices"]] == ["Hello you."] * 2
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"stop"}
    ids = served.codec.encode_completion("Hello you.")
    assert answer["choices"][1]["token_ids"] == ids
    assert [entry["token"] for entry in answer["choices"][0]["logprobs"]["content"]] == [*"Hello you."]
    assert answer["prompt_token_ids"] == unpack_tokens(served.requested[0].prompt_ids)
    assert served.codec.decode_whole(answer["prompt_token_ids"]).endswith("Hi<|im_end|>\n<|im_start|>assistant\n")
    prompt = len(answer["prompt_token_ids"])
    assert answer["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 2 * len(ids),
        "total_tokens": prompt + 2 * len(ids),
    }


async def test_a_stream_says_the_same_and_ends_with_its_usage() -> None:
    async with gateway(Scripted()) as client:
        body = chat(stream=True, stream_options={"include_usage": True}, return_token_ids=True)
        *chunks, used, end = events((await client.post(CHAT, json=body)).text)

    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0]["role"] == "assistant"
    assert "".join(delta.get("content", "") for delta in deltas) == "Hello you."
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [*[None] * (len(chunks) - 1), "stop"]
    assert len({chunk["id"] for chunk in [*chunks, used]}) == 1
    assert sum(len(chunk["choices"][0]["token_ids"]) for chunk in chunks) == used["usage"]["completion_tokens"] == 10
    assert (used["choices"], end) == ([], "[DONE]")


async def test_tool_calls_whole_and_in_a_stream() -> None:
    async with gateway(Scripted(CALL)) as client:
        whole = (await client.post(CHAT, json=chat(tools=[TOOL]))).json()["choices"][0]
        chunks = events((await client.post(CHAT, json=chat(tools=[TOOL], stream=True))).text)[:-1]
        plain = (await client.post(CHAT, json=chat())).json()["choices"][0]

    assert whole["finish_reason"] == "tool_calls"
    assert whole["message"]["content"] == "Let me see."
    assert [call["function"] for call in whole["message"]["tool_calls"]] == [{"name": "add", "arguments": '{"a": 1}'}]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    (calls,) = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
    assert (calls[0]["index"], calls[0]["function"]["name"]) == (0, "add")
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert plain["message"]["content"] == CALL  # nobody asked for tools


async def test_completions_of_texts_and_token_ids() -> None:
    served = Scripted()
    body = {"model": "scripted", "prompt": ["One", "Two"], "max_tokens": 5, "logprobs": 0}
    async with gateway(served) as client:
        both = (await client.post(COMPLETIONS, json=body)).json()
        ids = (await client.post(COMPLETIONS, json={"model": "scripted", "prompt": [5, 6, 7], "seed": 3})).json()
        stream = await client.post(COMPLETIONS, json=body | {"prompt": "One", "stream": True})

    assert [(choice["index"], choice["text"], choice["finish_reason"]) for choice in both["choices"]] == [
        (0, "Hello", "length"),
        (1, "Hello", "length"),
    ]
    assert both["choices"][0]["logprobs"]["text_offset"] == [0, 1, 2, 3, 4]
    assert unpack_tokens(served.requested[2].prompt_ids) == [5, 6, 7]
    assert (served.requested[2].params.seed, ids["choices"][0]["finish_reason"]) == (3, "stop")
    assert "".join(chunk["choices"][0]["text"] for chunk in events(stream.text)[:-1]) == "Hello"


async def test_characters_of_several_tokens_have_their_own_bytes() -> None:
    text, served = "é 😀ok", Scripted("é 😀ok")
    body = {"model": "scripted", "prompt": "Hi", "logprobs": 0}
    async with gateway(served) as client:
        whole = (await client.post(CHAT, json=chat(logprobs=True))).json()["choices"][0]["logprobs"]["content"]
        chunks = events((await client.post(CHAT, json=chat(logprobs=True, stream=True))).text)[:-1]
        old = (await client.post(COMPLETIONS, json=body)).json()["choices"][0]["logprobs"]
        old_chunks = events((await client.post(COMPLETIONS, json=body | {"stream": True})).text)[:-1]

    assert len(whole) == len(served.codec.encode_completion(text)) > len(text)
    assert b"".join(bytes(entry["bytes"]) for entry in whole) == text.encode()
    assert [each for chunk in chunks for each in chunk["choices"][0]["logprobs"]["content"]] == whole
    offsets = [each for chunk in old_chunks for each in chunk["choices"][0]["logprobs"]["text_offset"]]
    assert offsets == old["text_offset"]
    assert offsets[-2:] == [text.index("o"), text.index("k")]
    # A token with a part of a character shows its bytes, with a mark where no other field has them.
    shown = [bytes(entry["bytes"]).decode(errors="backslashreplace") for entry in whole]
    assert [entry["token"] for entry in whole] == shown
    assert old["tokens"][:2] == [r"bytes:\xc3", r"bytes:\xa9"]
    assert old["tokens"][-2:] == ["o", "k"]
    assert [token.removeprefix("bytes:") for token in old["tokens"]] == shown
    assert [each for chunk in old_chunks for each in chunk["choices"][0]["logprobs"]["tokens"]] == old["tokens"]
