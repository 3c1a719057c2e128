"""Sessions: which tokens a request adds, what is answered again, who may do what, and what a restart remembers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.unit.gateway.scripted import Scripted, gateway
from tidemill.config.gateway import GatewayConfig
from tidemill.controller.samples import Sample, SampleState
from tidemill.controller.turns import AgentLimits
from tidemill.core.errors import UserError
from tidemill.core.records import (
    Observation,
    PolicyVersion,
    Prompt,
    SampleId,
    SamplingParams,
    Trajectory,
    pack_logprobs,
    pack_tokens,
    unpack_logprobs,
    unpack_tokens,
)
from tidemill.gateway import sessions as sessions_module
from tidemill.gateway.app import Gateway
from tidemill.gateway.server import listen, serving
from tidemill.gateway.session_log import SessionEvent, SessionLog
from tidemill.gateway.sessions import Sessions
from tidemill.jobs.gateway import ServedSessions, write_hermes
from tidemill.trainer.packing import rows_of

OPEN = "/v1/tidemill/sessions"
SAMPLING = SamplingParams(max_new_tokens=40)
LIMITS = AgentLimits(context_tokens=400, opens=True)
VERSION = PolicyVersion(number=0, digest="")
SCRIPT = Scripted()


class NoCalls:
    """Implements `core.protocols.CallLog`."""

    async def started(self, index: int) -> None: ...

    async def ended(self, index: int, call: Any) -> None: ...


class Fleet:
    engine_count = 1


class Agent:
    """A sample as the controller keeps it: it asks the environment, and generates what a test says."""

    def __init__(self, sessions: Sessions, index: int = 0, prompt: str = "1+1=", epoch: int = 0) -> None:
        self.sessions = sessions
        self.prompt_ids = SCRIPT.codec.encode(prompt)
        self.sample = Sample(
            sample_id=SampleId(run_seed=0, purpose="train", prompt_id=prompt, epoch=epoch, index=index),
            ordinal=index,
            prompt=Prompt(prompt_id=prompt, token_ids=pack_tokens(self.prompt_ids), text=prompt, answer=""),
            opens=True,
            state=SampleState.ACTING,
        )

    @property
    def context(self) -> list[int]:
        return unpack_tokens(self.sample.episode(SCRIPT.codec.decode).token_ids)

    @property
    def completion(self) -> list[int]:
        return unpack_tokens(bytes(self.sample.token_ids))

    @property
    def trajectory(self) -> Trajectory:
        return self.sample.trajectory(SCRIPT.codec.decode)

    async def observe(self) -> Observation:
        async with asyncio.timeout(10):
            answer = await self.sessions.act(self.sample.episode(SCRIPT.codec.decode), NoCalls())
        self.sample.observe(answer, SAMPLING, LIMITS)
        return answer

    def generate(self, text: str, *, report: bool = True) -> None:
        sample, ids = self.sample, SCRIPT.codec.encode_completion(text)
        sample.assign("lease", 0)
        sample.extend(pack_tokens(ids), pack_logprobs([-float(sample.length)] * len(ids)), VERSION)
        if report:
            sent = bytes(sample.token_ids), bytes(sample.logprobs)
            self.sessions.receive(sample.sample_id, sample.turns.start, *sent, sample.length)
        sample.end_attempt("stop", "", SAMPLING, LIMITS)


def new_sessions(folder: Path, *, idle_s: float = 60.0, turns: int = 4) -> Sessions:
    return Sessions(
        SCRIPT.format,
        SessionLog(folder / "sessions.jsonl"),
        secret=b"secret",
        sampling=SAMPLING,
        idle_s=idle_s,
        turns=turns,
        write_calls=write_hermes,
    )


@asynccontextmanager
async def client_of(sessions: Sessions) -> AsyncIterator[httpx2.AsyncClient]:
    fleet: Any = Fleet()
    served = ServedSessions("scripted", SCRIPT.codec, SCRIPT.format, sessions, SAMPLING, fleet, context_tokens=400)
    config = GatewayConfig(port=0)
    listener = listen(config)
    app = Gateway(served, config, write_calls=write_hermes, sessions=sessions).app()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    async with serving(app, listener, config), httpx2.AsyncClient(base_url=url, timeout=10, trust_env=False) as http:
        yield http
    await sessions.close()
    sessions._log.close()


async def opened(http: httpx2.AsyncClient, **body: Any) -> tuple[str, dict[str, str]]:
    """(path of a new session, its headers)."""
    found = (await http.post(OPEN, json=body)).json()
    return f"{OPEN}/{found['id']}", {"authorization": f"Bearer {found['key']}"}


def asking(http: httpx2.AsyncClient, headers: dict[str, str], messages: Sequence[dict[str, Any]], **more: Any) -> Any:
    body = {"model": "scripted", "messages": list(messages), "return_token_ids": True, **more}
    return asyncio.create_task(http.post("/v1/chat/completions", json=body, headers=headers))


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def text_of(observation: Observation) -> str:
    return SCRIPT.codec.decode_whole(unpack_tokens(observation.token_ids))


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


async def test_a_repeated_request_gets_the_same_answer_also_after_a_restart(tmp_path: Path) -> None:
    sample = Agent(sessions := new_sessions(tmp_path))
    async with client_of(sessions) as http:
        first = asyncio.create_task(sample.observe())
        path, headers = await opened(http)
        asked = asking(http, headers, [user("Hi")])
        await first
        sample.generate("Hello")
        waiting = asyncio.create_task(sample.observe())
        before = (await asked).json()["choices"]
        assert (await asking(http, headers, [user("Hi")])).json()["choices"] == before
        await http.post(f"{path}/reward", json={"value": 1.5}, headers=headers)
        waiting.cancel()

    sample.sessions = again = new_sessions(tmp_path)
    async with client_of(again) as http:
        waiting = asyncio.create_task(sample.observe())
        await asyncio.sleep(0.05)
        assert (await asking(http, headers, [user("Hi")])).json()["choices"] == before
        assert len((await http.get(path, headers=headers)).json()["turns"]) == 1
        await http.post(f"{path}/end", headers=headers)
        assert (await waiting).outcome == 1.5


async def test_a_silent_session_is_left_out_and_its_key_is_gone(tmp_path: Path) -> None:
    sample = Agent(sessions := new_sessions(tmp_path, idle_s=0.2))
    async with client_of(sessions) as http:
        first = asyncio.create_task(sample.observe())
        path, headers = await opened(http)
        assert (await first).end == "fault"
        late = await asking(http, headers, [user("Hi")])
        assert (late.status_code, late.json()["error"]["code"]) == (410, "session_ended")
        assert (await http.get(path, headers=headers)).json()["status"] == "ended"
        assert (await http.post(f"{path}/reward", json={"value": 1}, headers=headers)).status_code == 410


@pytest.mark.parametrize(("turns", "text"), [(1, "Hello"), (4, "H" * 40)])
async def test_what_is_used_up_is_refused_and_the_reward_still_counts(tmp_path: Path, turns: int, text: str) -> None:
    agent = Agent(sessions := new_sessions(tmp_path, turns=turns))
    async with client_of(sessions) as http:
        first = asyncio.create_task(agent.observe())
        path, headers = await opened(http)
        asked = asking(http, headers, [user("Hi")])
        await first
        agent.generate(text)
        last = asyncio.create_task(agent.observe())
        reply = (await asked).json()["choices"][0]["message"]
        assert reply["content"] == text
        refused = await asking(http, headers, [user("Hi"), reply, user("And?")])
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
        await http.post(f"{path}/reward", json={"value": 0.5}, headers=headers)
        await http.post(f"{path}/end", headers=headers)
        assert (await last).outcome == 0.5


async def answered(http: httpx2.AsyncClient, agent: Agent, headers: dict[str, str], texts: Sequence[str]) -> Any:
    """What the client gets for "Hi" with `n` answers, and the environment's last wait."""
    waiting = asyncio.create_task(agent.observe())
    asked = asking(http, headers, [user("Hi")], n=len(texts))
    for text in texts:
        await waiting
        agent.generate(text)
        waiting = asyncio.create_task(agent.observe())
    return (await asked).json(), waiting


async def test_a_session_whose_agent_failed_is_left_out_also_after_a_restart(tmp_path: Path) -> None:
    agent = Agent(sessions := new_sessions(tmp_path))
    async with client_of(sessions) as http:
        waiting = asyncio.create_task(agent.observe())
        path, headers = await opened(http)
        asked = asking(http, headers, [user("Hi")])
        await waiting
        agent.generate("One")
        before = agent.sample.episode(SCRIPT.codec.decode)
        waiting = asyncio.create_task(agent.observe())
        await asked
        ended = await http.post(f"{path}/end", json={"failed": True}, headers=headers)
        assert ended.json()["status"] == "ended"
        assert (await waiting).end == "fault"

    async with client_of(again := new_sessions(tmp_path)):
        assert (await again.act(before, NoCalls())).end == "fault"


async def test_the_time_of_an_answer_is_not_the_clients_silence(tmp_path: Path) -> None:
    agent = Agent(sessions := new_sessions(tmp_path, idle_s=0.5))
    async with client_of(sessions) as http:
        waiting = asyncio.create_task(agent.observe())
        path, headers = await opened(http)
        asked = asking(http, headers, [user("Hi")])
        await waiting
        await asyncio.sleep(0.7)  # generating
        agent.generate("One")
        waiting = asyncio.create_task(agent.observe())
        await asked
        await http.post(f"{path}/end", headers=headers)
        assert (await waiting).end == "done"


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


async def test_a_reward_of_a_request_is_that_of_the_answer_that_is_trained(tmp_path: Path) -> None:
    agent = Agent(sessions := new_sessions(tmp_path, turns=5))
    async with client_of(sessions) as http:
        opening = asyncio.create_task(agent.observe())
        path, headers = await opened(http)
        opening.cancel()
        answer, waiting = await answered(http, agent, headers, ["One", "Two"])
        asked = asking(http, headers, [user("Hi"), answer["choices"][1]["message"], user("And?")])
        await waiting
        agent.generate("Bye")
        waiting = asyncio.create_task(agent.observe())
        await asked
        for turn, value in enumerate((0.5, 2.0)):
            await http.post(f"{path}/reward", json={"value": value, "turn": turn}, headers=headers)
        await http.post(f"{path}/end", headers=headers)
        await waiting
    assert [(turn.text, turn.reward) for turn in agent.trajectory.turns] == [("Two", 0.5), ("Bye", 2.0)]


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


async def test_a_group_with_one_client_does_not_wait_for_others_for_ever(tmp_path: Path) -> None:
    sessions = new_sessions(tmp_path, idle_s=0.3)
    agents = [Agent(sessions, 0), Agent(sessions, 1), Agent(sessions, 0, epoch=1)]
    async with client_of(sessions) as http:
        acting = [asyncio.create_task(agent.observe()) for agent in agents]
        path, headers = await opened(http, group="a")
        asked = asking(http, headers, [user("Hi")])
        await acting[0]
        agents[0].generate("One")
        ending = asyncio.create_task(agents[0].observe())
        await asked
        await http.post(f"{path}/end", headers=headers)
        assert (await ending).end == "done"
        assert (await acting[1]).end == "fault"
        await asyncio.sleep(0.4)
        assert not acting[2].done()  # nobody has asked for its group
        acting[2].cancel()


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


async def test_a_restart_between_the_answers_of_a_request_repeats_none(tmp_path: Path) -> None:
    agent = Agent(sessions := new_sessions(tmp_path))
    async with client_of(sessions) as http:
        first = asyncio.create_task(agent.observe())
        _, headers = await opened(http)
        asked = asking(http, headers, [user("Hi")], n=2)
        await first
        agent.generate("One")
    asked.cancel()

    agent.sessions = again = new_sessions(tmp_path)
    async with client_of(again) as http:
        second = asyncio.create_task(agent.observe())
        await asyncio.sleep(0.05)
        asked = asking(http, headers, [user("Hi")], n=2)
        assert (await second).new_branch
        agent.generate("Two")
        waiting = asyncio.create_task(agent.observe())
        assert [each["message"]["content"] for each in (await asked).json()["choices"]] == ["One", "Two"]
        waiting.cancel()


async def test_a_conversation_goes_on_after_a_restart(tmp_path: Path) -> None:
    agent = Agent(sessions := new_sessions(tmp_path))
    async with client_of(sessions) as http:
        first = asyncio.create_task(agent.observe())
        path, headers = await opened(http)
        asked = asking(http, headers, [user("Hi")])
        await first
        agent.generate("Hello ")
        second = asyncio.create_task(agent.observe())
        reply = (await asked).json()["choices"][0]["message"]
        second.cancel()

    agent.sessions = again = new_sessions(tmp_path)
    async with client_of(again) as http:
        early = await asking(http, headers, [user("Hi"), reply, user("And?")])
        assert (early.status_code, early.json()["error"]["code"]) == (503, "unavailable")
        assert (await http.get(path)).status_code == 503
        second = asyncio.create_task(agent.observe())
        await asyncio.sleep(0.05)
        asked = asking(http, headers, [user("Hi"), {**reply, "content": "Hello"}, user("And?")])
        assert not (await second).new_branch
        asked.cancel()


async def test_a_session_that_a_resumed_run_does_not_come_to_has_ended(tmp_path: Path) -> None:
    log = SessionLog(tmp_path / "sessions.jsonl")
    log.write(SessionEvent(session="a", event="attached"))
    log.write(SessionEvent(session="b", event="attached"))
    log.write(SessionEvent(session="b", event="ended"))
    log.close()
    sessions = new_sessions(tmp_path, idle_s=0.2)
    async with client_of(sessions) as http:
        assert (await http.get(f"{OPEN}/a")).status_code == 503
        assert (await http.get(f"{OPEN}/b")).status_code == 410
        await asyncio.sleep(0.25)
        assert (await http.get(f"{OPEN}/a")).status_code == 410
        assert (await http.get(f"{OPEN}/c")).status_code == 404


async def test_a_retry_key_opens_one_session_also_after_a_restart(tmp_path: Path) -> None:
    keyed = {"idempotency-key": "k"}
    agents = [Agent(sessions := new_sessions(tmp_path))]
    agents.append(Agent(sessions, 1))
    async with client_of(sessions) as http:
        acting = [asyncio.create_task(agent.observe()) for agent in agents]
        found = (await http.post(OPEN, json={}, headers=keyed)).json()
        assert (await http.post(OPEN, json={}, headers=keyed)).json()["id"] == found["id"]
        reused = await http.post(OPEN, json={"group": "a"}, headers=keyed)
        assert (reused.status_code, reused.json()["error"]["code"]) == (409, "idempotency_key_reused")
        for task in acting:
            task.cancel()

    agents[0].sessions = agents[1].sessions = again = new_sessions(tmp_path)
    async with client_of(again) as http:
        asked = asyncio.create_task(http.post(OPEN, json={}, headers=keyed))
        acting = [asyncio.create_task(agents[1].observe())]  # free, but not the one that the client had
        await asyncio.sleep(0.1)
        assert not asked.done()
        acting.append(asyncio.create_task(agents[0].observe()))
        assert (await asked).json()["key"] == found["key"]
        for task in acting:
            task.cancel()


async def test_a_client_that_leaves_while_it_waits_gets_no_session(tmp_path: Path) -> None:
    sessions = new_sessions(tmp_path)
    async with client_of(sessions) as http:
        with pytest.raises(httpx2.ReadTimeout):
            await http.post(OPEN, json={}, timeout=0.2)
        await asyncio.sleep(0.1)
        acting = asyncio.create_task(Agent(sessions).observe())
        await asyncio.sleep(0.1)
        path, headers = await opened(http)
        assert (await http.get(path, headers=headers)).json()["status"] == "open"
        acting.cancel()


async def test_a_run_that_stops_keeps_no_client_waiting(tmp_path: Path) -> None:
    sessions = new_sessions(tmp_path)
    async with client_of(sessions) as http:
        waiting = asyncio.create_task(http.post(OPEN, json={}))
        await asyncio.sleep(0.1)
        await sessions.close()
        assert (await waiting).status_code == 503


async def test_a_retry_key_makes_a_request_and_its_repetitions_one(tmp_path: Path) -> None:
    agent = Agent(sessions := new_sessions(tmp_path))

    async def ask(key: str, text: str = "Hi") -> Any:
        return await asking(http, {**headers, "idempotency-key": key}, [user(text)])

    async with client_of(sessions) as http:
        waiting = asyncio.create_task(agent.observe())
        _, headers = await opened(http)
        texts = list[str]()
        for key, said in (("a", "One"), ("b", "Two")):  # equal requests, but not repetitions
            asked = asyncio.create_task(ask(key))
            await waiting
            agent.generate(said)
            waiting = asyncio.create_task(agent.observe())
            texts.append((await asked).json()["choices"][0]["message"]["content"])
        assert texts == ["One", "Two"]
        assert (await ask("a")).json()["choices"][0]["message"]["content"] == "One"
        reused = await ask("a", "Other")
        assert (reused.status_code, reused.json()["error"]["code"]) == (409, "idempotency_key_reused")
        waiting.cancel()


async def test_rewards_of_turns(tmp_path: Path) -> None:
    agent = Agent(sessions := new_sessions(tmp_path))
    async with client_of(sessions) as http:
        waiting = asyncio.create_task(agent.observe())
        path, headers = await opened(http)
        for text in ("One", "Two"):
            asked = asking(http, headers, [user(text)])
            await waiting
            agent.generate(text)
            waiting = asyncio.create_task(agent.observe())
            await asked
        late = await http.post(f"{path}/reward", json={"value": 1, "turn": 2}, headers=headers)
        assert (late.status_code, late.json()["error"]["param"]) == (400, "turn")
        await http.post(f"{path}/reward", json={"value": 0.25, "turn": 0}, headers=headers)
        waiting.cancel()

    agent.sessions = again = new_sessions(tmp_path)
    async with client_of(again) as http:
        waiting = asyncio.create_task(agent.observe())
        await asyncio.sleep(0.05)
        about = (await http.post(f"{path}/reward", json={"value": -1, "turn": 1}, headers=headers)).json()
        assert [turn["reward"] for turn in about["turns"]] == [0.25, -1]
        await http.post(f"{path}/end", headers=headers)
        await waiting
        assert [turn.reward for turn in agent.trajectory.turns] == [0.25, -1]
        assert agent.trajectory.outcome is None


async def test_sessions_with_one_name_are_of_one_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions_module, "SLOT_WAIT_S", 0.2)
    sessions = new_sessions(tmp_path)
    agents = [Agent(sessions, index, epoch=epoch) for epoch in range(2) for index in range(2)]
    async with client_of(sessions) as http:
        acting = [asyncio.create_task(agent.observe()) for agent in agents]

        async def place(group: str) -> int:
            path, _ = await opened(http, group=group)
            session = sessions.named(path.rpartition("/")[2])
            return session.sample_id.epoch

        places = [await place(group) for group in ("a", "b", "a", "b")]
        assert places[0] == places[2] != places[1] == places[3]
        full = await http.post(OPEN, json={"group": "a"})
        assert full.status_code == 429
        for task in acting:
            task.cancel()


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"temperature": 0.5}, "temperature"),
        ({"top_p": 0.9}, "top_p"),
        ({"max_tokens": 39}, "max_tokens"),
        ({"stop": "x"}, "stop"),
        ({"seed": 1}, "seed"),
    ],
)
async def test_what_the_run_decides_is_refused(tmp_path: Path, more: dict[str, Any], param: str) -> None:
    sample = Agent(sessions := new_sessions(tmp_path))
    async with client_of(sessions) as http:
        first = asyncio.create_task(sample.observe())
        _, headers = await opened(http)
        refused = await asking(http, headers, [user("Hi")], **more)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        asked = asking(http, headers, [user("Hi")], temperature=1.0, max_tokens=40, top_p=1.0)
        await first
        sample.generate("Hello")
        last = asyncio.create_task(sample.observe())
        assert (await asked).status_code == 200
        last.cancel()


async def test_keys_open_their_own_session_only(tmp_path: Path) -> None:
    sessions = new_sessions(tmp_path)
    samples = [Agent(sessions, index) for index in range(2)]
    async with client_of(sessions) as http:
        acting = [asyncio.create_task(sample.observe()) for sample in samples]
        (one, own), (other, _) = await opened(http), await opened(http)
        assert one != other
        assert (await http.get(other, headers=own)).status_code == 403
        assert (await http.post(OPEN, json={}, headers=own)).status_code == 403
        assert (await http.get(f"{OPEN}/unknown", headers=own)).status_code == 404
        wrong = await http.put(other, headers=own)
        assert (wrong.status_code, sorted(wrong.headers["allow"].split(", "))) == (405, ["GET", "HEAD"])
        without = await http.post("/v1/chat/completions", json={"model": "scripted", "messages": [user("Hi")]})
        assert without.json()["error"]["code"] == "session_required"
        asked = asking(http, own, [user("Hi")])
        await acting[0]
        busy = await asking(http, own, [user("Other")])
        assert (busy.status_code, busy.json()["error"]["code"]) == (409, "session_busy")
        assert busy.headers["retry-after"] == "1"
        asked.cancel()
        acting[1].cancel()


async def test_tasks_and_groups_choose_the_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions_module, "SLOT_WAIT_S", 0.2)
    sessions = new_sessions(tmp_path)
    acting = [asyncio.create_task(Agent(sessions, 0, prompt).observe()) for prompt in ("1+1=", "2+2=")]
    async with client_of(sessions) as http:
        found = (await http.post(OPEN, json={"task": "2+2=", "group": "a", "metadata": {"try": 3}})).json()
        assert found["task"]["prompt"] == "2+2="
        assert found["metadata"] == {"try": 3}
        none = await http.post(OPEN, json={"task": "2+2="})
        assert (none.status_code, none.json()["error"]["code"]) == (429, "no_open_task")
        assert "retry-after" in none.headers
    for task in acting:
        task.cancel()


def test_a_log_remembers_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = SessionLog(path)
    log.write(SessionEvent(session="a", event="reward", value=0.5))
    log.write(SessionEvent(session="a", event="ended"))
    log.close()
    with path.open("ab") as file:
        file.write(b'{"session": "b", "ev')
    again = SessionLog(path)
    again.write(SessionEvent(session="b", event="attached"))
    again.close()

    last = SessionLog(path)
    assert [noted.event for noted in last.earlier("a")] == ["reward", "ended"]
    assert [noted.event for noted in last.earlier("b")] == ["attached"]
    assert not last.earlier("c")
    last.close()


async def test_a_model_that_is_only_served_has_no_sessions() -> None:
    async with gateway(Scripted()) as http:
        assert (await http.post(OPEN, json={})).status_code == 404
