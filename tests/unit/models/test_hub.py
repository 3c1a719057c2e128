"""Fetching from the hub, with the hub's client replaced: nothing here uses the network."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import httpx2
import pytest
from huggingface_hub import constants, scan_cache_dir
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.utils.tqdm import are_progress_bars_disabled

from tidemill.core.errors import UserError
from tidemill.models import hub


@pytest.fixture(autouse=True)
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def ignore(_: str) -> None:
    pass


def serve(monkeypatch: pytest.MonkeyPatch, download: Callable[..., str]) -> Mock:
    mock = Mock(side_effect=download)
    monkeypatch.setattr(hub, "snapshot_download", mock)
    return mock


def test_only_safe_files_of_the_revision_are_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    disabled_inside: list[bool] = []

    def download(*_: object, **__: object) -> str:
        disabled_inside.append(are_progress_bars_disabled())
        return str(tmp_path / "snapshot")

    mock = serve(monkeypatch, download)
    assert hub.fetch("org/name", "v1", progress=ignore) == tmp_path / "snapshot"
    assert mock.call_args.args == ("org/name",)
    assert mock.call_args.kwargs["revision"] == "v1"
    patterns = mock.call_args.kwargs["allow_patterns"]
    assert "*.safetensors" in patterns and not any("bin" in p or p in ("*", "*.pt", "*.py") for p in patterns)
    assert disabled_inside == [True] and not are_progress_bars_disabled()
    hub.fetch("org/name", "v1", progress=ignore, weights=False)
    assert mock.call_args.kwargs["allow_patterns"] == [each for each in patterns if each != "*.safetensors"]


def _response() -> httpx2.Response:
    return httpx2.Response(404, request=httpx2.Request("GET", "http://hub.invalid"))


@pytest.mark.parametrize(
    ("error", "where", "told"),
    [
        (RepositoryNotFoundError("no", response=_response()), "model.source", "org/name is not a model of the hub"),
        (GatedRepoError("no", response=_response()), "model.source", "terms to be accepted"),
        (RevisionNotFoundError("no", response=_response()), "model.revision", "org/name has no revision v1"),
        (OSError(28, "No space left on device"), "model.source", "No space left on device"),
        (ValueError(), "model.source", "could not be downloaded"),
    ],
)
def test_faults_say_what_to_do(error: Exception, where: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: object, **__: object) -> str:
        raise error

    serve(monkeypatch, download)
    with pytest.raises(UserError, match=told) as caught:
        hub.fetch("org/name", "v1", progress=ignore)
    assert caught.value.where == where and caught.value.hint
    assert len(str(caught.value).splitlines()) == 2
    assert not are_progress_bars_disabled()


def test_offline_and_not_in_the_cache(hub_cache: Path) -> None:
    with pytest.raises(UserError, match="switched off") as caught:  # the real client: conftest switches the hub off
        hub.fetch("org/name", None, progress=ignore)
    assert str(hub_cache) in caught.value.what
    assert "smollm2-135m" in caught.value.hint


def test_a_name_the_hub_could_not_have() -> None:
    with pytest.raises(UserError, match="not a model of the hub"):
        hub.fetch("org/name--x", None, progress=ignore)


def test_a_stalled_download_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def download(*_: object, **__: object) -> str:
        release.wait(30)
        return "late"

    serve(monkeypatch, download)
    started = time.monotonic()
    try:
        with pytest.raises(UserError, match="no byte of org/name arrived") as caught:
            hub.fetch("org/name", None, progress=ignore, stall_deadline_s=0.2)
    finally:
        release.set()
    assert time.monotonic() - started < 5
    assert "what has arrived is kept" in caught.value.hint


class ArrivingClock:
    """Each look is 15 ms later, each second one finds a megabyte more of a download; with all eight, time stands."""

    def __init__(self, blob: Path) -> None:
        self._blob = blob
        self._looks = 0
        self.all_here = threading.Event()

    def monotonic(self) -> float:
        self._looks = min(self._looks + 1, 16)
        self._blob.write_bytes(bytes(self._looks // 2 * 1_000_000))
        if self._looks == 16:
            self.all_here.set()
        return self._looks * 0.015


def test_a_slow_download_goes_on_while_bytes_arrive(monkeypatch: pytest.MonkeyPatch, hub_cache: Path) -> None:
    blobs = hub_cache / "models--org--name" / "blobs"
    blobs.mkdir(parents=True)
    clock = ArrivingClock(blobs / "x.incomplete")

    def download(*_: object, **__: object) -> str:
        assert clock.all_here.wait(30)
        return str(hub_cache / "snapshot")

    monkeypatch.setattr(hub, "_REPORT_EVERY_S", 0.03)
    monkeypatch.setattr(hub, "time", clock)
    serve(monkeypatch, download)
    lines: list[str] = []
    assert hub.fetch("org/name", None, progress=lines.append, stall_deadline_s=0.02) == hub_cache / "snapshot"
    assert lines and all("org/name" in line and "MB downloaded" in line for line in lines)


def put_in_cache(cache: Path, name: str) -> Path:
    """A snapshot of org/name with one file, at revision `main`."""
    snapshot = cache / "models--org--name" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / name).write_text("{}")
    (cache / "models--org--name" / "refs").mkdir()
    (cache / "models--org--name" / "refs" / "main").write_text("a" * 40)
    return snapshot


def test_the_hubs_cache_is_listed(hub_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "scan_cache_dir", lambda: scan_cache_dir(hub_cache))
    assert hub.cached_models() == []
    snapshot = put_in_cache(hub_cache, "config.json")
    assert hub.cached_models() == [("org/name", snapshot, 2)]
    assert hub.cached("org/name", None) is None  # without its tokenizer


def test_a_tokenizer_in_the_hubs_cache_is_found_without_asking(hub_cache: Path) -> None:
    assert hub.cached("org/name", None) is None
    snapshot = put_in_cache(hub_cache, "tokenizer.json")
    assert hub.cached("org/name", None) == hub.cached("org/name", "main") == snapshot
    assert hub.cached("org/name", "other") is None
    assert hub.cached("org/name--x", None) is None
