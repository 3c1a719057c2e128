"""What the routes answer: pages, data, requests to a run, verdicts, bad folders."""

from __future__ import annotations

import html
import json
import re
import shutil
from pathlib import Path

import pytest

from tests.unit.dashboard.served import make_run, open_run, page_of, pages
from tidemill.core.errors import UserError
from tidemill.dashboard.runs import WatchedFolder
from tidemill.guard.verdicts import VerdictFiles
from tidemill.telemetry.report.sections import SECTIONS


def attribute(page: str, name: str) -> str:
    return html.unescape(page.partition(f'{name}="')[2].partition('"')[0])


def test_a_run_and_a_folder_have_their_pages(tmp_path: Path) -> None:
    make_run(tmp_path / "runs/one", steps=5)
    name = "<script>alert(1)</script>"
    make_run(tmp_path / "runs/two")
    manifest = tmp_path / "runs/two/manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"run": name}), encoding="utf-8")
    with pages(tmp_path / "runs") as client:
        table = client.get("/").text
        assert table.count("<tr id=") == 2
        assert name not in table and html.escape(name) in table
        assert "5 of 20" in table and "held-out accuracy" in table and "<polyline" in table
        page = page_of(tmp_path / "runs", "one")
        assert f'href="{page}"' in table
        address = client.get(page.rstrip("/"))
        assert (address.status_code, address.headers["location"]) == (308, page)
        assert attribute(client.get(page).text, "data-run") == page.split("/")[2]
        for section in SECTIONS:
            assert client.get(f"{page}section/{section}").status_code == 200, section
        charts = client.get(f"{page}charts.json").json()
        assert charts["steps"] == [0, 1, 2, 3, 4, 5]
        newer = client.get(f"{page}charts.json", params={"after": 4, "cursor": charts["cursor"]}).json()
        assert newer["steps"][-1] == 5
        assert client.get(f"{page}charts.json?after=x").json()["steps"] == charts["steps"]
        assert client.get(f"{page}fleet.json").status_code == 200
        samples = client.get(f"{page}samples", params={"reward_min": "0.5", "step_min": "no number"}).text
        [sample, group] = [
            re.search(rf'\?(view={view}&[^"#]+)', html.unescape(samples)) for view in ("sample", "group")
        ]
        assert sample and group and "data-own" in client.get(f"{page}sample?{sample[1]}").text
        assert "data-own" in client.get(f"{page}group?{group[1]}").text
        for step in ("999", "x", "9" * 30, "9" * 5000):
            assert client.get(f"{page}sample?step={step}&prompt=p&index=0").status_code == 409
        keys = [page.split("/")[2], page_of(tmp_path / "runs", "two").split("/")[2]]
        compared = client.get("/compare", params={"run": keys}).text
        assert name not in compared and html.escape(name) in compared
        assert client.get("/compare", params={"run": keys[:1]}).status_code == 409
        assets = {
            part for shown in (table, compared, client.get(page).text) for part in re.findall(r"assets/[^\"]+", shown)
        }
        assert {client.get(f"/{asset}").status_code for asset in assets} == {200}
    with pages(tmp_path / "runs/one") as client:
        shown = client.get("/")
        assert (shown.status_code, shown.headers["location"]) == (303, page_of(tmp_path / "runs/one", "."))


def test_requests_go_to_the_session_that_runs(tmp_path: Path) -> None:
    _, recorder = open_run(tmp_path / "one")
    with pages(tmp_path) as client:
        asked = client.post(f"{page_of(tmp_path, 'one')}control", json={"action": "pause", "hold_s": 90})
        recorder.finish("interrupted")
        ended = client.post(f"{page_of(tmp_path, 'one')}control", json={"action": "resume"})
    recorder.run.close()
    assert asked.status_code == 200
    [file] = (tmp_path / "one/control").glob("*.json")
    request = json.loads(file.read_text(encoding="utf-8"))
    run_id = json.loads((tmp_path / "one/manifest.json").read_text(encoding="utf-8"))["run_id"]
    given = {"request_id": asked.json()["request"], "action": "pause", "run_id": run_id, "session": 1, "hold_s": 90}
    assert request.items() >= {**given, "by": "watch"}.items()
    assert ended.status_code == 409
    assert f"`tidemill resume {tmp_path / 'one'}` starts it again" in ended.json()["error"]["message"]


def test_samples_are_judged_with_keys(tmp_path: Path) -> None:
    make_run(tmp_path / "one")
    page, judged = page_of(tmp_path, "one"), list[float]()
    with pages(tmp_path) as client:
        first = client.get(f"{page}check").text
        assert "reward" not in first.partition('id="sample"')[2]  # before the verdict
        samples = [json.loads(attribute(first, "data-sample"))]
        client.post(f"{page}verdict", json={"sample": samples[0], "score": None})
        while "data-sample" in (shown := client.get(f"{page}check").text):
            samples.append(json.loads(attribute(shown, "data-sample")))
            answer = client.post(f"{page}verdict", json={"sample": samples[-1], "score": 0.5}).json()
            judged.append(answer["reward"])
    assert "All samples have a verdict" in shown
    assert samples[0] == samples[-1], "a skipped sample comes last"
    assert len(judged) == len(samples) - 1 == len({tuple(sample) for sample in samples})
    run_id = json.loads((tmp_path / "one/manifest.json").read_text(encoding="utf-8"))["run_id"]
    stored = VerdictFiles(tmp_path / "one/checks", run_id, warn=print).new_pairs()
    assert [pair.gold for pair in stored] == [0.5] * len(judged)


def test_what_cannot_be_watched(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("", encoding="utf-8")
    for name, what in (("missing", "no such run"), ("empty", "no run in this folder"), ("file", "a file, not a run")):
        with pytest.raises(UserError, match=what):
            WatchedFolder(tmp_path / name)
    assert WatchedFolder(tmp_path / "missing", wait=True).single == ""


def test_torn_foreign_older_and_deleted_runs(tmp_path: Path) -> None:
    for name in ("torn", "older", "deleted", "good"):
        make_run(tmp_path / name)
    (tmp_path / "torn/metrics.jsonl").write_bytes(b'{"step": 1, "values": {"rew')
    (tmp_path / "torn/events.jsonl").write_bytes(b"\x00\xff not JSON\n")
    (tmp_path / "older/manifest.json").write_text('{"format": 1}', encoding="utf-8")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign/metrics.jsonl").write_text('{"lightning": true}\n[1]\n', encoding="utf-8")
    with pages(tmp_path) as client:
        shutil.rmtree(tmp_path / "deleted")
        statuses = {
            name: client.get(page_of(tmp_path, name)).status_code
            for name in ("torn", "older", "foreign", "deleted", "good")
        }
        assert statuses.pop("deleted") == 404
        assert statuses.pop("good") == 200
        assert set(statuses.values()) <= {200, 409}, statuses
        table = client.get("/").text
        assert "has format 1" in table and "deleted" not in table
        assert 'run="good"' in client.get("/metrics").text
