"""What `--dry-run` says: the derived arithmetic of a run, in words. Needs no model, tokenizer or torch."""

from __future__ import annotations

from collections.abc import Iterable

from tidemill.config.algorithm import CorrectionConfig
from tidemill.config.checks import Purpose
from tidemill.config.derive import Derived, derive
from tidemill.config.describe_pool import pool_notes, pool_topics
from tidemill.config.describe_readers import reader_notes, reader_topics
from tidemill.config.effects import without_effect
from tidemill.config.model import BUILT_IN_MODELS
from tidemill.config.schema import RunSpec
from tidemill.config.task import ArithmeticTask, PromptFiles
from tidemill.config.words import counted, number

BYTES_PER_PARAMETER = 12  # a checkpoint holds fp32 weights and AdamW's two moments
PARAMETERS = {"smollm2-135m": 134_515_008}
LABEL_CHARS = 12
LOW_FOR_LORA = 3e-5  # a learning rate at which a whole model learns, and an adapter hardly moves


def describe(spec: RunSpec, *, purpose: Purpose = "train", prompt_tokens: int | None = None) -> str:
    """The run in words, a topic a line; `prompt_tokens` is one prompt's length if known."""
    return as_lines(topics(spec, purpose=purpose, prompt_tokens=prompt_tokens))


def as_lines(said: Iterable[tuple[str, str]]) -> str:
    return "\n".join(f"{topic:<{LABEL_CHARS}}{words}" for topic, words in said)


def topics(spec: RunSpec, *, purpose: Purpose = "train", prompt_tokens: int | None = None) -> list[tuple[str, str]]:
    """(topic, sentence) pairs; several "note"s may follow."""
    derived = derive(spec, prompt_tokens=prompt_tokens)
    if purpose == "generate":
        return [("model", _model(spec)), ("sampling", _sampling(spec))]
    if purpose == "eval":
        return [("model", _model(spec)), ("task", _task(spec)), ("evaluation", _held_out(spec)), *_drawn(spec)]
    return [
        ("model", _model(spec)),
        ("task", _task(spec)),
        ("step", _step(spec, derived)),
        ("schedule", _schedule(spec)),
        ("algorithm", _algorithm(spec)),
        *reader_topics(spec),
        ("learning", _learning(spec, derived)),
        ("microbatch", _microbatch(spec, derived)),
        ("tokens", _tokens(spec, derived)),
        *pool_topics(spec),
        ("run", _run(spec, derived)),
        ("evaluation", _evaluation(spec, derived)),
        ("checkpoint", _checkpoint(spec, derived)),
        ("directory", f"{spec.directory}; the same command again resumes it"),
        *(("note", note) for note in notes(spec, derived)),
    ]


def _timing_notes(spec: RunSpec) -> list[str]:
    """What depends on timing in a run, and the settings that pin it."""
    schedule, found = spec.schedule, []
    alone = "engine.batch_invariant alone does not make runs reproducible"
    if not schedule.one_version:
        found.append(
            f"{alone} at schedule.max_policy_lag = {schedule.max_policy_lag}: timing decides which version makes a "
            'token; schedule.unfinished = "wait" pins it'
        )
    if schedule.max_policy_lag and schedule.membership == "first_finished":
        found.append(f'{alone}: timing decides which groups make a batch; schedule.membership = "planned" pins them')
    if spec.batch.order == "arrival":
        found.append(f'{alone}: timing decides the order of a batch; batch.order = "canonical" pins it')
    return found


def notes(spec: RunSpec, derived: Derived) -> list[str]:
    """Settings that are allowed and will probably not do what was hoped."""
    found = [*without_effect(spec), *pool_notes(spec), *reader_notes(spec)]
    found += _algorithm_notes(spec)
    if spec.engine.batch_invariant:
        found += _timing_notes(spec)
    if not derived.optimizer_steps:
        found.append(
            f"the policy never learns: algorithm.critic_warmup_steps = {number(spec.algorithm.critic_warmup_steps)} "
            "takes every optimizer step"
        )
    elif spec.optimizer.warmup_steps >= derived.optimizer_steps:
        found.append(
            f"the learning rate never reaches its peak: warm-up takes {number(spec.optimizer.warmup_steps)} of "
            f"{counted(derived.optimizer_steps, 'optimizer step')}"
        )
    if spec.model.lora.enabled and spec.optimizer.learning_rate <= LOW_FOR_LORA:
        found.append(
            f"a LoRA adapter usually wants ten times the learning rate of a whole model or more, and "
            f"optimizer.learning_rate = {spec.optimizer.learning_rate:g}"
        )
    if any(reward.kind == "random" and reward.weight for reward in spec.scoring.rewards):
        found.append("rewards are random: a control that should learn nothing")
    if spec.sampling.temperature not in (0, 1):
        found.append(f"samples are drawn, and trainer logprobs taken, at temperature {spec.sampling.temperature:g}")
    if derived.prompt_tokens and spec.sampling.max_new_tokens + derived.prompt_tokens > spec.batch.microbatch_tokens:
        found.append(
            f"one prompt of about {number(derived.prompt_tokens)} tokens and its completion may exceed "
            f"batch.microbatch_tokens = {number(spec.batch.microbatch_tokens)}; each sample then runs alone"
        )
    return found


def _model(spec: RunSpec) -> str:
    source, lora = spec.model.source, spec.model.lora
    where = "" if source in BUILT_IN_MODELS else " (a local folder or a hub id)"
    precision = {"fp32": "fp32", "bf16": "bf16 autocast over fp32 weights", "auto": "bf16 autocast on a GPU, fp32 else"}
    layers = " and ".join(lora.targets) or "all linear layers"
    adapter = f" with a LoRA adapter of rank {lora.rank} on {layers}" if lora.enabled else ""
    reference = ""
    if spec.algorithm.kl_beta:
        reference = ", itself without it as KL reference" if lora.enabled else " plus a frozen copy as KL reference"
    return f"{source}{where}{adapter}{reference}; {precision[spec.trainer.precision]}"


def _task(spec: RunSpec) -> str:
    task = spec.task
    if isinstance(task, ArithmeticTask):
        digits = "1 digit" if task.digits == 1 else f"1 to {task.digits} digits"
        numbers = f"numbers of {digits}" if task.largest is None else f"numbers up to {task.largest}"
        what = f"arithmetic: {' '.join(task.operators)} on {numbers}, {counted(task.shots, 'worked example')}"
    elif isinstance(task, PromptFiles):
        what = f"{task.kind}: {task.path}"
    else:
        what = f"reasoning-gym {task.name}: {counted(task.train_size, 'training prompt')}"
    rewards = spec.scoring.rewards
    terms = [reward.kind if reward.weight == 1 else f"{reward.weight:g} × {reward.kind}" for reward in rewards]
    return f"{what}; reward = {' + '.join(terms)}"


def _sampling(spec: RunSpec) -> str:
    sampling = spec.sampling
    if sampling.temperature == 0:
        return f"greedy, at most {counted(sampling.max_new_tokens, 'new token')}"
    kept = [f"top-k {sampling.top_k}"] if sampling.top_k else []
    kept += [f"top-p {sampling.top_p:g}"] if sampling.top_p < 1 else []
    words = ", ".join([f"temperature {sampling.temperature:g}", *kept])
    return f"{words}, at most {counted(sampling.max_new_tokens, 'new token')}"


def _step(spec: RunSpec, derived: Derived) -> str:
    batch, waves = spec.batch, -(-derived.samples_per_step // spec.engine.slots)
    held = "all decoded at once" if waves == 1 else f"decoded {number(spec.engine.slots)} at a time"
    return (
        f"{counted(batch.prompts, 'prompt')} × {counted(batch.group_size, 'sample')} = "
        f"{counted(derived.samples_per_step, 'sample')} per step, {held}"
    )


def _schedule(spec: RunSpec) -> str:
    schedule, batch = spec.schedule, spec.batch
    if schedule.max_policy_lag == 0:
        return "strictly on policy: each batch is generated by the weights that learn from it"
    ahead = schedule.most_left_over(batch.prompts)
    unfinished = {
        "continue": "go on under them",
        "finish": "are finished under the old ones",
        "restart": "begin again",
        "wait": "are waited for",
    }
    limit = {"wait": "the batch waits for it", "restart": "it begins again", "drop": "it is given up"}
    members = "the groups finished first" if schedule.membership == "first_finished" else "the step's own prompts"
    words = (
        f"tokens at most {counted(schedule.max_policy_lag, 'version')} old: up to {counted(ahead, 'group')} ahead of "
        f"the {number(batch.prompts)} that are due; a batch is {members}; at new weights, samples under way "
        f"{unfinished[schedule.unfinished]}"
    )
    if schedule.fresh_fraction > 0:
        words += f"; at least {number(batch.prompts - ahead)} of each batch are begun under the newest"
    if schedule.membership == "first_finished":
        words += f"; when a group would become too old, {limit[schedule.on_lag_limit]}"
    return words


def _learning(spec: RunSpec, derived: Derived) -> str:
    batch, optimizer = spec.batch, spec.optimizer
    return (
        f"{counted(batch.epochs, 'epoch')} × {counted(batch.minibatches, 'minibatch')} = "
        f"{counted(derived.optimizer_steps_per_batch, 'optimizer step')} per batch, each from "
        f"{counted(derived.samples_per_optimizer_step, 'sample')}; learning rate {optimizer.learning_rate:g}, "
        f"{optimizer.schedule}, {counted(optimizer.warmup_steps, 'warm-up step')}"
    )


def _algorithm(spec: RunSpec) -> str:
    algorithm, critic = spec.algorithm, spec.critic
    parts = [f"advantage {algorithm.advantage}{', whitened over the batch' if algorithm.whiten else ''}"]
    if algorithm.needs_critic:
        own = "critic of its own" + (" on an actor of its own" if spec.placement.critic == "actor" else "")
        parts.append("critic on the policy's own trunk" if critic.kind == "shared" else own)
    if algorithm.kl_beta:
        parts.append(f"KL in the {algorithm.kl_in}, weight {algorithm.kl_beta:g}")
    parts.append(f"loss {algorithm.loss}, mean by {algorithm.normalize}")
    parts.append(f"correction {algorithm.correction.kind}")
    changed = [f"{key} = {_shown(getattr(algorithm, key))}" for key in algorithm.changed_from_preset()]
    return f"{algorithm.name}: {'; '.join(parts)}" + (f" (not the preset's: {', '.join(changed)})" if changed else "")


def _shown(value: object) -> str:
    """A value of the algorithm's section: the correction, a table, in one word."""
    return value.kind if isinstance(value, CorrectionConfig) else f"{value}"


def _algorithm_notes(spec: RunSpec) -> list[str]:
    algorithm, found = spec.algorithm, []
    if algorithm.name == "dapo" and not algorithm.overlong_buffer_tokens:
        found.append(
            "DAPO's penalty of overlong completions is off; algorithm.overlong_buffer_tokens sets it (there a fifth of "
            "max_new_tokens)"
        )
    if spec.corrects_each_publish:
        left_over = spec.schedule.most_left_over(spec.batch.prompts)
        found.append(
            'algorithm.correction.kind = "mu_step" costs the trainer one forward pass per publish over what is in '
            f"flight then: up to {counted(left_over * spec.batch.group_size, 'sample')}, shared prefixes once"
        )
    elif algorithm.correction.kind == "mu_step" and not spec.schedule.max_policy_lag:
        found.append(
            'algorithm.correction.kind = "mu_step" is the same as "tis" at schedule.max_policy_lag = 0: no token is '
            "older than the last publish"
        )
    if algorithm.proximal == "rollout" and algorithm.correction.kind != "none":
        found.append("algorithm.correction never acts: clipping is measured from the policy that generated")
    return found


def _microbatch(spec: RunSpec, derived: Derived) -> str:
    shape = f"up to {counted(spec.batch.microbatch_tokens, 'packed token')}, a group's prompt counted once: "
    if derived.prompt_tokens is None:
        shape += f"{counted(derived.microbatches_per_optimizer_step, 'microbatch')} for the completions alone"
        return f"{shape} of one optimizer step, more for the prompts (their length is known at the start)"
    prompts = f"prompts of about {counted(derived.prompt_tokens, 'token')} and completions at their limit"
    return (
        f"{shape}about {counted(derived.microbatches_per_optimizer_step, 'microbatch')} per optimizer step ({prompts})"
    )


def _tokens(spec: RunSpec, derived: Derived) -> str:
    return (
        f"{counted(derived.samples_per_step, 'sample')} × {counted(spec.sampling.max_new_tokens, 'new token')} = "
        f"at most {counted(derived.completion_tokens_per_step, 'completion token')} per step"
    )


def _run(spec: RunSpec, derived: Derived) -> str:
    return (
        f"{counted(spec.trainer.steps, 'step')}: {counted(derived.optimizer_steps, 'optimizer step')}, "
        f"{counted(derived.samples, 'sample')}, at most {counted(derived.completion_tokens, 'token')} generated and "
        f"{number(derived.trained_tokens)} trained on"
    )


def _evaluation(spec: RunSpec, derived: Derived) -> str:
    every = f", every {counted(spec.eval.every_steps, 'step')}" if spec.eval.every_steps else ""
    return (
        f"{counted(derived.evaluations, 'time')} (before{every} and after the last) × {_held_out(spec)}: "
        f"at most {counted(derived.eval_tokens, 'token')} in all"
    )


def _held_out(spec: RunSpec) -> str:
    limit = spec.eval.max_new_tokens or spec.sampling.max_new_tokens
    return (
        f"at most {counted(spec.eval.prompts, 'held-out prompt')}, {counted(limit, 'new token')} each at most, greedily"
    )


def _drawn(spec: RunSpec) -> list[tuple[str, str]]:
    """What `tidemill eval` draws besides."""
    if not spec.eval.samples_per_prompt:
        return []
    ks = ", ".join(f"pass@{k}" for k in spec.eval.ks)
    return [("drawn", f"{counted(spec.eval.samples_per_prompt, 'sample')} of each prompt for {ks}; {_sampling(spec)}")]


def _checkpoint(spec: RunSpec, derived: Derived) -> str:
    every, best = spec.checkpoint.every_steps, " and the best" if spec.checkpoint.keep_best else ""
    due = f"every {counted(every, 'step')} and at the end" if every else "at the end"
    size = f"{BYTES_PER_PARAMETER} bytes per parameter"
    if spec.model.lora.enabled:
        size += " of the adapter"
    elif parameters := PARAMETERS.get(spec.model.source):
        size = f"about {parameters * BYTES_PER_PARAMETER / 1e9:.1f} GB"
    kept = f"the last {number(spec.checkpoint.keep_last)}{best} kept"
    return f"{due}: {number(derived.checkpoints)} written, {kept}, {size} each"
