"""Fetching from the hub, with the hub's client replaced: nothing here uses the network."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import ClassVar
from unittest.mock import Mock

import httpx2
import pytest
from huggingface_hub import constants, scan_cache_dir
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.utils.tqdm import tqdm

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


def test_only_safe_files_of_the_revision_are_downloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mock = serve(monkeypatch, lambda *_, **__: str(tmp_path / "snapshot"))
    assert hub.fetch("org/name", "v1", progress=ignore) == tmp_path / "snapshot"
    assert mock.call_args.args == ("org/name",)
    assert mock.call_args.kwargs["revision"] == "v1"
    patterns = mock.call_args.kwargs["allow_patterns"]
    assert "*.safetensors" in patterns and not any("bin" in p or p in ("*", "*.pt", "*.py") for p in patterns)
    hub.fetch("org/name", "v1", progress=ignore, weights=False)
    assert mock.call_args.kwargs["allow_patterns"] == [each for each in patterns if each != "*.safetensors"]


def _response() -> httpx2.Response:
    return httpx2.Response(404, request=httpx2.Request("GET", "http://hub.invalid"))


@pytest.mark.parametrize(
    ("error", "where", "told"),
    [
        (RepositoryNotFoundError("no", response=_response()), "model.source", "org/name is not a model of the hub"),
        (GatedRepoError("no", response=_response()), "model.source", "is gated"),
        (RevisionNotFoundError("no", response=_response()), "model.revision", "org/name has no revision v1"),
        (OSError(28, "No space left on device"), "model.source", "No space left on device"),
        (ValueError(), "model.source", "could not be downloaded"),
    ],
)
def test_errors_come_with_hints(error: Exception, where: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: object, **__: object) -> str:
        raise error

    serve(monkeypatch, download)
    with pytest.raises(UserError, match=told) as caught:
        hub.fetch("org/name", "v1", progress=ignore)
    assert caught.value.where == where and caught.value.hint
    assert len(str(caught.value).splitlines()) == 2


def test_offline_and_not_in_the_cache(hub_cache: Path) -> None:
    with pytest.raises(UserError, match="switched off") as caught:  # the real client: conftest switches the hub off
        hub.fetch("org/name", None, progress=ignore)
    assert str(hub_cache) in caught.value.what
    assert "smollm2-135m" in caught.value.hint


def test_an_invalid_hub_id() -> None:
    with pytest.raises(UserError, match="not a model of the hub"):
        hub.fetch("org/name--x", None, progress=ignore)


def test_progress_is_reported_as_lines(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(hub, "_REPORT_EVERY_S", 0.0)

    def download(*_: object, tqdm_class: type[tqdm], **__: object) -> str:
        with tqdm_class(total=4, unit="files") as files, tqdm_class(total=3_000_000, unit="B") as received:
            received.update(2_000_000)
            received.refresh()
            files.update(4)
        return "snapshot"

    serve(monkeypatch, download)
    lines: list[str] = []
    hub.fetch("org/name", None, progress=lines.append)
    assert lines and all(line.startswith("org/name: 2 MB downloaded after") for line in lines)
    assert capfd.readouterr() == ("", "")


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


def test_a_tokenizer_in_the_hubs_cache_is_found_without_network(hub_cache: Path) -> None:
    assert hub.cached("org/name", None) is None
    snapshot = put_in_cache(hub_cache, "tokenizer.json")
    assert hub.cached("org/name", None) == hub.cached("org/name", "main") == snapshot
    assert hub.cached("org/name", "other") is None
    assert hub.cached("org/name--x", None) is None


class HubDouble:
    """Records what is uploaded."""

    endpoint = "hub"
    calls: ClassVar[list[tuple[str, str]]] = []
    refuse: ClassVar[Exception | None] = None

    def create_repo(self, name: str, *, private: bool, exist_ok: bool) -> None:
        if self.refuse:
            raise self.refuse
        assert private
        assert exist_ok
        self.calls.append(("create", name))

    def upload_folder(self, *, repo_id: str, folder_path: Path, commit_message: str) -> None:
        self.calls.extend(("upload", f"{repo_id}/{file.name}") for file in sorted(folder_path.iterdir()))


def test_a_folder_is_uploaded_to_a_private_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "HfApi", HubDouble)
    (tmp_path / "config.json").touch()
    assert hub.push_folder(tmp_path, "me/mine", progress=lambda _: None) == "hub/me/mine"
    assert HubDouble.calls == [("create", "me/mine"), ("upload", "me/mine/config.json")]
    monkeypatch.setattr(HubDouble, "refuse", PermissionError("403"))
    with pytest.raises(UserError) as caught:
        hub.push_folder(tmp_path, "me/mine", progress=lambda _: None)
    assert "403" in caught.value.what
    assert "hf auth login" in caught.value.hint
