"""Every record that a run or a model keeps in a file, with one byte that no UTF-8 text has."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from tests.fabricated_forecast import make_forecast
from tests.planted import planted, spec_of
from tidemill.config.model import ModelConfig
from tidemill.controller.entries import Rewarded, decode, encode
from tidemill.core.errors import UserError
from tidemill.core.records import Reward
from tidemill.hardware.run_profile import read_profile
from tidemill.jobs.batch_generation import CachedCompletions, CompletionCache
from tidemill.models.folder import DESCRIPTION
from tidemill.models.reward_model import HeadDescription, read_description
from tidemill.models.saving import ORIGIN, Origin, read_origin
from tidemill.pipeline.stage_plan import StageResult
from tidemill.pipeline.state import RESULT_FILE, PipelineFolder
from tidemill.telemetry.manifest import FORECAST, read_forecast
from tidemill.telemetry.run_dir import RunDirectory

HEAD = HeadDescription(kind="reward_model", pooling="last_token", hidden_size=4, vocabulary_digest="ab")
MARKED = StageResult(
    name="s", kind="sft", digest="d", product=None, headline="h", figures={}, wall_s=1.0, finished="now", values={}
)
ANSWERED = CachedCompletions(key="k", duration_s=1.0, samples=())

RECORDS: dict[str, tuple[bytes, str, Callable[[Path], object]]] = {
    "manifest": (b'{"run_id": "a"}', "manifest.json", lambda folder: RunDirectory(folder).read_manifest()),
    "forecast": (msgspec.json.encode(make_forecast(3.0)), FORECAST, read_forecast),
    "profile": (msgspec.json.encode(planted(spec_of())), "p.json", lambda folder: read_profile(folder / "p.json")),
    "head": (msgspec.json.encode(HEAD), DESCRIPTION, lambda folder: read_description(folder, "reward_model")),
    "adapter": (Origin(model=ModelConfig(), digest="ab").model_dump_json().encode(), ORIGIN, read_origin),
    "stage": (msgspec.json.encode(MARKED), f"stages/s-1/{RESULT_FILE}", lambda folder: PipelineFolder(folder).found()),
    "answers": (msgspec.json.encode(ANSWERED) + b"\n", "a.jsonl", lambda folder: answer_in(folder / "a.jsonl")),
    "ledger": (
        encode(Rewarded(((0, Reward(value=1.0, reason="right")),))),
        "blob",
        lambda folder: decode((folder / "blob").read_bytes(), 4),
    ),
}


def answer_in(path: Path) -> CachedCompletions | None:
    with closing(CompletionCache(path)) as answers:
        return answers.known.get("k")


@pytest.mark.parametrize("name", RECORDS)
def test_a_high_bit_anywhere_in_a_record_is_no_crash(tmp_path: Path, name: str) -> None:
    whole, file, read = RECORDS[name]
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(whole)
    before = read(tmp_path)
    assert before, "the record as it was written is read"
    changed = 0
    for position in range(len(whole)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0x80]) + whole[position + 1 :])
        try:
            changed += read(tmp_path) != before
        except UserError:
            changed += 1
    assert changed > len(whole) / 2
