"""The stream of changes: what a client is told, after a pause too, and that nobody waits for a slow one."""

from __future__ import annotations

import asyncio
import shutil
import time
from contextlib import closing
from pathlib import Path

import pytest

from tests.unit.dashboard.served import events, make_run, open_run, page_of, pages
from tidemill.dashboard import stream
from tidemill.dashboard.runs import WatchedFolder, WatchedRun
from tidemill.dashboard.stream import EVERYTHING, Listener
from tidemill.gateway.errors import ApiError


def key_of(root: Path, name: str) -> str:
    return page_of(root, name).split("/")[2]


def test_a_step_reaches_every_client_soon_and_a_client_that_returns_gets_what_it_missed(tmp_path: Path) -> None:
    run, recorder = open_run(tmp_path / "one")
    address = f"/events?run={key_of(tmp_path, 'one')}"
    with (
        pages(tmp_path) as client,
        closing(events(client, address)) as first,
        closing(events(client, address)) as second,
    ):
        begun = next(first)
        assert sorted(begun["data"]["changed"]) == sorted(EVERYTHING)
        assert (begun["data"]["step"], begun["data"]["state"]) == (1, "running")
        next(second)
        run.learn(recorder, 2)
        written_s = time.monotonic()
        told = [next(first), next(second)]
        assert time.monotonic() - written_s < 1.5
        while told[0]["data"]["step"] < 2 or "metrics" not in told[0]["data"]["changed"]:
            told[0] = next(first)
        last_id = told[0]["id"]
        with closing(events(client, address, **{"last-event-id": last_id})) as again:
            run.learn(recorder, 3)
            missed = next(again)
            while missed["data"]["step"] < 3:
                missed = next(again)
        with closing(events(client, address, **{"last-event-id": "of another server"})) as other:
            assert sorted(next(other)["data"]["changed"]) == sorted(EVERYTHING)
    recorder.close()
    recorder.run.close()


def test_a_deleted_run_is_gone_and_a_new_one_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "SLOW_S", 0.3)
    make_run(tmp_path / "one")
    make_run(tmp_path / "two")
    with (
        pages(tmp_path) as client,
        closing(events(client, f"/events?run={key_of(tmp_path, 'two')}")) as of_run,
        closing(events(client, "/events")) as of_folder,
    ):
        next(of_run)
        assert next(of_folder)["data"] == {"changed": ["rows"]}  # since the page was made
        next(of_folder)
        shutil.rmtree(tmp_path / "two")
        assert [message["event"] for message in of_run][-1] == "gone"  # and the stream ends
        assert next(of_folder)["data"] == {"changed": ["rows"]}
        assert "two" not in client.get("/").text
        make_run(tmp_path / "three")
        next(of_folder)
        assert "three" in client.get("/").text


async def test_a_slow_client_has_one_message_with_all_that_it_missed() -> None:
    listener = Listener(WatchedRun("k", Path("nowhere")))
    for step in range(1000):
        listener.put("k", "changed", f"{step}", step=step, changed=["metrics"] if step else ["samples"])
    messages = listener.messages(quiet_s=0.01)
    assert await anext(messages) == b"retry: 1000\n\n"
    assert await anext(messages) == b'event: changed\nid: 999\ndata: {"step":999,"changed":["metrics","samples"]}\n\n'
    assert (await anext(messages)).startswith(b":")
    listener.put("k", "gone", run="k")
    assert [message async for message in messages] == [b'event: gone\ndata: {"run":"k"}\n\n']


async def test_files_are_read_only_while_somebody_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "FAST_S", 0.01)
    monkeypatch.setattr(stream, "MOST_LISTENERS", 2)
    make_run(tmp_path / "one", steps=1)
    folder = WatchedFolder(tmp_path)
    run, looks, refresh = await folder.run(key_of(tmp_path, "one")), list[float](), WatchedRun.refresh

    async def counted(self: WatchedRun) -> None:
        looks.append(time.monotonic())
        await refresh(self)

    monkeypatch.setattr(WatchedRun, "refresh", counted)
    changes = stream.Stream(folder)
    clients = [await changes.listen(run, "") for _ in range(2)]
    with pytest.raises(ApiError, match="pages are open"):
        await changes.listen(run, "")
    for client in clients:
        await anext(client)
    await asyncio.sleep(0.3)
    once = len(looks)
    assert 5 < once < 35, "one look for both"
    for client in clients:
        await client.aclose()
    await asyncio.sleep(0.1)
    looks.clear()
    await asyncio.sleep(0.1)
    assert not looks
    await changes.close()
