"""What `--dry-run` prints: the derived arithmetic of a run in words. Needs no model, tokenizer or torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from pydantic import BaseModel

from tidemill.config.algorithm import CorrectionConfig
from tidemill.config.derive import Derived, derive
from tidemill.config.issues import Purpose
from tidemill.config.model import BUILT_IN_MODELS
from tidemill.config.pool import RayPool, StaticPool, SyntheticPool, TracePool
from tidemill.config.schema import RunSpec
from tidemill.config.task import ArithmeticTask, PromptFiles
from tidemill.core.formatting import counted, number


def pool_topics(spec: RunSpec) -> list[tuple[str, str]]:
    """(topic, sentence) pairs; none where the reserved side generates everything and costs nothing."""
    fleet, pool = spec.fleet, spec.pool
    said = []
    if preemptible(spec):
        said = [("workers", f"{_workers(pool)}; {_place(spec)}"), ("seeding", _seeding(spec))]
        if not isinstance(pool, StaticPool):
            said.insert(1, ("notice", _notice(spec)))
    prices = [
        f"${dollars:g} an hour for {whom}"
        for dollars, whom in (
            (fleet.reserved_usd_per_hour, "the reserved side"),
            (fleet.preemptible_usd_per_hour if preemptible(spec) else 0.0, "each preemptible worker"),
        )
        if dollars
    ]
    return [*said, ("prices", ", ".join(prices))] if prices else said


def preemptible(spec: RunSpec) -> bool:
    """Whether any worker may come and go."""
    return not isinstance(spec.pool, StaticPool) or spec.pool.workers > 0


def pool_notes(spec: RunSpec) -> list[str]:
    """Settings of pool and fleet that will probably not do what was hoped."""
    notice_s, drain_margin_s = _notice_s(spec), spec.fleet.drain_margin_s
    if 0 < notice_s <= drain_margin_s:
        limit = f"fleet.drain_margin_s = {drain_margin_s:g}"
        return [f"a notice of {notice_s:g} s is no longer than {limit}: a warned worker hands its samples back at once"]
    return []


def _workers(pool: StaticPool | TracePool | SyntheticPool | RayPool) -> str:
    if isinstance(pool, StaticPool):
        return f"{counted(pool.workers, 'preemptible worker')}, there from the start"
    if isinstance(pool, TracePool):
        begin = f" from second {pool.start_s:g}" if pool.start_s else ""
        return f"as many preemptible workers as {pool.path} has{begin}, at most {pool.max_workers}"
    if isinstance(pool, SyntheticPool):
        return (
            f"{counted(pool.workers, 'preemptible worker')}; on average one is evicted after "
            f"{pool.mean_time_to_eviction_s:g} s and back {pool.mean_time_to_return_s:g} s later"
        )
    labels = ", ".join(f"{name}={value}" for name, value in pool.selector.items())
    return f"at most {counted(pool.max_workers, 'preemptible worker')}, on nodes labelled {labels or 'anyhow'}"


def _place(spec: RunSpec) -> str:
    if spec.runtime == "inprocess":
        return "simulated in this process"
    where = f"the cluster at {spec.ray.address}" if spec.ray.address else "a cluster of this machine"
    return f"Ray actors on {where}"


def _notice_s(spec: RunSpec) -> float:
    return spec.pool.notice_s if isinstance(spec.pool, TracePool | SyntheticPool) else 0.0


def _notice(spec: RunSpec) -> str:
    notice_s = _notice_s(spec)
    back = f"samples are handed back {min(notice_s, spec.fleet.drain_margin_s):g} s before the end"
    if isinstance(spec.pool, RayPool):
        return "as the cluster gives it; without one, samples go on elsewhere from the tokens that arrived"
    share = spec.pool.noticed if isinstance(spec.pool, SyntheticPool) else 1.0
    if not notice_s or not share:
        return "none; samples of a worker that was taken go on elsewhere from the tokens that arrived"
    whom = "each eviction" if share == 1 else f"{100 * share:g} % of evictions"
    return f"{notice_s:g} s before {whom}; {back}"


def _seeding(spec: RunSpec) -> str:
    fleet = spec.fleet
    if not fleet.seeding:
        return "none: the reserved side never generates, and the run waits while no worker is there"
    return (
        f"the reserved side generates too in the first {fleet.seed_window_s:g} s of a step (this adapts), and whenever "
        "no worker is there"
    )


def reader_topics(spec: RunSpec) -> list[tuple[str, str]]:
    """(topic, sentence) pairs; none where there is neither reward model nor reference."""
    placement, said = spec.placement, list[str]()
    if models := len(spec.scoring.model_folders):
        where = "on an actor each" if placement.reward_model == "actor" else "in the controller's process"
        said.append(f"{counted(models, 'reward model')} {where}")
    if spec.algorithm.kl_beta:
        where = "on an actor of its own" if placement.reference == "actor" else "beside the trainer"
        said.append(f"the reference {where}")
    if not said:
        return []
    words = " and ".join(said)
    if spec.reading.ahead:
        words += (
            f"; samples are read while they are generated, {counted(spec.reading.chunk_tokens, 'token')} at a time, "
            f"{number(spec.reading.cache_tokens)} kept"
        )
    return [("scoring", words)]


def reader_notes(spec: RunSpec) -> list[str]:
    """Settings of reading that will probably not do what was hoped."""
    reading, found = spec.reading, list[str]()
    if not reading.ahead or not (spec.scoring.model_folders or spec.algorithm.kl_beta):
        return found
    if reading.chunk_tokens > spec.sampling.max_new_tokens:
        found.append(
            f"no completion fills a chunk of reading.chunk_tokens = {reading.chunk_tokens}: only prompts are read ahead"
        )
    if spec.runtime == "inprocess" and not reading.own_thread:
        found.append(
            "one thread generates, learns and reads: with reading.own_thread = false it has hardly ever time to read "
            "ahead"
        )
    return found


class Row(NamedTuple):
    keys: tuple[str, ...]
    act: Callable[[RunSpec], bool]
    why_not: str


def _learns_again(spec: RunSpec) -> bool:
    return spec.batch.minibatches * spec.batch.epochs > 1


def _leaves_over(spec: RunSpec) -> bool:
    return spec.schedule.max_policy_lag > 0


def _may_be_late(spec: RunSpec) -> bool:
    return _leaves_over(spec) and spec.schedule.membership == "first_finished"


def _reads(spec: RunSpec) -> bool:
    return bool(spec.scoring.model_folders) or spec.algorithm.kl_beta > 0


def _warns(spec: RunSpec) -> bool:
    return not isinstance(spec.pool, SyntheticPool) or spec.pool.notice_s > 0


ROWS = (
    Row(
        ("schedule.fresh_fraction", "schedule.membership", "schedule.unfinished"),
        _leaves_over,
        "at schedule.max_policy_lag = 0 nothing is left over for another batch",
    ),
    Row(
        ("schedule.on_lag_limit",),
        _may_be_late,
        'no group is late unless schedule.max_policy_lag is above 0 and membership = "first_finished"',
    ),
    Row(("schedule.max_redraws",), lambda spec: spec.algorithm.dynamic_sampling, "algorithm.dynamic_sampling is off"),
    Row(
        (
            *("fleet.size", "fleet.seed_window_s", "fleet.window_gain", "fleet.queue_limit", "fleet.max_moves"),
            *(
                "fleet.tail_fraction",
                "fleet.join_timeout_s",
                "fleet.drain_margin_s",
                "fleet.probe_tolerance",
                "fleet.hand_over",
            ),
            *("fleet.window_floor_s", "fleet.remember_windows", "fleet.known_windows"),
            "fleet.preemptible_usd_per_hour",
        ),
        preemptible,
        "the pool has no preemptible workers",
    ),
    Row(("fleet.known_windows",), lambda spec: spec.fleet.remember_windows, "fleet.remember_windows is false"),
    Row(
        ("fleet.hand_over",),
        lambda spec: not _leaves_over(spec) or not preemptible(spec),
        "only at schedule.max_policy_lag = 0 does one step's generating end before the next begins",
    ),
    Row(
        ("fleet.heartbeat_timeout_s",),
        lambda spec: spec.runtime == "ray" and preemptible(spec),
        "there are no preemptible workers that are processes of their own",
    ),
    Row(("pool.noticed",), _warns, "pool.notice_s is 0"),
    Row(
        (
            *("ray.address", "ray.reserved_selector", "ray.trainer_cpus", "ray.trainer_gpus", "ray.worker_cpus"),
            "ray.worker_gpus",
        ),
        lambda spec: spec.runtime == "ray",
        'runtime is not "ray"',
    ),
    Row(
        ("placement.actor_cpus", "placement.actor_gpus"),
        lambda spec: bool(spec.placement.on_actors),
        "no model is placed on an actor",
    ),
    Row(("placement.reward_model",), lambda spec: bool(spec.scoring.model_folders), 'no reward is of kind "model"'),
    Row(
        ("placement.reference", "algorithm.kl_in", "algorithm.kl_ratio"),
        lambda spec: spec.algorithm.kl_beta > 0,
        "algorithm.kl_beta = 0 needs no reference",
    ),
    Row(("reading.ahead",), _reads, "there is neither a reward model nor a reference"),
    Row(("reading.own_thread",), lambda spec: spec.reading.ahead, "reading.ahead is off"),
    Row(
        ("reading.chunk_tokens", "reading.cache_tokens"),
        lambda spec: spec.reading.ahead or bool(spec.placement.on_actors),
        "no model reads sample by sample: reading.ahead is off, and none is on an actor",
    ),
    Row(
        (
            *("placement.critic", "critic.kind", "critic.source", "critic.learning_rate", "critic.max_grad_norm"),
            *("critic.normalize", "algorithm.lam", "algorithm.bootstrap_truncated", "algorithm.value_clip"),
            "algorithm.value_coefficient",
        ),
        lambda spec: spec.algorithm.needs_critic,
        'there is no critic: algorithm.advantage is not "gae"',
    ),
    Row(
        ("algorithm.gamma",),
        lambda spec: not spec.algorithm.compares_siblings,
        "the advantage is one number a sample",
    ),
    Row(("algorithm.clip_low",), lambda spec: spec.algorithm.loss != "cispo", 'loss = "cispo" has no lower limit'),
    Row(("algorithm.kl_stop",), _learns_again, "each batch is one optimizer step, so that there is nothing to stop"),
    Row(
        ("optimizer.min_learning_rate_ratio",),
        lambda spec: spec.optimizer.schedule != "constant",
        'optimizer.schedule is "constant"',
    ),
    Row(
        ("eval.samples_per_prompt", "eval.pass_at", "eval.compare_with"),
        lambda spec: False,
        "a run in progress is evaluated greedily and by itself; `tidemill eval` does more",
    ),
)


def without_effect(spec: RunSpec) -> list[str]:
    """A sentence for each reason why keys that are not at their defaults do nothing in this run."""
    found = []
    for row in ROWS:
        idle = [] if row.act(spec) else [key for key in row.keys if _is_set(spec, key)]
        if idle:
            found.append(f"{', '.join(idle)} {'has' if len(idle) == 1 else 'have'} no effect: {row.why_not}")
    return found


def _is_set(spec: RunSpec, key: str) -> bool:
    """Whether a key has another value than by default; of the algorithm, than its preset gives it."""
    section, name = key.split(".")
    node: BaseModel = getattr(spec, section)
    if section == "algorithm":
        return name in spec.algorithm.changed_from_preset()
    field = type(node).model_fields.get(name)  # a pool of another kind may have no such key
    return field is not None and getattr(node, name) != field.get_default(call_default_factory=True)


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
