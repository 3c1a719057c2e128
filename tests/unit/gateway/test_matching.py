"""Which tokens a request adds to a session, and which of several answers it goes on with."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.unit.gateway.scripted_agent import (
    SCRIPT,
    Agent,
    answered,
    asking,
    client_of,
    new_sessions,
    opened,
    user,
)
from tidemill.core.errors import UserError
from tidemill.core.records import (
    Observation,
    unpack_logprobs,
    unpack_tokens,
)
from tidemill.trainer.packing import rows_of


async def test_a_conversation_continues_the_tokens_that_were_generated(tmp_path: Path) -> None:
    sample = Agent(sessions := new_sessions(tmp_path))
    async with client_of(sessions) as http:
        first = asyncio.create_task(sample.observe())
        path, headers = await opened(http)
        asked = asking(http, headers, [user("Hi")])
        opening = await first
        assert opening.new_branch  # the client's words, and not the task's prompt
        assert SCRIPT.codec.decode_whole(unpack_tokens(opening.token_ids)).endswith(
            "Hi<|im_end|>\n<|im_start|>assistant\n"
        )
        sample.generate("Hello")
        second = asyncio.create_task(sample.observe())
        answer = (await asked).json()["choices"][0]
        assert answer["message"]["content"] == "Hello"
        assert answer["token_ids"] == SCRIPT.codec.encode_completion("Hello")

        asked = asking(http, headers, [user("Hi"), answer["message"], user("And?")])
        observation = await second
        assert not observation.new_branch
        assert SCRIPT.codec.decode_whole(unpack_tokens(observation.token_ids)).startswith(
            "<|im_end|>\n<|im_start|>user\nAnd?"
        )
        sample.generate("Bye")
        third = asyncio.create_task(sample.observe())
        assert (await asked).json()["choices"][0]["message"]["content"] == "Bye"
        about = (await http.get(path, headers=headers)).json()
        assert about["token_ids"] == sample.context
        assert [turn["answers"][0]["text"] for turn in about["turns"]] == ["Hello", "Bye"]
        await http.post(f"{path}/reward", json={"value": 0.25}, headers=headers)
        await http.post(f"{path}/end", headers=headers)
        assert (await third) == Observation(end="done", outcome=0.25)


@pytest.mark.parametrize("api", ["chat/completions", "responses"])
@pytest.mark.parametrize(
    "said", ['<tool_call>{"name": "add"', 'So <tool_call>{"name": "add"}</tool_call> it is.', "<tool_call>"]
)
async def test_an_answer_with_calls_or_what_looks_like_one_is_continued(tmp_path: Path, said: str, api: str) -> None:
    agent, chats = Agent(sessions := new_sessions(tmp_path)), api.startswith("chat")
    tool: dict[str, Any] = {"type": "function", "function": {"name": "add"}}
    known, tools = ("messages", [tool]) if chats else ("input", [{"type": "function", "name": "add"}])
    async with client_of(sessions) as http:
        first = asyncio.create_task(agent.observe())
        _, headers = await opened(http)

        def ask(conversation: list[Any]) -> Any:
            body = {"model": "scripted", known: conversation, "tools": tools}
            return asyncio.create_task(http.post(f"/v1/{api}", json=body, headers=headers))

        asked = ask([user("Hi")])
        await first
        agent.generate(said)
        second = asyncio.create_task(agent.observe())
        answer = (await asked).json()
        replies = [answer["choices"][0]["message"]] if chats else answer["output"]
        asked = ask([user("Hi"), *replies, user("And?")])
        assert not (await second).new_branch
        asked.cancel()


async def test_a_changed_conversation_is_a_branch(tmp_path: Path) -> None:
    sample = Agent(sessions := new_sessions(tmp_path))
    async with client_of(sessions) as http:
        first = asyncio.create_task(sample.observe())
        _, headers = await opened(http)
        asked = asking(http, headers, [user("Hi")])
        await first
        sample.generate("Hello")
        second = asyncio.create_task(sample.observe())
        await asked
        asked = asking(http, headers, [user("Hi"), {"role": "assistant", "content": "Other"}, user("And?")])

        assert (await second).new_branch
        asked.cancel()


async def test_the_prompt_of_the_task_itself_adds_nothing(tmp_path: Path) -> None:
    sample = Agent(sessions := new_sessions(tmp_path))
    async with client_of(sessions) as http:
        first = asyncio.create_task(sample.observe())
        _, headers = await opened(http, task="1+1=")
        body = {"model": "scripted", "prompt": "1+1="}
        asked = asyncio.create_task(http.post("/v1/completions", json=body, headers=headers))
        opening = await first

        assert (opening.token_ids, opening.new_branch) == (b"", False)
        sample.generate("2")
        ending = asyncio.create_task(sample.observe())
        assert (await asked).json()["choices"][0]["text"] == "2"
        ending.cancel()


@pytest.mark.parametrize("chosen", [0, 1, 2])
async def test_the_answer_that_is_continued_is_trained_and_the_others_are_not(tmp_path: Path, chosen: int) -> None:
    texts = ["One", "Two", "Three"]
    agent = Agent(sessions := new_sessions(tmp_path, turns=5))
    async with client_of(sessions) as http:
        opening = asyncio.create_task(agent.observe())
        path, headers = await opened(http)
        opening.cancel()
        answer, waiting = await answered(http, agent, headers, texts)
        assert [choice["message"]["content"] for choice in answer["choices"]] == texts
        for choice, text in zip(answer["choices"], texts, strict=True):
            assert choice["token_ids"] == SCRIPT.codec.encode_completion(text)
        asked = asking(http, headers, [user("Hi"), answer["choices"][chosen]["message"], user("And?")])
        observation = await waiting
        assert observation.new_branch == (chosen < 2)
        context = SCRIPT.codec.decode_whole(agent.context)
        assert context.count(texts[chosen]) == 1
        assert not any(text in context for text in texts if text != texts[chosen])
        assert agent.context[-len(unpack_tokens(observation.token_ids)) :] == unpack_tokens(observation.token_ids)
        agent.generate("Bye")
        waiting = asyncio.create_task(agent.observe())
        assert (await asked).json()["choices"][0]["message"]["content"] == "Bye"
        branches = (await http.get(path, headers=headers)).json()["branches"]
        assert [any(text in SCRIPT.codec.decode_whole(ids) for ids in branches) for text in texts] == [True] * 3
        await http.post(f"{path}/end", headers=headers)
        await waiting

    trajectory = agent.trajectory
    ids = unpack_tokens(trajectory.token_ids)
    trained = [ids[part.start : part.end] for part in trajectory.segments if part.trained]
    assert trained == [SCRIPT.codec.encode_completion(text) for text in (texts[chosen], "Bye")]
    assert [turn.text for turn in trajectory.turns] == [texts[chosen], "Bye"]
    assert [len(row.trained) for row in rows_of(trajectory)] == (
        [len(trained[0]) + len(trained[1])] if chosen == 2 else [len(trained[0]), len(trained[1])]
    )
    logprobs = unpack_logprobs(trajectory.rollout_logprobs)
    expected = [-float(turn.start) for turn in trajectory.turns for _ in range(turn.start, turn.end)]
    assert logprobs == expected


async def test_messages_that_a_template_cannot_append_are_a_branch(tmp_path: Path) -> None:
    agent = Agent(sessions := new_sessions(tmp_path))

    class Hoisting:
        """A template that moves system messages to the front."""

        def __getattr__(self, name: str) -> Any:
            return getattr(SCRIPT.format, name)

        def answer(self, *arguments: Any, **more: Any) -> Any:
            raise UserError("the template changes earlier turns", where="the template")

    sessions._matching._format = Hoisting()
    async with client_of(sessions) as http:
        waiting = asyncio.create_task(agent.observe())
        _, headers = await opened(http)
        asked = asking(http, headers, [user("Hi")])
        await waiting
        agent.generate("One")
        waiting = asyncio.create_task(agent.observe())
        reply = (await asked).json()["choices"][0]["message"]
        asked = asking(http, headers, [user("Hi"), reply, user("And?")])
        assert (await waiting).new_branch
        asked.cancel()


async def test_without_a_choice_the_first_answer_is_trained(tmp_path: Path) -> None:
    agent = Agent(sessions := new_sessions(tmp_path))
    async with client_of(sessions) as http:
        opening = asyncio.create_task(agent.observe())
        path, headers = await opened(http)
        opening.cancel()
        _, waiting = await answered(http, agent, headers, ["One", "Two"])
        await http.post(f"{path}/end", headers=headers)
        assert (await waiting).unchosen == (1,)
        assert agent.trajectory.final == "One"
