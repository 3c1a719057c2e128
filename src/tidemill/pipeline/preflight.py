"""Checks of all stages before the first one runs: models, tokenizers, data, tasks, rewards and devices.

The outputs of earlier stages do not exist yet and are not checked, but their tokenizer is known: it is that of the
model from which the chain of stages starts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from tidemill.agents.run_agent import agent_prompts
from tidemill.config.issues import ConfigError, ConfigIssue
from tidemill.config.load import PREFIX
from tidemill.config.model import ModelConfig
from tidemill.config.pipeline import KINDS, Product, StageSpec
from tidemill.config.task import DataConfig
from tidemill.core.errors import UserError
from tidemill.core.protocols import TurnFormat
from tidemill.core.records import Episode, Message, ParsedTurn
from tidemill.data.build_task import configured_task
from tidemill.data.eval_sets import with_eval_sets
from tidemill.data.examples import Examples, load_demonstrations, load_pairs
from tidemill.data.prompts import hash_number
from tidemill.hardware.process_memory import WORK
from tidemill.jobs.export import refuse_foreign
from tidemill.jobs.placed_run import placed_run
from tidemill.jobs.robot_checks import check_robot_stage
from tidemill.jobs.sandbox_check import check_needed_sandbox
from tidemill.models.catalog import errors_at_key, resolve_shell
from tidemill.models.codec import TextCodec, load_codec
from tidemill.models.folder import refuse_reward_model
from tidemill.models.model_source import locate
from tidemill.models.reward_model import check_same_vocabulary, other_tokenizer, read_description
from tidemill.models.snapshots import check_adapter, stored_context_limit
from tidemill.models.turn_format import turn_format
from tidemill.pipeline.stage_plan import stage_issue
from tidemill.runtime.memory_check import check_memory, known_models
from tidemill.runtime.model_bundle import check_critic_vocabulary, fitting_task, own_source
from tidemill.runtime.runtimes import runtime_of
from tidemill.scoring.builtin_rewards import Context, build_rewards
from tidemill.scoring.row_report import REMARKS, report_rows
from tidemill.scoring.scorer import check_rewards, evaluation_scoring
from tidemill.telemetry.events import DATA, event_text

LOADERS: Mapping[Product, Callable[..., Examples[Any]]] = {
    "demonstrations": load_demonstrations,
    "preference pairs": load_pairs,
}


def check_inputs(due: Sequence[StageSpec], stages: Sequence[StageSpec]) -> list[str]:
    """Check the stages that are due, of all stages. Inputs that several of them share are checked once.

    Returns:
        Remarks on rows that are left out or lack values.

    Raises:
        ConfigError: the first issue of each input.
    """
    preflight = Preflight(stages)
    for stage in due:
        if preflight.fits(stage):
            preflight.check(stage)
    if preflight.issues:
        raise ConfigError(_joined(preflight.issues))
    return preflight.remarks


def _joined(issues: Iterable[ConfigIssue]) -> list[ConfigIssue]:
    """Issues that several stages share are one, of the first of these stages."""
    first = dict[ConfigIssue, ConfigIssue]()
    for issue in issues:
        first.setdefault(replace(issue, source=""), issue)
    return list(first.values())


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model without its weights."""

    folder: Path
    codec: TextCodec
    context_limit: int  # tokens


class AnyCodec:
    """Implements core.protocols.CompletionCodec and TurnFormat for an unknown tokenizer: every text is one token of its
    own, so that rows and tasks are read as usual and no row is too long."""

    stop_token_ids = ()

    def encode(self, text: str) -> list[int]:
        return [hash_number(text) % 2**31]

    def encode_chat(
        self, messages: Sequence[Message], *, tools: Sequence[dict[str, Any]] = ()
    ) -> tuple[str, list[int]]:
        text = "\n\n".join(message.content for message in messages)
        return text, self.encode(text)

    def encode_completion(self, text: str) -> list[int]:
        return self.encode(text)

    def end_token_id(self, *, chat: bool) -> int:
        return 0

    def prompt(self, messages: Sequence[Message], *, tools: Sequence[dict[str, Any]] = ()) -> tuple[str, list[int]]:
        return self.encode_chat(messages, tools=tools)

    def answer(
        self, episode: Episode, messages: Sequence[Message], *, tools: Sequence[dict[str, Any]] = ()
    ) -> tuple[list[int], bool]:
        return self.encode_chat(messages)[1], False

    def parse(self, text: str) -> ParsedTurn:
        return ParsedTurn(text=text)

    def encode_text(self, text: str) -> list[int]:
        return self.encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        return ""

    def token_bytes(self, token_id: int) -> bytes:
        return b""


class Preflight:
    """Runs the checks of stages and collects their issues, and remarks on their rows."""

    def __init__(self, stages: Sequence[StageSpec]) -> None:
        self.issues: list[ConfigIssue] = []
        self.remarks: list[str] = []
        self._stages = {stage.name: stage for stage in stages}
        self._models: dict[str, KnownModel | UserError | None] = {}
        self._checked: set[str] = set()

    def check(self, stage: StageSpec) -> None:
        """Run every check of a stage."""
        kind, spec = KINDS[stage.kind], stage.spec
        if "robot" in kind.sections:
            specs = {name: each.spec for name, each in self._stages.items()}
            self._once(
                stage, ("robot", stage.kind, stage.sections()), partial(check_robot_stage, stage.kind, spec, specs)
            )
            return
        models = self._check_models(stage)
        policy = models["model.source"]
        if "trainer" in kind.sections:
            machine = (spec.runtime, spec.trainer.device, spec.ray, spec.placement, spec.pool, spec.weights)
            self._once(stage, ("machine", *machine), lambda: runtime_of(spec).check_machine(spec))
            if spec.model.lora.enabled and policy is not None:
                adapter = ("adapter", policy, spec.model.lora)
                self._once(stage, adapter, lambda: check_adapter(policy.folder, spec.model))
        if kind.data is not None:
            self._check_rows(stage, LOADERS[kind.data], policy)
        compared = models.get("eval.compare_with")
        for model in (policy, compared) if compared is not None else (policy,):
            if "task" in kind.sections:
                programs = ("sandbox", spec.sandbox, spec.env, spec.scoring.rewards, spec.eval.rewards)
                self._once(stage, programs, lambda: check_needed_sandbox(spec))
                self._check_task(stage, model)
            if "scoring" in kind.sections:
                self._check_reward_models(stage, model)
        critic = models.get("critic.source")
        if critic is not None and policy is not None:
            source = str(spec.critic.source)
            vocabulary = ("critic", critic, policy)
            self._once(stage, vocabulary, lambda: check_critic_vocabulary(source, critic.codec, policy.codec))
        if stage.kind == "export" and spec.export.path is not None:
            target = spec.export.path.expanduser().absolute()
            self._once(stage, ("export", target), lambda: refuse_foreign(target))

    def _check_models(self, stage: StageSpec) -> dict[str, KnownModel | None]:
        """The language models of a stage by key; None for one that does not exist yet, or is invalid."""
        sources = self._model_sources(stage)
        configs = {key: self._root_config(source, stage.spec.model) for key, source in sources.items()}
        for key, config in configs.items():
            if not sources[key].startswith(PREFIX):
                name = ("model", config.source, config.revision, config.char)
                self._once(stage, name, partial(errors_at_key(key)(self._load), config))
                if key != "critic.source" and stage.kind != "export":  # an export copies any model
                    writes = ("generates", config.source)
                    self._once(stage, writes, partial(refuse_reward_model, config.source))
        return {key: self._load_valid(config) for key, config in configs.items()}

    def fits(self, stage: StageSpec) -> bool:
        """Whether the stage fits into memory, and its ranks divide its models; before `check`, which builds models and
        reads tokenizers."""
        if "model" not in KINDS[stage.kind].sections:
            return True
        spec = stage.spec
        models = {key: self._root_config(name, spec.model) for key, name in self._model_sources(stage).items()}
        known: dict[str, Any] = {"model": models["model.source"]}
        if critic := models.get("critic.source"):
            known["critic"] = spec.critic.model_copy(update={"source": critic.source})
        spec, remarks = spec.model_copy(update=known), list[str]()
        try:
            check_memory(spec, WORK[stage.kind], note=remarks.append)
            if stage.kind == "rl" and (shapes := known_models(spec, None, fetch=True)) is not None:
                remarks += placed_run(spec, shapes)[1]
        except UserError as error:
            self.issues.append(stage_issue(stage, error))
            return False
        self.remarks += [f"stage {stage.name}: {remark}" for remark in remarks]
        return True

    def _once(self, stage: StageSpec, key: tuple[object, ...], check: Callable[[], object]) -> None:
        """Run a check unless one with an equal key has run."""
        if repr(key) in self._checked:
            return
        self._checked.add(repr(key))
        try:
            check()
        except UserError as error:
            self.issues.append(stage_issue(stage, error))

    def _model_sources(self, stage: StageSpec) -> dict[str, str]:
        """The language models that a stage loads, by key."""
        spec, sources = stage.spec, {"model.source": stage.spec.model.source}
        if stage.kind == "rl" and (critic := own_source(spec)) is not None:
            sources["critic.source"] = critic
        if stage.kind == "eval" and spec.eval.compare_with is not None:
            sources["eval.compare_with"] = spec.eval.compare_with
        return sources

    def _root_config(self, source: str, config: ModelConfig) -> ModelConfig:
        """The model that a source is derived from: for the output of a stage, the first model of its chain."""
        while source.startswith(PREFIX):
            config = self._stages[source.removeprefix(PREFIX)].spec.model
            source = config.source
        return config if source == config.source else config.model_copy(update={"source": source, "revision": None})

    def _load(self, config: ModelConfig) -> KnownModel | None:
        """None for a model that has to be built or merged first.

        Raises:
            UserError: there is no such model.
        """
        name = repr((config.source, config.revision, config.char))
        if name not in self._models:
            try:
                folder = resolve_shell(config, progress=lambda _: None)
                known = None if folder is None else KnownModel(folder, load_codec(folder), stored_context_limit(folder))
                self._models[name] = known
            except UserError as error:
                self._models[name] = error
        found = self._models[name]
        if isinstance(found, UserError):
            raise found
        return found

    def _load_valid(self, config: ModelConfig) -> KnownModel | None:
        """None also for an invalid model, which is reported where it is named."""
        try:
            return self._load(config)
        except UserError:
            return None

    def _check_rows(self, stage: StageSpec, load: Callable[..., Examples[Any]], policy: KnownModel | None) -> None:
        data, chat, env = _existing_data(stage.spec.data), stage.spec.model.chat_template, stage.spec.env
        if data is None:
            return

        def check() -> None:
            codec: AnyCodec | TextCodec = AnyCodec() if policy is None else policy.codec
            rows = data.model_copy(update={"max_tokens": 0}) if policy is None else data
            limit = sys.maxsize if policy is None else policy.context_limit

            @cache
            def formats(chat: bool) -> TurnFormat:
                return codec if isinstance(codec, AnyCodec) else turn_format(codec, env, chat_template=chat)

            examples = load(rows, chat_template=chat, codec=codec, turn_formats=formats, context_limit=limit)
            if examples.left_out:
                self.remarks.append(f"stage {stage.name}: {examples.description}")

        self._once(stage, ("rows", load, data, chat, env.thinking, policy), check)

    def _check_task(self, stage: StageSpec, policy: KnownModel | None) -> None:
        """The task and the evaluation sets, and their rewards other than reward models."""
        spec = stage.spec
        generates = "engine" in KINDS[stage.kind].sections

        def check() -> None:
            if policy is not None and generates:
                task = fitting_task(spec, policy.codec, limit=policy.context_limit)
            else:
                codec: AnyCodec | TextCodec = AnyCodec() if policy is None else policy.codec
                agent = agent_prompts(spec, codec)
                task = configured_task(spec, codec=codec, agent=agent)
                task = with_eval_sets(task, spec, codec=codec, agent=agent)
            rewards = [reward for reward in spec.scoring.rewards if reward.kind != "model"]
            context = Context(task=task, seed=spec.run.seed, stop_strings=task.default_stop_strings)
            rows = report_rows(spec, task) if "scoring" in KINDS[stage.kind].sections else {}
            if any(rows.get(key) for key in REMARKS):
                self.remarks += [f"stage {stage.name}: {line}" for line in event_text(DATA, rows).splitlines()]
            build_rewards(rewards, context)
            check_rewards(evaluation_scoring(spec.scoring, task=task, rewards=spec.eval.rewards).rewards, task)

        lengths = (spec.sampling.max_new_tokens, spec.eval.max_new_tokens, spec.engine.context_tokens)
        chat = spec.model.chat_template
        rewards = (spec.scoring.rewards, spec.eval.rewards)
        key = ("task", spec.task, spec.env, rewards, spec.eval.sets, lengths, generates, chat, policy)
        self._once(stage, key, check)

    def _check_reward_models(self, stage: StageSpec, policy: KnownModel | None) -> None:
        for index, reward in enumerate(stage.spec.scoring.rewards):
            if reward.kind == "model":
                inputs = (reward.model, policy, f"scoring.rewards[{index}].model")
                self._once(stage, ("reward model", *inputs), partial(self._check_reward_model, *inputs))

    def _check_reward_model(self, source: str, policy: KnownModel | None, key: str) -> None:
        """A reward model's folder, or the stage that trains it, needs the policy's tokenizer."""
        if not source.startswith(PREFIX):
            folder = locate(source).folder or Path(source)
            description = read_description(folder, "reward_model")
            if policy is not None:
                check_same_vocabulary(description, folder, policy.codec, where=key)
            return
        root = self._load_valid(self._root_config(source, ModelConfig()))
        if root is None or policy is None:
            return
        if root.codec.vocabulary_digest != policy.codec.vocabulary_digest:
            raise other_tokenizer(key)


def _existing_data(data: DataConfig) -> DataConfig | None:
    """`data` without files that other stages will write; None if nothing is left."""
    train_only = {"held_out_path": None, "held_out_fraction": 0.0}
    held_out = None if _is_reference(data.held_out_path) else data.held_out_path
    sources = tuple(source for source in data.all_sources if not _is_reference(source.path))
    if not sources:
        only = {"path": held_out, "sources": ()}
        return None if held_out is None else data.model_copy(update={**train_only, **only})
    if len(sources) < len(data.all_sources):
        data = data.model_copy(update={"sources": sources})
    return data.model_copy(update=train_only) if _is_reference(data.held_out_path) else data


def _is_reference(path: Path | None) -> bool:
    return str(path).startswith(PREFIX)
