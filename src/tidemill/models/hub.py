"""Models from the Hugging Face hub, kept in the hub's own cache so that other tools share the download."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from huggingface_hub import constants, scan_cache_dir, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import (
    CacheNotFound,
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

from tidemill.core.errors import UserError
from tidemill.models.cache import Progress

# Never pickles: they can run code when opened.
WEIGHTS = "*.safetensors"
WANTED = ("*.json", WEIGHTS, "*.jinja", "*.txt", "tokenizer.model")
STALL_DEADLINE_S = 300.0
OFFLINE_MODEL = "smollm2-135m"
_REPORT_EVERY_S = 10.0


def fetch(
    hub_id: str,
    revision: str | None,
    *,
    progress: Progress,
    weights: bool = True,
    stall_deadline_s: float = STALL_DEADLINE_S,
) -> Path:
    """The snapshot folder of a hub model, downloaded if it is not in the hub's cache.

    Args:
        weights: without them, configuration and tokenizer alone.
        stall_deadline_s: the longest time in which not one byte may arrive.

    Raises:
        UserError: unknown, not accessible, not reachable and not in the cache, or stalled.
    """
    outcome: dict[str, str | BaseException] = {}
    wanted = [pattern for pattern in WANTED if weights or pattern != WEIGHTS]
    download = threading.Thread(
        target=_download, args=(hub_id, revision, wanted, outcome), daemon=True, name="hub-download"
    )
    bars_were_on = not are_progress_bars_disabled()
    disable_progress_bars()
    try:
        download.start()
        _await(download, hub_id, progress, stall_deadline_s)
    finally:
        if bars_were_on:
            enable_progress_bars()
    error = outcome.get("error")
    if isinstance(error, BaseException):
        raise _explained(hub_id, revision, error) from error
    return Path(str(outcome["folder"]))


def cached(hub_id: str, revision: str | None) -> Path | None:
    """The snapshot folder in the hub's cache that has the model's tokenizer; None without one. Asks nobody."""
    try:
        found = try_to_load_from_cache(hub_id, "tokenizer.json", revision=revision)
    except HFValidationError:  # no such name can be in it
        return None
    return Path(found).parent if isinstance(found, str) else None


def cached_models() -> list[tuple[str, Path, int]]:
    """(hub id, newest snapshot folder, bytes on the disk) of every model in the hub's cache, by name."""
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


def _download(hub_id: str, revision: str | None, wanted: list[str], outcome: dict[str, str | BaseException]) -> None:
    try:
        outcome["folder"] = snapshot_download(hub_id, revision=revision, allow_patterns=wanted)
    except BaseException as error:  # noqa: BLE001 - handed to the waiting thread, whatever it is
        outcome["error"] = error


def _await(download: threading.Thread, hub_id: str, progress: Progress, stall_deadline_s: float) -> None:
    started = moved = reported = time.monotonic()
    before = received = _bytes_on_disk(hub_id)
    while download.is_alive():
        download.join(min(1.0, stall_deadline_s))
        now = time.monotonic()
        size = _bytes_on_disk(hub_id)
        if size != received:
            received, moved = size, now
        elif now - moved > stall_deadline_s and download.is_alive():
            raise UserError(
                f"no byte of {hub_id} arrived for {now - moved:.0f} s",
                where=constants.ENDPOINT,
                hint="check the network and run the command again: what has arrived is kept",
            )
        if now - reported > _REPORT_EVERY_S:
            reported = now
            progress(f"{hub_id}: {(received - before) / 1e6:,.0f} MB downloaded after {now - started:.0f} s")


def _bytes_on_disk(hub_id: str) -> int:
    blobs = Path(constants.HF_HUB_CACHE) / f"models--{hub_id.replace('/', '--')}" / "blobs"
    total = 0
    for path in blobs.glob("*"):
        try:
            total += path.stat().st_size
        except OSError:  # renamed meanwhile
            continue
    return total


def _explained(hub_id: str, revision: str | None, error: BaseException) -> UserError:
    if isinstance(error, GatedRepoError):
        what, hint = "asks for its terms to be accepted", "accept them on the model's page and log in to the hub"
    elif isinstance(error, RevisionNotFoundError):
        return UserError(f"{hub_id} has no revision {revision}", where="model.revision", hint="leave it out")
    elif isinstance(error, RepositoryNotFoundError | HFValidationError):
        what, hint = "is not a model of the hub, or a private one", "check the spelling"
    elif isinstance(error, LocalEntryNotFoundError):
        state = "the hub is switched off (HF_HUB_OFFLINE)" if constants.HF_HUB_OFFLINE else "the hub cannot be reached"
        what = f"is neither a local folder nor in the cache {constants.HF_HUB_CACHE}, and {state}"
        hint = f"give a local folder, or {OFFLINE_MODEL}, which needs no network"
    else:
        what = f"could not be downloaded: {next(iter(str(error).strip().splitlines()), repr(error))[:300]}"
        hint = "run the command again: what has arrived is kept"
    return UserError(f"{hub_id} {what}", where="model.source", hint=hint)
