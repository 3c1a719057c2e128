"""Sessions: what is answered again, who may do what, what ends them, and what a restart remembers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.unit.gateway.scripted_agent import (
    OPEN,
    SCRIPT,
    Agent,
    NoCalls,
    answered,
    asking,
    client_of,
    new_sessions,
    opened,
    user,
)
from tidemill.gateway import sessions as sessions_module
from tidemill.gateway.session import SessionEvent, SessionLog


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


async def test_sessions_with_one_name_are_of_one_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions_module, "SLOT_WAIT_S", 0.2)
    sessions = new_sessions(tmp_path)
    agents = [Agent(sessions, index, epoch=epoch) for epoch in range(2) for index in range(2)]
    async with client_of(sessions) as http:
        acting = [asyncio.create_task(agent.observe()) for agent in agents]

        async def place(group: str) -> int:
            path, _ = await opened(http, group=group)
            session = sessions.named(path.rpartition("/")[2])
            return session.place[1]

        places = [await place(group) for group in ("a", "b", "a", "b")]
        assert places[0] == places[2] != places[1] == places[3]
        full = await http.post(OPEN, json={"group": "a"})
        assert full.status_code == 429
        for task in acting:
            task.cancel()


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
