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
from tidemill.core.records import (
    Episode,
    Observation,
    Prompt,
    SampleId,
    SamplingParams,
    Turn,
    pack_logprobs,
    pack_tokens,
    unpack_tokens,
)
from tidemill.gateway import sessions as sessions_module
from tidemill.gateway.app import Gateway
from tidemill.gateway.server import listen, serving
from tidemill.gateway.session_log import Noted, SessionLog
from tidemill.gateway.sessions import Sessions
from tidemill.runtime.gateway import ServedSessions, write_hermes

OPEN = "/v1/tidemill/sessions"
SAMPLING = SamplingParams(max_new_tokens=40)
SCRIPT = Scripted()


class NoCalls:
    """Implements `core.protocols.CallLog`."""

    async def started(self, index: int) -> None: ...

    async def ended(self, index: int, call: Any) -> None: ...


class Fleet:
    preemptible_count = 0


class Sample:
    """What the controller does with one sample: it asks the environment, and generates what a test says."""

    def __init__(self, sessions: Sessions, index: int = 0, prompt: str = "1+1=") -> None:
        self.sessions = sessions
        self.prompt_ids = SCRIPT.codec.encode(prompt)
        self.prompt = Prompt(prompt_id=prompt, token_ids=pack_tokens(self.prompt_ids), text=prompt, answer="")
        self.id = SampleId(run_seed=0, purpose="train", prompt_id=prompt, epoch=0, index=index)
        self.completion: list[int] = []
        self.context, self.turns = list(self.prompt_ids), list[Turn]()
        self.observed: list[Observation] = []

    @property
    def episode(self) -> Episode:
        return Episode(
            sample_id=self.id, prompt=self.prompt, turns=tuple(self.turns), token_ids=pack_tokens(self.context)
        )

    async def observe(self) -> Observation:
        async with asyncio.timeout(10):
            answer = await self.sessions.act(self.episode, NoCalls())
        self.observed.append(answer)
        ids = unpack_tokens(answer.token_ids)
        self.context = ids if answer.new_branch else self.context + ids
        self.completion += ids
        return answer

    def generate(self, text: str, *, report: bool = True) -> None:
        ids, start = SCRIPT.codec.encode_completion(text), len(self.completion)
        self.completion += ids
        self.context += ids
        packed = pack_tokens(self.completion)
        if report:
            logprobs = pack_logprobs([-1.0] * len(self.completion))
            self.sessions.receive(self.id, start, packed, logprobs, len(self.completion))
        key = self.observed[-1].state_key
        self.turns.append(Turn(start=start, end=len(self.completion), text=text, state_key=key))


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
    served = ServedSessions("scripted", SCRIPT.codec, SCRIPT.format, sessions, SAMPLING, Fleet())  # type: ignore[arg-type]
    served.context_tokens = 400
    config = GatewayConfig(port=0)
    listener = listen(config)
    app = Gateway(served, config, write_calls=write_hermes, sessions=sessions).app()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    async with serving(app, listener, config), httpx2.AsyncClient(base_url=url, timeout=10, trust_env=False) as http:
        yield http
    await sessions.close()


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
    sample = Sample(sessions := new_sessions(tmp_path))
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
        assert [turn["text"] for turn in about["turns"]] == ["Hello", "Bye"]
        await http.post(f"{path}/reward", json={"value": 0.25}, headers=headers)
        await http.post(f"{path}/end", headers=headers)
        assert (await third) == Observation(end="done", outcome=0.25)


async def test_a_changed_conversation_is_a_branch(tmp_path: Path) -> None:
    sample = Sample(sessions := new_sessions(tmp_path))
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
    sample = Sample(sessions := new_sessions(tmp_path))
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
    sample = Sample(sessions := new_sessions(tmp_path))
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
    sample = Sample(sessions := new_sessions(tmp_path, idle_s=0.2))
    async with client_of(sessions) as http:
        first = asyncio.create_task(sample.observe())
        path, headers = await opened(http)
        assert (await first).end == "fault"
        late = await asking(http, headers, [user("Hi")])
        assert (late.status_code, late.json()["error"]["code"]) == (410, "session_ended")
        assert (await http.get(path, headers=headers)).json()["status"] == "ended"
        assert (await http.post(f"{path}/reward", json={"value": 1}, headers=headers)).status_code == 410


async def test_the_last_turn_ends_a_session(tmp_path: Path) -> None:
    sample = Sample(sessions := new_sessions(tmp_path, turns=1))
    async with client_of(sessions) as http:
        first = asyncio.create_task(sample.observe())
        _, headers = await opened(http)
        asked = asking(http, headers, [user("Hi")])
        await first
        sample.generate("Hello")
        assert (await sample.observe()).end == "turns"
        assert (await asked).json()["choices"][0]["message"]["content"] == "Hello"


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"temperature": 0.5}, "temperature"),
        ({"top_p": 0.9}, "top_p"),
        ({"max_tokens": 39}, "max_tokens"),
        ({"stop": "x"}, "stop"),
        ({"seed": 1}, "seed"),
        ({"n": 2}, "n"),
    ],
)
async def test_what_the_run_decides_is_refused(tmp_path: Path, more: dict[str, Any], param: str) -> None:
    sample = Sample(sessions := new_sessions(tmp_path))
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
    samples = [Sample(sessions, index) for index in range(2)]
    async with client_of(sessions) as http:
        acting = [asyncio.create_task(sample.observe()) for sample in samples]
        (one, own), (other, _) = await opened(http), await opened(http)
        assert one != other
        assert (await http.get(other, headers=own)).status_code == 403
        assert (await http.post(OPEN, json={}, headers=own)).status_code == 403
        assert (await http.get(f"{OPEN}/unknown", headers=own)).status_code == 404
        without = await http.post("/v1/chat/completions", json={"model": "scripted", "messages": [user("Hi")]})
        assert without.json()["error"]["code"] == "session_required"
        asked = asking(http, own, [user("Hi")])
        await acting[0]
        busy = await asking(http, own, [user("Other")])
        assert (busy.status_code, busy.json()["error"]["code"]) == (409, "session_busy")
        asked.cancel()
        acting[1].cancel()


async def test_tasks_and_groups_choose_the_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions_module, "SLOT_WAIT_S", 0.2)
    sessions = new_sessions(tmp_path)
    acting = [asyncio.create_task(Sample(sessions, 0, prompt).observe()) for prompt in ("1+1=", "2+2=")]
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
    log.write(Noted(session="a", event="reward", value=0.5))
    log.write(Noted(session="a", event="ended"))
    log.close()
    with path.open("ab") as file:
        file.write(b'{"session": "b", "ev')
    again = SessionLog(path)
    again.write(Noted(session="b", event="attached"))
    again.close()

    last = SessionLog(path)
    assert [noted.event for noted in last.earlier("a")] == ["reward", "ended"]
    assert [noted.event for noted in last.earlier("b")] == ["attached"]
    assert not last.earlier("c")
    last.close()


async def test_a_model_that_is_only_served_has_no_sessions() -> None:
    async with gateway(Scripted()) as http:
        assert (await http.post(OPEN, json={})).status_code == 404
