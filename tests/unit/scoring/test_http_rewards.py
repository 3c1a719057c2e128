"""A remote reward against a stand-in server on the loopback interface."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.char_codec import CharCodec, make_prompt, make_trajectory
from tidemill.config.task import ArithmeticTask, RewardConfig, ScoringConfig
from tidemill.core.errors import UserError
from tidemill.core.records import Reward
from tidemill.data.build_task import build_task
from tidemill.scoring.scorer import RewardScorer, build_scorer

TASK = build_task(ArithmeticTask(), codec=CharCodec(), batch_prompts=4, seed=0, chat_template=False)
PROMPT = make_prompt("5+7=", "12", level=3)
Answer = tuple[int, Any]


class Server:
    """Answers with what `reply` says of each request's body; remembers them all."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.types: list[str] = []
        self.secrets: list[tuple[str, str]] = []
        self.reply: Callable[[dict[str, Any]], Answer] = lengths
        self.drips: str | None = None  # the answer about this completion comes byte by byte, without end
        self._closed = threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                server.requests.append(body)
                server.types.append(str(self.headers["content-type"]))
                server.secrets.append((str(self.headers["authorization"]), str(self.headers["x-api-key"])))
                status, answer = server.reply(body)
                content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                drips = server.drips in [sample["completion"] for sample in body.get("samples", ())]
                self.send_header("content-length", str(10_000 if drips else len(content)))
                self.end_headers()
                with suppress(OSError):  # the client may give up first
                    while drips and not server._closed.wait(0.1):
                        self.wfile.write(b" ")
                    self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._http.server_port}/score"

    def close(self) -> None:
        self._closed.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


def lengths(body: dict[str, Any]) -> Answer:
    return 200, {"scores": [len(sample["completion"]) for sample in body["samples"]]}


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


def scorer(url: str, **options: Any) -> RewardScorer:
    rewards = (RewardConfig(kind="http", url=url, **options),)
    return build_scorer(ScoringConfig(rewards=rewards), task=TASK, seed=0)


async def ask(subject: RewardScorer, completion: str, index: int = 0) -> Reward:
    return await subject.score(PROMPT, make_trajectory(PROMPT, completion, index=index))


async def test_json_goes_out_and_scores_come_back(server: Server) -> None:
    subject = scorer(server.url)
    one, other = await asyncio.gather(ask(subject, "12"), ask(subject, "130", index=1))
    assert (one, other) == (
        Reward(value=2.0, components={"http": 2.0}),
        Reward(value=3.0, components={"http": 3.0}),
    )
    sample = {"prompt": "5+7=", "answer": "12", "metadata": {"level": 3}}
    expected = [{"id": f"train/p/0/{n}", "completion": text, **sample} for n, text in enumerate(("12", "130"))]
    assert server.requests == [{"samples": expected}]  # one request for both
    assert server.types == ["application/json"]
    await subject.close()


async def test_a_server_that_recovers_costs_nothing(server: Server) -> None:
    answers: Iterator[Answer] = iter([(503, {}), (429, {})])
    server.reply = lambda body: next(answers, None) or lengths(body)
    subject = scorer(server.url)
    assert (await ask(subject, "12")).value == 2.0
    assert len(server.requests) == 3
    await subject.close()


@pytest.mark.parametrize(
    ("answer", "requests", "words"),
    [
        ((500, {}), 3, "answered 500"),  # tried again twice
        ((404, {}), 1, "answered 404"),  # will not get better
        ((302, {}), 1, "answered 302"),  # not followed to a server nobody named
        ((200, b"<html>"), 1, "answered without"),
        ((200, {"rewards": [1]}), 1, "answered without"),
        ((200, [1]), 1, "answered without"),
        ((200, {"scores": [1, 2]}), 1, "answered 2 scores for 1 samples"),
        ((200, {"scores": 1}), 1, "no array of scores for 1 samples"),
        ((200, {"scores": [None]}), 1, "gave no score: None"),
        ((200, {"scores": ["1"]}), 1, "gave no score: '1'"),
        ((200, {"scores": [True]}), 1, "gave no score: True"),
    ],
)
async def test_whatever_a_server_does_wrong_is_its_samples_fault(
    server: Server, answer: Answer, requests: int, words: str
) -> None:
    server.reply = lambda _: answer
    subject = scorer(server.url)
    reward = await ask(subject, "12")
    assert (reward.valid, reward.value) == (False, 0.0)
    assert words in reward.reason
    assert server.url in reward.reason
    assert len(server.requests) == requests
    server.reply = lengths
    assert (await ask(subject, "12")).valid
    await subject.close()


async def test_one_sample_without_a_score_leaves_the_others_theirs(server: Server) -> None:
    server.reply = lambda _: (200, {"scores": [1.5, None]})
    subject = scorer(server.url)
    one, other = await asyncio.gather(ask(subject, "12"), ask(subject, "13", index=1))
    assert (one.value, one.valid, other.valid) == (1.5, True, False)
    await subject.close()


async def test_a_slow_server_is_given_up_at_the_deadline(server: Server) -> None:
    release = threading.Event()

    def slow(body: dict[str, Any]) -> Answer:
        release.wait(20)
        return lengths(body)

    server.reply = slow
    subject = scorer(server.url, timeout_s=0.6, retries=1)
    began = time.monotonic()
    reward = await ask(subject, "12")
    release.set()
    assert not reward.valid
    assert 0.2 < time.monotonic() - began < 5
    await subject.close()


async def test_an_answer_that_never_ends_costs_its_samples_and_no_others(server: Server) -> None:
    server.drips = "drip"
    subject = scorer(server.url, timeout_s=3, retries=2, batch=1)
    async with asyncio.timeout(60):
        dripping = asyncio.create_task(ask(subject, "drip"))
        while not server.requests:  # noqa: ASYNC110 -- the server's thread sets no event of the loop
            await asyncio.sleep(0.01)
        others = await asyncio.gather(*(ask(subject, "12", index=index) for index in range(1, 6)))
        assert not (await dripping).valid
    await subject.close()
    assert [reward.value for reward in others] == [2.0] * 5


async def test_an_unreachable_server_gives_invalid_rewards(server: Server) -> None:
    server.close()
    subject = scorer(server.url, retries=0)
    reward = await ask(subject, "12")
    assert not reward.valid
    assert "ConnectError" in reward.reason
    await subject.close()
    server.__init__()  # type: ignore[misc] # for the fixture to close


async def test_batches_are_no_larger_than_asked_for(server: Server) -> None:
    subject = scorer(server.url, batch=4)
    rewards = await asyncio.gather(*(ask(subject, "1" * n, index=n) for n in range(10)))
    assert [reward.value for reward in rewards] == [float(n) for n in range(10)]
    assert [len(request["samples"]) for request in server.requests] == [4, 4, 2]
    await subject.close()


async def test_a_secret_comes_from_the_environment_alone(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", " Bearer hush\n")
    for options in ({}, {"auth_env": "JUDGE_KEY"}, {"auth_env": "JUDGE_KEY", "auth_header": "x-api-key"}):
        subject = scorer(server.url, **options)
        assert (await ask(subject, "12")).value == 2.0
        await subject.close()
    assert server.secrets == [("None", "None"), ("Bearer hush", "None"), ("None", "Bearer hush")]
    assert "hush" not in RewardConfig(kind="http", url=server.url, auth_env="JUDGE_KEY").model_dump_json()


@pytest.mark.parametrize("value", [None, "  ", "hush\nx-other: 1", "hüsh"])
def test_a_secret_that_cannot_be_sent_is_one_clear_error(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("JUDGE_KEY", value)
    with pytest.raises(UserError, match="JUDGE_KEY") as caught:
        scorer("http://127.0.0.1:1/score", auth_env="JUDGE_KEY")
    assert "hush" not in str(caught.value)
    assert "hüsh" not in str(caught.value)
