"""What is wrong with the inputs of stages, known before the first of them runs: rows of data files, and tokenizers.

What a stage will make is not looked at, for it is not there yet; but its tokenizer is that of the model it begins with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

from tidemill.config.data import DataConfig, DataFormat
from tidemill.config.faults import ConfigError, Fault
from tidemill.config.layers import PREFIX
from tidemill.config.model import ModelConfig
from tidemill.config.pipeline import KINDS, Product, StageSpec
from tidemill.config.task import FileTask, JsonlTask
from tidemill.core.errors import UserError
from tidemill.envs.text.content import Question
from tidemill.envs.text.data.schemas import read_demonstrations, read_items, read_pairs
from tidemill.envs.text.data.sides import check_sides
from tidemill.models.catalog import present
from tidemill.models.folder import refuse_reward_model
from tidemill.pipeline.contents import fault_of_stage

ReadRows: TypeAlias = Callable[[Path, DataFormat], Iterator[Question]]

LEARNED_FROM: Mapping[Product, ReadRows] = {"demonstrations": read_demonstrations, "preference pairs": read_pairs}


@dataclass(frozen=True, slots=True)
class Rows:
    """Files whose rows a stage reads; None where there is no such file yet."""

    read: ReadRows
    data_format: DataFormat
    path: Path | None
    held_out_path: Path | None
    held_out_fraction: float
    section: str

    def check(self) -> None:
        def read(path: Path) -> Iterator[Question]:
            return self.read(path, self.data_format)

        check_sides(read, self.path, self.held_out_path, self.held_out_fraction, section=self.section)


def check_inputs(due: Sequence[StageSpec], stages: Sequence[StageSpec]) -> None:
    """
    Args:
        due: the stages that are to run; files that several of them read are read once.
        stages: all of them.

    Raises:
        ConfigError: the first fault of each input, a line each.
    """
    by_name = {stage.name: stage for stage in stages}
    checked, faults = set[Rows](), list[Fault]()
    for stage in due:
        rows = [each for each in _rows(stage) if each not in checked]
        checked.update(rows)
        for check in (*(each.check for each in rows), *_models(stage, by_name)):
            try:
                check()
            except UserError as error:
                faults.append(fault_of_stage(stage, error))
    if faults:
        raise ConfigError(faults)


def _rows(stage: StageSpec) -> Iterator[Rows]:
    kind, data, task = KINDS[stage.kind], stage.spec.data, stage.spec.task
    if kind.learns_from is not None and data.path is not None:
        yield _files(LEARNED_FROM[kind.learns_from], data, data.path, section="data")
    if "task" in kind.sections and isinstance(task, FileTask | JsonlTask):
        yield _files(read_items, task, task.path, section="task")


def _files(read: ReadRows, config: DataConfig | FileTask | JsonlTask, path: Path, *, section: str) -> Rows:
    held_out, fraction = config.held_out_path, config.held_out_fraction
    if held_out is not None and _to_be_made(held_out):
        held_out, fraction = None, 0.0
    return Rows(read, config.format, None if _to_be_made(path) else path, held_out, fraction, section)


def _to_be_made(path: Path) -> bool:
    return str(path).startswith(PREFIX)


def _models(stage: StageSpec, by_name: Mapping[str, StageSpec]) -> Iterator[Callable[[], None]]:
    """Checks of the stage's own model, which is to write (only copying one does not ask what for), and of what judges
    its samples."""
    if stage.kind != "export":
        yield partial(refuse_reward_model, stage.spec.model.source)
    if "scoring" not in KINDS[stage.kind].sections:
        return
    policy = _began_as(stage, by_name)
    for at, reward in enumerate(stage.spec.scoring.rewards):
        key = f"scoring.rewards[{at}].model"
        if reward.kind == "model" and reward.model.startswith(PREFIX):
            maker = by_name[reward.model.removeprefix(PREFIX)]
            yield partial(_check_made_alike, _began_as(maker, by_name), policy, key)
        elif reward.kind == "model":
            yield partial(_check_reward_model, Path(reward.model).expanduser(), policy, key)


def _began_as(stage: StageSpec, by_name: Mapping[str, StageSpec]) -> ModelConfig:
    """The model that a stage's own, or the first of those it was made from, is read from."""
    while (source := stage.spec.model.source).startswith(PREFIX):
        stage = by_name[source.removeprefix(PREFIX)]
    return stage.spec.model


def _check_reward_model(folder: Path, policy: ModelConfig, key: str) -> None:
    """A folder holds a reward model, and with the policy's tokenizer where that is known. Loads no weights."""
    from tidemill.models.codec import load_codec
    from tidemill.models.heads import read_description
    from tidemill.models.reward_model import check_same_vocabulary

    description = read_description(folder, "reward_model")
    if (known := present(policy)) is not None:
        check_same_vocabulary(description, folder, load_codec(known), where=key)


def _check_made_alike(reward: ModelConfig, policy: ModelConfig, key: str) -> None:
    """A reward model that a stage makes begins as a model with the policy's tokenizer, where both are known."""
    folders = {folder for config in (reward, policy) if (folder := present(config)) is not None}
    if len(folders) < 2:
        return
    from tidemill.models.codec import load_codec
    from tidemill.models.reward_model import other_tokenizer

    if len({load_codec(folder).vocabulary_digest for folder in folders}) > 1:
        raise other_tokenizer(key)
