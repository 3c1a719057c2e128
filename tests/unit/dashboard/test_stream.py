"""The stream of changes: what a client is told, after a pause too, and that nobody waits for a slow one."""

from __future__ import annotations

import asyncio
import shutil
import time
from contextlib import closing
from pathlib import Path

import pytest

from tests.unit.dashboard.served import events, make_run, open_run, page_of, pages
from tidemill.dashboard import runs, stream
from tidemill.dashboard.runs import Watched, WatchedFolder, WatchedRun
from tidemill.gateway.errors import ApiError
from tidemill.telemetry.run_reader import RunReader


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
        assert set(begun["data"]["changed"]) > {"metrics", "events", "samples", "state"}
        assert (begun["data"]["step"], begun["data"]["state"]) == (1, "running")
        next(second)
        run.learn(recorder, 2)
        written_s = time.monotonic()
        told = [next(first), next(second)]
        assert time.monotonic() - written_s < 1.5
        while told[0]["data"]["step"] < 2 or "metrics" not in told[0]["data"]["changed"]:
            told[0] = next(first)
        first.close()
        run.learn(recorder, 3)
        with closing(events(client, address)) as again:
            missed = next(again)["data"]
            assert set(missed["changed"]) > {"metrics", "events", "samples", "state"}
            while missed["step"] < 3:
                missed = next(again)["data"]
    recorder.close()
    recorder.run.close()


def test_a_deleted_run_is_gone_and_a_new_one_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "FIND_S", 0.3)
    make_run(tmp_path / "one")
    make_run(tmp_path / "two")
    with (
        pages(tmp_path) as client,
        closing(events(client, f"/events?run={key_of(tmp_path, 'two')}")) as of_run,
        closing(events(client, "/events")) as of_folder,
    ):
        next(of_run)
        assert next(of_folder)["data"] == {"changed": ["rows"]}  # since the page was made
        shutil.rmtree(tmp_path / "two")
        assert [message["event"] for message in of_run][-1] == "gone"  # and the stream ends
        assert next(of_folder)["data"] == {"changed": ["rows"]}
        assert "two" not in client.get("/").text
        make_run(tmp_path / "three")
        next(of_folder)
        assert "three" in client.get("/").text


class Changing(Watched):
    """What is new at the next looks."""

    def __init__(self, *found: str) -> None:
        super().__init__()
        self.left = list(found)

    async def look(self) -> None:
        if self.left:
            self._found([self.left.pop(0)])
            self.news = {"step": self.changes}


async def test_a_slow_client_has_one_message_with_all_that_it_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "POLL_S", 0.01)
    monkeypatch.setattr(stream, "QUIET_S", 0.03)
    watched, changes = Changing("manifest"), stream.Stream()
    messages = await changes.listen(watched)
    assert await anext(messages) == b"retry: 1000\n\n"
    assert await anext(messages) == b'event: changed\ndata: {"step":1,"changed":["manifest"]}\n\n'
    watched.left = ["samples"] + 999 * ["metrics"]
    while watched.left:
        await watched.look()  # of another client
    assert await anext(messages) == b'event: changed\ndata: {"step":1001,"changed":["samples","metrics"]}\n\n'
    assert (await anext(messages)).startswith(b":")
    changes.close()
    assert [message async for message in messages] == [b"event: end\ndata: {}\n\n"]
    with pytest.raises(ApiError, match="stops"):
        await changes.listen(watched)


async def test_files_are_read_only_while_somebody_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "POLL_S", 0.01)
    monkeypatch.setattr(runs, "LOOK_S", 0.05)
    monkeypatch.setattr(stream, "MOST_LISTENERS", 2)
    make_run(tmp_path / "one", steps=1)
    folder = WatchedFolder(tmp_path)
    run, looks, refresh = await folder.run(key_of(tmp_path, "one")), list[float](), WatchedRun.refresh

    def counted(self: WatchedRun) -> RunReader:
        looks.append(time.monotonic())
        return refresh(self)

    monkeypatch.setattr(WatchedRun, "refresh", counted)
    changes = stream.Stream()
    clients = [await changes.listen(run) for _ in range(2)]
    for client in clients:
        await anext(client)
        await anext(client)
    with pytest.raises(ApiError, match="pages are open"):
        await changes.listen(run)
    waiting = [asyncio.ensure_future(anext(client)) for client in clients]
    looks.clear()
    await asyncio.sleep(0.5)
    assert 2 < len(looks) <= 10, "one look for both"
    for task, client in zip(waiting, clients, strict=True):
        task.cancel()
        await asyncio.wait([task])
        await client.aclose()
    looks.clear()
    await asyncio.sleep(0.1)
    assert not looks
