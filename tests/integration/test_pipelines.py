"""Pipelines through the real command line: killed in any stage they give the same model."""

from __future__ import annotations

import json
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.char_task import char_task
from tests.commands import DEADLINE_S, Ran, run_fork, run_here
from tests.forked import Forked
from tidemill.config.load import RECIPES
from tidemill.models.auto import quiet
from tidemill.models.weights_digest import weights_digest

RECIPE = (
    """\
[run]
name = "letters"

"""
    + char_task()
    + """\
held_out_fraction = 0.2

[scoring]
rewards = [{ kind = "exact" }, { kind = "regex", pattern = '^\\d{1,2}\\n$', weight = 0.2 }]

[sampling]
max_new_tokens = 3

[engine]
batch_invariant = true

[batch]
prompts = 4
group_size = 8

[optimizer]
learning_rate = 1e-3

[trainer]
threads = 1

[eval]
every_steps = 0
prompts = 8

[checkpoint]
every_steps = 4

[data]
path = "demonstrations.jsonl"
end_token = false

[supervised]
epochs = 2
minibatch_tokens = 64
microbatch_tokens = 64

[[stage]]
name = "sft"
kind = "sft"

[[stage]]
name = "rl"
kind = "rl"
[stage.model]
source = "stage:sft"
[stage.trainer]
steps = 12

[[stage]]
name = "measure"
kind = "eval"
[stage.model]
source = "stage:rl"

[[stage]]
name = "out"
kind = "export"
[stage.model]
source = "stage:rl"
[stage.export]
dtype = "bf16"
"""
)
RLHF = RECIPES / "rlhf.toml"
# The recipe's own stages with a model that is trained from scratch in seconds.
CHAR = (
    char_task()
    + """\
[trainer]
threads = 1
"""
)
NAMES = ["sft", "rl", "measure", "out"]
pytestmark = [pytest.mark.timeout(300), pytest.mark.xdist_group("pipelines")]


def write_inputs(folder: Path) -> None:
    (folder / "r.toml").write_text(RECIPE, encoding="utf-8")
    rows = [{"prompt": f"{a}+{b}=", "completion": f"{a + b}\n"} for a in range(10) for b in range(10)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "demonstrations.jsonl").write_text(text, encoding="utf-8")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # where tracebacks of bugs are written
    write_inputs(tmp_path)
    return tmp_path


def train(*argv: str) -> Ran:
    return run_here("train", "@r.toml", "--run.dir=D", *argv, "--json")


def stage_folder(name: str, run_dir: Path = Path("D")) -> Path:
    (found,) = run_dir.glob(f"stages/{name}-*")
    return found


def made(run_dir: Path = Path("D")) -> tuple[str, str]:
    """Digests of the exported and of the evaluated weights."""
    exported = json.loads((stage_folder("out", run_dir) / "model" / "tidemill.json").read_text(encoding="utf-8"))
    measured = json.loads((stage_folder("measure", run_dir) / "summary.json").read_text(encoding="utf-8"))
    return exported["weights_digest"], measured["weights_digest"]


class Whole(NamedTuple):
    """An undisturbed pipeline: the folder that it ran in, and its output."""

    place: Path
    ran: Ran

    def copy_stages(self, *names: str) -> None:
        """Finish stages here by a copy."""
        for name in names:
            source = stage_folder(name, self.place / "D")
            shutil.copytree(source, Path("D/stages") / source.name)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    place = tmp_path_factory.mktemp("quiet")
    write_inputs(place)
    ran = run_fork("train", "@r.toml", "--run.dir=D", "--json", cwd=place)
    assert ran.code == 0, ran.err
    return Whole(place, ran)


@pytest.fixture(scope="module")
def quiet_result(whole: Whole) -> tuple[str, str]:
    return made(whole.place / "D")


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def run_until(reached: Callable[[], bool], number: signal.Signals) -> int:
    """Run the pipeline in a process and send a signal once a condition holds; returns its exit code."""
    deadline = time.monotonic() + DEADLINE_S
    with Forked("train", "@r.toml", "--run.dir=D") as process:
        while process.poll() is None and not reached():
            assert time.monotonic() < deadline, "the pipeline did not get that far"
            time.sleep(0.005)
        process.send_signal(number)
        return process.wait(DEADLINE_S)


def damage(model: Path) -> None:
    with (model / "model.safetensors").open("r+b") as file:
        file.seek(9000)
        file.write(bytes(99))


def in_stage(name: str, steps: int) -> Callable[[], bool]:
    return lambda: any(lines(each) > steps for each in Path("D").glob(f"stages/{name}-*/metrics.jsonl"))


def test_every_stage_leaves_its_documented_files(whole: Whole, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(whole.place)
    summary: dict[str, Any] = whole.ran.data
    assert [stage["name"] for stage in summary["stages"]] == NAMES
    assert all(stage["state"] == "done" and stage["headline"] for stage in summary["stages"])
    assert json.loads(Path("D/summary.json").read_text(encoding="utf-8")).items() <= summary.items()
    page = Path("D/report.html").read_text(encoding="utf-8")
    links = re.findall(r'href="(stages/[^"]+)"', page)
    assert len(links) == 3
    assert all((Path("D") / link).is_file() for link in links)
    assert not re.search(r"""src=["'](?!data:)|@import|\bfetch\(""", page)
    by_name = {stage["name"]: stage for stage in summary["stages"]}
    assert by_name["measure"]["figures"]["greedy_accuracy"] == by_name["rl"]["figures"]["greedy_accuracy"]
    assert "learned" not in page
    # The exported folder is a plain model with the right weights and dtype.
    exported = stage_folder("out") / "model"
    checkpoint = stage_folder("rl") / "checkpoints" / "step_12"
    with quiet():
        ours: Any = AutoModelForCausalLM.from_pretrained(exported, dtype="auto")
        theirs: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        assert (
            AutoTokenizer.from_pretrained(exported)("1+2=").input_ids
            == AutoTokenizer.from_pretrained(checkpoint)("1+2=").input_ids
        )
    assert ours.dtype == torch.bfloat16
    for (name, weight), (_, original) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert torch.equal(weight, original.to(torch.bfloat16)), name
    card = (exported / "README.md").read_text(encoding="utf-8")
    assert "1. initial model: char" in card
    assert "2. sft (sft): " in card
    assert "3. rl (rl): held-out mean reward" in card


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("rl", 3),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("sft", 1), ("sft", 6), ("rl", 0), ("rl", 9))),
    ],
    ids=str,
)
def test_a_pipeline_killed_in_a_stage_gives_the_same_model(
    whole: Whole, quiet_result: tuple[str, str], name: str, steps: int
) -> None:
    if name == "rl":
        whole.copy_stages("sft")
    assert run_until(in_stage(name, steps), signal.SIGKILL) == -signal.SIGKILL
    planned = {row["stage"]: row["action"] for row in train("--dry-run").data["plan"]}
    assert planned[name] == "resume"
    ran = train()
    assert ran.code == 0, ran.err
    assert made() == quiet_result
    first = next(stage for stage in ran.data["stages"] if stage["name"] == "sft")
    assert first["ran"] is (name == "sft")


def test_ctrl_c_stops_a_stage_with_a_checkpoint(whole: Whole, quiet_result: tuple[str, str]) -> None:
    whole.copy_stages("sft")
    assert run_until(in_stage("rl", 2), signal.SIGINT) == 130
    told = json.loads(Path("D/pipeline.json").read_text(encoding="utf-8"))
    assert [stage["state"] for stage in told["stages"]] == ["done", "interrupted", "due", "due"]
    assert list(stage_folder("rl").glob("checkpoints/step_*"))
    assert train().code == 0
    assert made() == quiet_result


def test_a_pipeline_ends_after_its_hours_and_can_be_resumed(whole: Whole, quiet_result: tuple[str, str]) -> None:
    whole.copy_stages("sft")
    ran = train("--trainer.hours=0.0003", "--stage.rl.trainer.steps=4000")
    assert ran.code == 0, ran.err
    assert ran.data["time_is_up"] and ran.data["stages"][1]["state"] != "done"
    assert train().code == 0
    assert made() == quiet_result


@pytest.mark.slow  # tests/unit/pipeline/test_execution.py, with stages that compute nothing
def test_a_changed_stage_is_rerun_and_the_former_result_kept() -> None:
    assert train().code == 0
    before = made()
    ran = train("--stage.rl.trainer.steps=8", "--telemetry.samples_per_step=3")
    assert ran.code == 0, ran.err
    assert [stage["ran"] for stage in ran.data["stages"]] == [False, True, True, True]
    assert len(list(Path("D/stages").iterdir())) == 7
    again = train()
    assert [stage["ran"] for stage in again.data["stages"]] == [False] * 4
    assert train("--stage.rl.trainer.steps=8", "--prune-stale").code == 0
    assert len(list(Path("D/stages").iterdir())) == 4
    assert made() != before


def test_changed_demonstrations_rerun_the_stage(whole: Whole, folder: Path) -> None:
    whole.copy_stages("sft")
    assert train("--dry-run").data["plan"][0]["action"] == "done"
    with (folder / "demonstrations.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"prompt": "1+1=", "completion": "3\\n"}\n')
    planned = train("--dry-run").data["plan"][0]
    assert (planned["action"], planned["changed"]) == ("run", ["data.path.content"])


def test_a_damaged_result_is_refused_and_rebuilt_once_deleted(whole: Whole, quiet_result: tuple[str, str]) -> None:
    whole.copy_stages("sft")
    newest = max(stage_folder("sft").glob("checkpoints/step_*"), key=lambda each: int(each.name.removeprefix("step_")))
    damage(newest)
    ran = train()
    assert ran.code == 2
    assert "model.safetensors does not match its checksum" in ran.err
    assert newest.name in ran.err and "a pipeline repeats a stage whose result is deleted" in ran.err
    shutil.rmtree(newest)
    assert train().code == 0
    assert made() == quiet_result


def test_pipeline_errors_are_reported_before_any_stage_runs(folder: Path) -> None:
    for argv, says in (
        (["--stage.rl.model.source=stage:out"], "circular references: rl → out → rl"),
        (["--stage.sft.model.source=stage:rl"], "circular references: sft → rl → sft"),
        (["--stage.measure.model.source=stage:out"], '"stage:out" is a later stage'),
        (["--stage.measure.model.source=stage:r"], '"stage:r"'),
        (["--data.path=nowhere.jsonl"], "nowhere.jsonl: no such file or folder (stage sft)"),
        (["--stage.sft.model.source=./nowhere"], "nowhere: no such file or folder (stage sft)"),
    ):
        ran = train(*argv)
        assert ran.code == 2
        assert says in ran.err
        assert not (folder / "D").exists()


def test_an_export_does_not_overwrite_foreign_files(whole: Whole, folder: Path) -> None:
    whole.copy_stages("sft", "rl", "measure")
    (folder / "mine").mkdir()
    (folder / "mine" / "notes.txt").write_text("precious", encoding="utf-8")
    ran = train("--stage.out.export.path=mine")
    assert ran.code == 2
    assert "this folder exists and was not written by an export" in ran.err
    assert (folder / "mine" / "notes.txt").read_text(encoding="utf-8") == "precious"
    assert train("--stage.out.export.path=theirs").code == 0
    assert (folder / "theirs" / "model.safetensors").is_file()
    ran = train("--stage.out.export.path=theirs", "--stage.out.export.dtype=fp32")  # it replaces its own export
    assert ran.code == 0, ran.err


def test_the_rlhf_recipe_improves_the_true_reward(folder: Path) -> None:
    (folder / "char.toml").write_text(CHAR, encoding="utf-8")
    ran = run_here(
        "train",
        f"@{RLHF}",
        "@char.toml",
        "--run.dir=D",
        "--task.digits=1",
        "--task.largest=9",
        "--stage.sft.supervised.epochs=8",
        "--stage.sft.optimizer.learning_rate=3e-3",
        "--stage.pairs.data_generation.samples_per_prompt=16",
        "--stage.ppo.trainer.steps=2",
        "--json",
    )
    assert ran.code == 0, ran.err
    stages = {stage["name"]: stage for stage in ran.data["stages"]}
    assert {name: stage["kind"] for name, stage in stages.items()} == {
        "written": "demonstrations",
        "sft": "sft",
        "pairs": "pairs",
        "other_pairs": "pairs",
        "rm": "reward_model",
        "ppo": "rl",
        "measure": "eval",
    }
    assert 0 <= stages["rm"]["figures"]["pairwise_accuracy"] <= 1
    measured = json.loads((stage_folder("measure") / "summary.json").read_text(encoding="utf-8"))
    trained = json.loads((stage_folder("ppo") / "summary.json").read_text(encoding="utf-8"))
    assert measured["weights_digest"] == trained["weights_digest"]
    assert measured["scores"]["model"]["invalid"] == 0
    compared = measured["compared_with"]
    assert compared["figures"]["greedy_accuracy"]["other"] == trained["eval"]["before"]["greedy_accuracy"]
    assert compared["figures"]["greedy_accuracy"]["this"] == measured["greedy_accuracy"]
    # Another number of steps affects PPO and its evaluation, and no earlier stage.
    planned = run_here("train", f"@{RLHF}", "@char.toml", "--run.dir=D", "--dry-run", "--json").data["plan"]
    assert [row["action"] for row in planned][-2:] == ["wait", "wait"]


def test_an_adapter_stage_returns_the_merged_model(folder: Path) -> None:
    """Later stages and other programs load it without an adapter library."""
    pytest.importorskip("peft")
    ran = train("--stage.sft.model.lora.rank=4", "--stage.rl.trainer.steps=1")
    assert ran.code == 0, ran.err
    told = json.loads(Path("D/pipeline.json").read_text(encoding="utf-8"))["stages"][0]
    with quiet():
        merged: Any = AutoModelForCausalLM.from_pretrained(Path("D") / told["folder"] / told["product"])
    manifest = json.loads((stage_folder("rl") / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["model_digest"] == weights_digest(merged)
    again = train("--stage.sft.model.lora.rank=4", "--stage.rl.trainer.steps=1")
    assert [stage["ran"] for stage in again.data["stages"]] == [False] * 4


@pytest.mark.slow  # the tests above damage a result, and merge an adapter
@pytest.mark.parametrize(("name", "next_one"), [("sft", "rl"), ("rl", "out")])
def test_a_damaged_merged_model_is_refused(name: str, next_one: str) -> None:
    pytest.importorskip("peft")
    argv = [f"--stage.{name}.model.lora.rank=4", "--stage.rl.trainer.steps=1"]
    assert train(*argv).code == 0
    damage(stage_folder(name) / "model")
    shutil.rmtree(stage_folder(next_one))
    ran = train(*argv)
    assert ran.code == 2
    assert "model.safetensors does not match its checksum" in ran.err
    shutil.rmtree(stage_folder(name) / "model")
    assert train(*argv).code == 0
