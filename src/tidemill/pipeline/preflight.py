"""What stages would refuse, found before the first one starts.

What an earlier stage will make is not looked at, for it is not there yet; but its tokenizer is that of the model at the
root of its chain.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tidemill.config.issues import ConfigError, ConfigIssue
from tidemill.config.load import PREFIX
from tidemill.config.model import ModelConfig
from tidemill.config.pipeline import KINDS, Product, StageSpec
from tidemill.config.schema import RunSpec
from tidemill.config.supervised import DataConfig
from tidemill.core.errors import UserError
from tidemill.core.records import Message
from tidemill.envs.text.build_task import build_task
from tidemill.envs.text.examples import load_demonstrations, load_pairs
from tidemill.envs.text.prompts import Task, hash_number
from tidemill.envs.text.rewards import Context, build_rewards
from tidemill.models.catalog import asked_for_by, resolve_shell
from tidemill.models.codec import TextCodec, load_codec
from tidemill.models.folder import refuse_reward_model
from tidemill.models.reward_model import check_same_vocabulary, other_tokenizer, read_description
from tidemill.models.snapshots import check_adapter, stored_context_limit
from tidemill.pipeline.stage_plan import fault_of_stage
from tidemill.runtime.export import refuse_foreign
from tidemill.runtime.model_bundle import check_critic_vocabulary, fitting_task, own_source
from tidemill.runtime.train import runtime_of


def check_inputs(due: Sequence[StageSpec], stages: Sequence[StageSpec]) -> None:
    """
    Args:
        due: the stages that are to run; what several of them share is looked at once.
        stages: all of them.

    Raises:
        ConfigError: the first fault of each input, a line each.
    """
    if not due:
        return  # what follows takes seconds to import

    models, made, faults = KnownModels(stages), set[str](), list[ConfigIssue]()
    for stage in due:
        for check in checks_of(stage, models):
            if (name := repr(check.of)) in made:
                continue
            made.add(name)
            try:
                check.call()
            except UserError as error:
                faults.append(fault_of_stage(stage, error))
    if faults:
        raise ConfigError(list(dict.fromkeys(faults)))


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model without its weights."""

    folder: Path
    codec: TextCodec
    context_limit: int  # tokens


class KnownModels:
    """Models that stages begin with, each looked at once."""

    def __init__(self, stages: Sequence[StageSpec]) -> None:
        self._by_name = {stage.name: stage for stage in stages}
        self._found: dict[str, KnownModel | UserError | None] = {}

    def began_as(self, source: str, config: ModelConfig) -> ModelConfig:
        """What a source of a stage's configuration is read from: of what a stage makes, the model at the root of its
        chain."""
        while source.startswith(PREFIX):
            config = self._by_name[source.removeprefix(PREFIX)].spec.model
            source = config.source
        return config if source == config.source else config.model_copy(update={"source": source, "revision": None})

    def look(self, config: ModelConfig) -> KnownModel | None:
        """None for a model that is still to be built or merged.

        Raises:
            UserError: there is no such model.
        """
        name = repr((config.source, config.revision, config.char))
        if name not in self._found:
            try:
                self._found[name] = _read_model_facts(config)
            except UserError as error:
                self._found[name] = error
        found = self._found[name]
        if isinstance(found, UserError):
            raise found
        return found

    def known(self, config: ModelConfig) -> KnownModel | None:
        """As `look`, and None for a model at fault, which is told where it is named."""
        try:
            return self.look(config)
        except UserError:
            return None


class AnyCodec:
    """Implements core.protocols.CompletionCodec where no tokenizer is known yet: every text is one token of its own, so
    that rows and tasks are read as ever, and none is too long."""

    stop_token_ids = ()

    def encode(self, text: str) -> list[int]:
        return [hash_number(text) % 2**31]

    def encode_chat(self, messages: Sequence[Message]) -> tuple[str, list[int]]:
        text = "\n\n".join(message.content for message in messages)
        return text, self.encode(text)

    def encode_completion(self, text: str) -> list[int]:
        return self.encode(text)

    def end_token_id(self, *, chat: bool) -> int:
        return 0

    def decode(self, token_ids: Sequence[int]) -> str:
        raise NotImplementedError("nothing is generated before a stage runs")


def _read_model_facts(config: ModelConfig) -> KnownModel | None:
    folder = resolve_shell(config, progress=lambda _: None)
    return None if folder is None else KnownModel(folder, load_codec(folder), stored_context_limit(folder))


LEARNED_FROM: Mapping[Product, Callable[..., object]] = {
    "demonstrations": load_demonstrations,
    "preference pairs": load_pairs,
}


@dataclass(frozen=True, slots=True)
class Check:
    """Raises UserError when called; of those that look at the same one is enough."""

    call: Callable[[], object]
    of: tuple[object, ...]


def checks_of(stage: StageSpec, models: KnownModels) -> Iterator[Check]:
    """Everything of a stage that can be known to be at fault before it runs."""
    kind, spec = KINDS[stage.kind], stage.spec
    began = {key: models.began_as(source, spec.model) for key, source in _models_named(stage).items()}
    for key, config in began.items():
        if not _models_named(stage)[key].startswith(PREFIX):
            yield Check(partial(_look, models, config, key), ("model", config.source, config.revision, config.char))
            if key != "critic.source" and stage.kind != "export":  # copying one does not ask what for
                yield Check(partial(refuse_reward_model, config.source), ("writes", config.source))
    known = {key: models.known(config) for key, config in began.items()}
    policy = known["model.source"]
    if "trainer" in kind.sections:
        yield from _computing(spec, policy)
    if kind.learns_from is not None:
        yield from _rows(LEARNED_FROM[kind.learns_from], spec, policy)
    critic, other = known.get("critic.source"), known.get("eval.compare_with")
    for asked in (policy, other) if other is not None else (policy,):
        if "task" in kind.sections:
            yield _task(stage, asked)
        if "scoring" in kind.sections:
            yield from _reward_models(spec, asked, models)
    if critic is not None and policy is not None:
        source = str(spec.critic.source)
        yield Check(partial(check_critic_vocabulary, source, critic.codec, policy.codec), ("critic", critic, policy))
    if stage.kind == "export" and spec.export.path is not None:
        target = spec.export.path.expanduser().absolute()
        yield Check(partial(refuse_foreign, target), ("export", target))


def _models_named(stage: StageSpec) -> dict[str, str]:
    """By key, the sources of the language models that a stage will load."""
    spec, named = stage.spec, {"model.source": stage.spec.model.source}
    critic = own_source(spec)
    if stage.kind == "rl" and critic is not None:
        named["critic.source"] = critic
    if stage.kind == "eval" and spec.eval.compare_with is not None:
        named["eval.compare_with"] = str(spec.eval.compare_with)
    return named


def _look(models: KnownModels, config: ModelConfig, key: str) -> None:
    with asked_for_by(key):
        models.look(config)


def _computing(spec: RunSpec, policy: KnownModel | None) -> Iterator[Check]:
    asked = (spec.runtime, spec.trainer.device, spec.ray, spec.placement, spec.pool)
    yield Check(partial(runtime_of(spec).check_devices, spec), ("devices", *asked))
    if spec.model.lora.enabled and policy is not None:
        yield Check(partial(check_adapter, policy.folder, spec.model), ("adapter", policy, spec.model.lora))


def _rows(load: Callable[..., object], spec: RunSpec, policy: KnownModel | None) -> Iterator[Check]:
    data = _of_files_there(spec.data)
    if data is None:
        return
    settings: dict[str, Any] = {"codec": AnyCodec(), "context_limit": sys.maxsize}
    if policy is None:
        data = data.model_copy(update={"max_tokens": 0})
    else:
        settings = {"codec": policy.codec, "context_limit": policy.context_limit}
    chat = spec.model.chat_template
    yield Check(partial(load, data, chat_template=chat, **settings), ("rows", load, data, chat, policy))


def _of_files_there(data: DataConfig) -> DataConfig | None:
    """Without the files that a stage is to make; None where there is no other."""
    alone = {"held_out_path": None, "held_out_fraction": 0.0}
    held_out = None if _to_be_made(data.held_out_path) else data.held_out_path
    if _to_be_made(data.path):
        return None if held_out is None else data.model_copy(update={**alone, "path": held_out})
    return data.model_copy(update=alone) if _to_be_made(data.held_out_path) else data


def _to_be_made(path: Path | None) -> bool:
    return str(path).startswith(PREFIX)


def _task(stage: StageSpec, policy: KnownModel | None) -> Check:
    """The task, and the rewards of it that are no models."""
    spec = stage.spec
    fits = "engine" in KINDS[stage.kind].sections  # its prompts are to be answered

    def check() -> None:
        if policy is not None and fits:
            task = fitting_task(spec, policy.codec, limit=policy.context_limit)
        else:
            task = _task_alone(spec, policy)
        rewards = [reward for reward in spec.scoring.rewards if reward.kind != "model"]
        build_rewards(rewards, Context(task=task, seed=spec.run.seed, stop_strings=task.default_stop_strings))

    lengths = (spec.sampling.max_new_tokens, spec.eval.max_new_tokens, spec.engine.context_tokens)
    return Check(check, ("task", spec.task, spec.scoring.rewards, lengths, fits, spec.model.chat_template, policy))


def _task_alone(spec: RunSpec, policy: KnownModel | None) -> Task:
    return build_task(
        spec.task,
        codec=AnyCodec() if policy is None else policy.codec,
        batch_prompts=spec.batch.prompts,
        seed=spec.run.seed,
        chat_template=spec.model.chat_template,
    )


def _reward_models(spec: RunSpec, policy: KnownModel | None, models: KnownModels) -> Iterator[Check]:
    for at, reward in enumerate(spec.scoring.rewards):
        key = f"scoring.rewards[{at}].model"
        if reward.kind == "model":
            check = partial(_check_reward_model, reward.model, policy, models, key)
            yield Check(check, ("reward model", key, reward.model, policy))


def _check_reward_model(source: str, policy: KnownModel | None, models: KnownModels, key: str) -> None:
    """A folder holds a reward model, or a stage makes one, with the policy's tokenizer as far as that is known."""
    if not source.startswith(PREFIX):
        folder = Path(source).expanduser()
        description = read_description(folder, "reward_model")
        if policy is not None:
            check_same_vocabulary(description, folder, policy.codec, where=key)
        return
    made_from = models.known(models.began_as(source, ModelConfig()))
    if made_from is None or policy is None:
        return
    if made_from.codec.vocabulary_digest != policy.codec.vocabulary_digest:
        raise other_tokenizer(key)
