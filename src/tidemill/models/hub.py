"""Downloads models from the Hugging Face hub into its own cache, which other tools share, and uploads folders."""

from __future__ import annotations

import io
import time
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, scan_cache_dir, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import (
    CacheNotFound,
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils.tqdm import tqdm

from tidemill.core.errors import UserError
from tidemill.models.cache import Progress

WEIGHTS = "*.safetensors"  # never pickles: they can run code when opened
WANTED = ("*.json", WEIGHTS, "*.jinja", "*.txt", "tokenizer.model")
OFFLINE_MODEL = "smollm2-135m"
_REPORT_EVERY_S = 10.0


def fetch(hub_id: str, revision: str | None, *, progress: Progress, weights: bool = True) -> Path:
    """The snapshot folder of a hub model; downloads files that are not in the hub's cache.

    The library's deadlines apply: HF_HUB_ETAG_TIMEOUT and HF_HUB_DOWNLOAD_TIMEOUT.

    Args:
        weights: False fetches configuration and tokenizer only.

    Raises:
        UserError: the model is unknown or not accessible, or the download failed.
    """
    wanted = [pattern for pattern in WANTED if weights or pattern != WEIGHTS]
    bar = _progress_lines(hub_id, progress)
    try:
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=wanted, tqdm_class=bar))
    except Exception as error:  # the library raises errors of its own, of the HTTP client and of the disk
        raise _as_user_error(hub_id, revision, error) from error


def cached(hub_id: str, revision: str | None) -> Path | None:
    """The snapshot folder in the hub's cache that has the model's tokenizer; None without one. Uses no network."""
    try:
        found = try_to_load_from_cache(hub_id, "tokenizer.json", revision=revision)
    except HFValidationError:  # the cache cannot have a model of such a name
        return None
    return Path(found).parent if isinstance(found, str) else None


def cached_models() -> list[tuple[str, Path, int]]:
    """(hub id, newest snapshot folder, bytes on disk) of every model in the hub's cache, by name."""
    try:
        repositories = scan_cache_dir().repos
    except (CacheNotFound, OSError):
        return []
    found = []
    for repository in repositories:
        if repository.repo_type == "model" and repository.revisions:
            newest = max(repository.revisions, key=lambda revision: revision.last_modified)
            found.append((repository.repo_id, newest.snapshot_path, repository.size_on_disk))
    return sorted(found)


def _progress_lines(hub_id: str, progress: Progress) -> type[tqdm]:
    """A progress bar that reports the downloaded bytes as a line from time to time."""
    started = reported = time.monotonic()

    class ProgressLines(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "file": io.StringIO(), "disable": False})  # type: ignore[no-untyped-call]

        def display(self, *_: Any, **__: Any) -> None:
            nonlocal reported
            now = time.monotonic()
            if self.unit == "B" and self.n and now - reported > _REPORT_EVERY_S:
                reported = now
                progress(f"{hub_id}: {self.n / 1e6:,.0f} MB downloaded after {now - started:.0f} s")

    return ProgressLines


def _as_user_error(hub_id: str, revision: str | None, error: Exception) -> UserError:
    if isinstance(error, GatedRepoError):
        what, hint = "is gated", "accept its terms on the model's page and log in to the hub"
    elif isinstance(error, RevisionNotFoundError):
        return UserError(f"{hub_id} has no revision {revision}", where="model.revision", hint="leave it out")
    elif isinstance(error, RepositoryNotFoundError | HFValidationError):
        what, hint = "is not a model of the hub, or is private", "check the spelling"
    elif isinstance(error, LocalEntryNotFoundError):
        state = "the hub is switched off (HF_HUB_OFFLINE)" if constants.HF_HUB_OFFLINE else "the hub cannot be reached"
        what = f"is neither a local folder nor in the cache {constants.HF_HUB_CACHE}, and {state}"
        hint = f"give a local folder, or {OFFLINE_MODEL}, which needs no network"
    else:
        what = f"could not be downloaded: {next(iter(str(error).strip().splitlines()), repr(error))[:300]}"
        hint = "run the command again; it continues the download"
    return UserError(f"{hub_id} {what}", where="model.source", hint=hint)


def push_folder(folder: Path, repository: str, *, progress: Progress) -> str:
    """Upload a model folder to a hub repository, created as private unless it exists; returns its address.

    The hub's own settings apply: HF_TOKEN or a login, and HF_ENDPOINT.

    Raises:
        UserError: the repository's name is invalid, or the hub refuses the upload or cannot be reached.
    """
    api = HfApi()
    progress(f"uploading {folder} to {repository}")
    try:
        api.create_repo(repository, private=True, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Upload model")
    except Exception as error:  # the library raises errors of its own, of the HTTP client and of the disk
        what = f"could not be uploaded: {next(iter(str(error).strip().splitlines()), repr(error))[:300]}"
        hint = "log in with `hf auth login` or set HF_TOKEN, and check the name, owner/name"
        raise UserError(what, where=repository, hint=hint) from error
    return f"{api.endpoint}/{repository}"
