"""Which model a text, a path or a run directory names, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.adapters import adapted
from tests.model_folders import save_folder
from tests.model_shapes import llama
from tidemill.config.model import ModelConfig
from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.models.catalog import resolve
from tidemill.models.checkpoint_manifest import pinned, seal
from tidemill.models.folder import DESCRIPTION
from tidemill.models.model_source import exact_models, exact_source, locate, open_model
from tidemill.models.saving import ORIGIN, save_model
from tidemill.runtime.frozen_scorers import check_reward_models
from tidemill.runtime.model_bundle import load_model_bundle


def checkpoint(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def run_folder(folder: Path, *steps: int, run_format: int = 3) -> Path:
    for step in steps:
        checkpoint(folder / "checkpoints" / f"step_{step}")
    folder.mkdir(exist_ok=True)
    (folder / "config.toml").write_text('[model]\nchat_template = true\n[task]\nsystem_prompt = "Be brief."\n')
    (folder / "manifest.json").write_text(json.dumps({"format": run_format}))
    return folder


def pipeline(folder: Path, **stages: tuple[int, ...]) -> Path:
    for name, steps in stages.items():
        run_folder(folder / "stages" / name, *steps) if steps else (folder / "stages" / name).mkdir(parents=True)
    state = [{"name": name, "folder": f"stages/{name}"} for name in stages]
    (folder / "pipeline.json").write_text(json.dumps({"stages": state}))
    (folder / "config.toml").write_text("")
    return folder


def test_a_name_a_path_and_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    char, org = checkpoint(tmp_path / "char"), checkpoint(tmp_path / "org" / "name")
    assert (locate("char").kind, locate(Path("char")).source, locate("./char").source) == (
        "built-in",
        str(char),
        str(char),
    )
    assert (locate("org/name").kind, locate("org/other").kind) == ("folder", "hub")
    assert locate("org/name").folder == org.relative_to(tmp_path)
    assert locate("smollm2-135m").folder is None


def test_a_run_is_its_newest_checkpoint_and_brings_its_prompts(tmp_path: Path) -> None:
    run, newest = run_folder(tmp_path / "run", 9, 10), tmp_path / "run" / "checkpoints" / "step_10"
    for given in (run, run / "checkpoints", newest):
        found = locate(given)
        assert (found.folder, found.run, found.step) == (newest, run, 10)
        assert (found.prompts.chat, found.prompts.system_prompt) == (True, "Be brief.")
    whole = pipeline(tmp_path / "pipeline", sft=(1,), rl=(3,), later=())
    assert locate(whole).folder == whole / "stages" / "rl" / "checkpoints" / "step_3"


def test_a_stored_checkpoint_of_the_run_is_kept(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", 1, 2)
    first, last = (str(run / "checkpoints" / f"step_{step}") for step in (1, 2))
    for given, earlier, exact in [
        (str(run), None, last), (str(run), first, first), (str(run), "char", last), (first, last, first),
        ("char", first, "char"), ("org/name", None, "org/name"), ("stage:sft", None, "stage:sft"),
    ]:  # fmt: skip
        assert exact_source(given, earlier=earlier) == exact
    spec = RunSpec.model_validate(
        {
            "model": {"source": str(run)},
            "critic": {"source": str(run)},
            "eval": {"compare_with": str(run)},
            "scoring": {"rewards": [{"kind": "exact"}, {"kind": "model", "model": str(run)}]},
        }
    )
    found = exact_models(spec, {"scoring": {"rewards": [{}, {"model": first}]}})
    assert (found.model.source, found.critic.source, found.eval.compare_with) == (last, last, last)
    assert [reward.model for reward in found.scoring.rewards] == ["", first]


def test_links_and_the_folder_of_checkpoints_mean_the_same_model(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", 1, 2)
    (run / "manifest.json").write_text(json.dumps({"format": 3, "kind": "sft"}))
    for step, score in ((1, -1.0), (2, -3.0)):
        seal(run / "checkpoints" / f"step_{step}", step=step, score=score)
    (tmp_path / "link").symlink_to(run)
    (tmp_path / "best").symlink_to(run / "checkpoints" / "step_1")
    for given in (run, run / "checkpoints", tmp_path / "link", tmp_path / "best"):
        found = locate(given)
        assert (found.folder and found.folder.resolve(), found.run, found.step) == (
            run / "checkpoints" / "step_1",
            run,
            1,
        )
        assert found.prompts.system_prompt == "Be brief."
    stored = str(tmp_path / "link" / "checkpoints" / "step_2")
    for given in (run, tmp_path / "link", tmp_path / "link" / ".." / "run"):
        assert exact_source(str(given), earlier=stored) == stored


def test_a_stage_that_exports_is_its_folder(tmp_path: Path) -> None:
    stage = run_folder(tmp_path / "export")
    checkpoint(stage / "model")
    (stage / "model" / DESCRIPTION).write_text('{"prompts": {"chat": true, "system_prompt": "Exported."}}')
    assert (locate(stage).folder, locate(stage).prompts.system_prompt) == (stage / "model", "Exported.")


Make = Callable[[Path], Any]


def model_folder(folder: Path, *without: str) -> Path:
    save_folder(llama(), folder)
    for pattern in without:
        for path in folder.glob(pattern):
            path.unlink()
    return folder


def pickled(folder: Path) -> Path:
    (model_folder(folder, "*.safetensors") / "pytorch_model.bin").write_bytes(b"")
    return folder


def adapter_without_base(folder: Path) -> Path:
    base, stored = model_folder(folder / "base"), folder / "adapter"
    stored.mkdir()
    save_model(adapted(), stored, source=base)
    origin = json.loads((stored / ORIGIN).read_text())
    origin["model"]["source"] = str(folder / "gone")
    (stored / ORIGIN).write_text(json.dumps(origin))
    return stored


def written(path: Path) -> Path:
    path.write_bytes(b"")
    return path


def empty(path: Path) -> Path:
    path.mkdir()
    return path


REFUSED: dict[str, tuple[Make, str]] = {
    "misspelt name": (lambda _: "smollm2-135", r"'smollm2-135' is not a known model\n  did you mean smollm2-135m\?"),
    "no such folder": (
        lambda tmp: str(run_folder(tmp / "mine", 1))[:-1] + "x",
        r"no such folder\n  did you mean .*mine",
    ),
    "empty name": (lambda _: " ", "the name is empty"),
    "deleted checkpoint": (lambda tmp: run_folder(tmp / "a", 4) / "checkpoints/step_2", r"was deleted(?s:.*)step_4"),
    "checkpoint of a moved run": (
        lambda tmp: tmp / "gone/checkpoints/step_2",
        "moved or deleted(?s:.*)keeps the path in its config.toml",
    ),
    "another user's home": (lambda _: "~nobody-here/run", "there is no such user"),
    "empty folder": (lambda tmp: empty(tmp / "a"), "the folder is empty"),
    "folder of runs": (lambda tmp: run_folder(tmp / "a", 1).parent, r"no config.json\n  name one of .*/a"),
    "file": (lambda tmp: written(tmp / "a.safetensors"), "is a file, not a model folder"),
    "GGUF file": (lambda tmp: written(tmp / "a.gguf"), "GGUF files are not read"),
    "run without checkpoint": (lambda tmp: run_folder(tmp / "a"), "the run has no checkpoint"),
    "run of another version": (
        lambda tmp: run_folder(tmp / "a", 1, run_format=1),
        "has format 1(?s:.*)copy a checkpoint",
    ),
    "its checkpoint": (lambda tmp: run_folder(tmp / "a", 1, run_format=9) / "checkpoints/step_1", "has format 9"),
    "pipeline that has not trained": (lambda tmp: pipeline(tmp / "a", sft=()), "no stage of this pipeline has trained"),
    "no tokenizer": (lambda tmp: model_folder(tmp / "a", "token*"), "the folder has no tokenizer"),
    "pickles": (lambda tmp: pickled(tmp / "a"), "only safetensors are read"),
    "adapter without base": (
        adapter_without_base,
        "the base model of the adapter cannot be used: there is no such folder",
    ),
    "hub without network": (lambda _: "organisation/name", "the hub is switched off|cannot be reached"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_has_one_hint(case: str, tmp_path: Path, session_cache: Path) -> None:
    make, says = REFUSED[case]
    given = make(tmp_path)
    with pytest.raises(UserError, match=says) as error, open_model(given) as found:
        resolve(ModelConfig(source=found.source), progress=lambda _: None)
    assert error.value.where and error.value.hint


@pytest.mark.parametrize("described", [True, False])  # False: only its checkpoints were copied
def test_a_checkpoint_that_is_deleted_while_it_is_opened_gives_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, described: bool
) -> None:
    run = run_folder(tmp_path / "a", 2, 4)
    if not described:
        (run / "config.toml").unlink()

    def late(folder: Path) -> Any:
        if folder.name == "step_4":
            shutil.rmtree(folder)
        return pinned(folder)

    monkeypatch.setattr("tidemill.models.model_source.pinned", late)
    with open_model(run) as found:
        assert Path(found.source).name == "step_2"


def test_a_reward_model_is_no_policy_and_a_policy_is_no_reward_model(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "a")
    spec = RunSpec.model_validate(
        {"model": {"source": str(folder)}, "scoring": {"rewards": [{"kind": "model", "model": str(folder)}]}}
    )
    with pytest.raises(UserError, match="reward model"):
        check_reward_models(spec, progress=lambda _: None)
    (folder / DESCRIPTION).write_text('{"kind": "reward_model"}')
    with pytest.raises(UserError, match="holds a reward model"):
        load_model_bundle(RunSpec(), progress=lambda _: None, model=locate(folder))
