"""Routes of sessions: which key opens which session, and what a body may say."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.unit.gateway.scripted import Scripted, gateway
from tests.unit.gateway.scripted_agent import (
    OPEN,
    Agent,
    asking,
    client_of,
    new_sessions,
    opened,
    user,
)


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


async def test_a_model_that_is_only_served_has_no_sessions() -> None:
    async with gateway(Scripted()) as http:
        assert (await http.post(OPEN, json={})).status_code == 404
