"""The gateway over a scripted model: routes, streams, failures, clients that leave."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest

from tests.unit.gateway.scripted import (
    CHAT,
    COMPLETIONS,
    RESPONSES,
    Scripted,
    chat,
    events,
    gateway,
    named,
    until,
)
from tidemill.gateway import app as app_module


async def test_a_retry_key_outside_sessions_is_refused_by_its_name() -> None:
    served = Scripted()
    body = {"model": "scripted", "prompt": "Hi", "input": "Hi"}
    async with gateway(served) as client:
        for path, fields in ((CHAT, chat()), (COMPLETIONS, body), (RESPONSES, body)):
            answer = await client.post(path, json=fields, headers={"idempotency-key": "k"})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"], error["code"]) == (
                400,
                "Idempotency-Key",
                "unsupported_parameter",
            )
    assert not served.requested


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_its_completion(stream: bool) -> None:
    served = Scripted()
    served.go_on.clear()
    async with gateway(served) as client:
        task = asyncio.create_task(client.post(CHAT, json=chat(stream=stream, n=2)))
        await until(lambda: bool(served.requested))
        await asyncio.sleep(0.05)
        task.cancel()
        await until(lambda: bool(served.closed), seconds=2)
        served.go_on.set()
        assert (await client.post(CHAT, json=chat())).status_code == 200


async def test_a_stream_whose_worker_is_replaced_sends_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_module.with_comments, "__defaults__", (0.05,))
    served = Scripted()
    served.go_on.clear()
    async with gateway(served) as client:
        asyncio.get_running_loop().call_later(0.5, served.go_on.set)
        text = (await client.post(CHAT, json=chat(stream=True))).text

    assert text.count(": the completion goes on\n\n") >= 3
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in events(text)[:-1]) == "Hello you."


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
async def test_a_failure_in_a_stream_is_an_event_and_the_end(path: str) -> None:
    served = Scripted()
    served.error = RuntimeError("/secret/path")
    body = chat(stream=True) if path == CHAT else {"model": "scripted", "input": "Hi", "stream": True}
    async with gateway(served) as client:
        text = (await client.post(path, json=body)).text
        whole = await client.post(CHAT, json=chat())

    last = events(text)[-1]
    assert (last.get("error") or last)["code"] == "internal_error"
    assert (whole.status_code, whole.json()["error"]["code"]) == (500, "internal_error")
    assert "/secret/path" not in text + whole.text


async def test_a_text_that_no_context_could_hold_is_refused_before_it_is_encoded() -> None:
    async with gateway(Scripted()) as client:
        began_s = time.monotonic()
        refused = await client.post(CHAT, json=chat("x" * 7_000_000))
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
        large = {"type": "object", "properties": {"k" * 100_000: {"properties": {f"a{n}": {} for n in range(10_000)}}}}
        refused = await client.post(CHAT, json=chat(tools=[named(f"t{n}", large) for n in range(30)]))
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert time.monotonic() - began_s < 8


async def test_a_token_id_that_the_model_lacks_is_refused() -> None:
    served = Scripted()
    async with gateway(served) as client:
        body = {"model": "scripted", "prompt": [1, served.vocabulary]}
        refused = await client.post(COMPLETIONS, json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")
        body["prompt"] = [1, served.vocabulary - 1]
        assert (await client.post(COMPLETIONS, json=body)).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [("GET", CHAT, "POST"), ("DELETE", "/v1/models", "GET, HEAD"), ("POST", "/health", "GET, HEAD")],
)
async def test_a_method_that_a_route_lacks(method: str, path: str, allowed: str) -> None:
    async with gateway(Scripted()) as client:
        answer = await client.request(method, path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (405, "method_not_allowed")
    assert sorted(answer.headers["allow"].split(", ")) == allowed.split(", ")
    assert answer.headers["connection"] == "close"  # a body was not read


async def test_models_health_metrics_and_request_ids() -> None:
    served = Scripted()
    async with gateway(served) as client:
        listed = (await client.get("/v1/models")).json()["data"]
        assert (listed[0]["id"], listed[0]["max_model_len"]) == ("scripted", 500)
        assert (await client.get("/v1/models/scripted")).status_code == 200
        assert (await client.get("/v1/models/other")).status_code == 404
        assert (await client.get("/v1/nothing")).json()["error"]["code"] == "not_found"
        assert (await client.get("/ready")).status_code == 200
        served.ready = False
        assert (await client.get("/ready")).status_code == 503
        await client.post(CHAT, json=chat())
        given = await client.post(CHAT, json=chat(), headers={"x-request-id": "mine-1"})
        other = await client.post(CHAT, json=chat(), headers={"x-request-id": "bad id"})
        metrics = (await client.get("/metrics")).text

    assert given.headers["x-request-id"] == "mine-1"
    assert other.headers["x-request-id"] not in ("", "bad id")
    assert 'tidemill_tokens_total{kind="completion"} 30' in metrics
    assert "tidemill_workers 2" in metrics
    assert metrics.endswith("# EOF\n")


class Busy(Scripted):
    figures = {"samples_waiting": 3.0, "samples_assigned": 2.0}


async def test_an_endpoint_picker_reads_gauges_with_vllms_names(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.touch(0o600)
    file.write_text("key")
    async with gateway(Busy(), token_file=file) as client:
        assert (await client.get("/metrics")).status_code == 401
        metrics = (await client.get("/metrics", headers={"Authorization": "Bearer key"})).text
    assert 'vllm:num_requests_waiting{model_name="scripted"} 3' in metrics
    assert 'vllm:num_requests_running{model_name="scripted"} 2' in metrics
    assert "tidemill_requests_open 0" in metrics


async def test_a_large_body_does_not_delay_others() -> None:
    body = json.dumps(chat("x") | {"messages": [{"role": "user", "content": "y"}] * 2049, "pad": "z" * 6_000_000})
    async with gateway(Scripted()) as client:
        large = asyncio.create_task(client.post(CHAT, content=body.encode()))
        small = await client.post(CHAT, json=chat())
        assert small.status_code == 200
        assert (await large).json()["error"]["param"] == "messages"
