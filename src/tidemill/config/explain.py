"""The summary that `--dry-run` prints: derived numbers, one line per topic, and notes on questionable settings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tidemill.config.algorithm import CorrectionConfig
from tidemill.config.issues import Purpose, without_effect
from tidemill.config.model import BUILT_IN_MODELS
from tidemill.config.pool import StaticPool, SyntheticPool, TracePool
from tidemill.config.schema import RunSpec
from tidemill.config.task import ArithmeticTask, EnvironmentTask, FileTask, PythonTask, ServedTask
from tidemill.core.formatting import counted, number

Topic = tuple[str, str]
"""Name and text."""

MAX_SIMULATED_SAMPLES = 65536
"""For minibatches with more samples, the number of microbatches is estimated from their mean size."""
BYTES_PER_PARAMETER = 12  # of a checkpoint: fp32 weights and AdamW's two moments
PARAMETERS = {"smollm2-135m": 134_515_008}
TOPIC_CHARS = 12
MAX_FULL_MODEL_LEARNING_RATE = 3e-5  # usual for a whole model, and too low for an adapter


@dataclass(frozen=True, slots=True, kw_only=True)
class Derived:
    """Amounts per step and per run, as `--dry-run --json` prints them. Token counts are upper bounds, with every
    completion at its limit."""

    samples_per_step: int
    optimizer_steps_per_batch: int
    samples_per_optimizer_step: int
    optimizer_steps: int  # of the policy, over the run
    samples: int  # over the run
    prompt_tokens: int | None  # estimate for one prompt; None if only the tokenizer can tell
    microbatches_per_optimizer_step: int  # upper bound; without prompts if their length is unknown
    microbatches_per_step: int
    completion_tokens_per_step: int
    completion_tokens: int  # generated over the run
    trained_tokens: int  # over the run and all epochs
    evaluations: int
    eval_samples: int  # over all evaluations
    eval_tokens: int  # over all evaluations
    checkpoints: int  # written
    checkpoints_kept: int  # upper bound at the end


def derive(spec: RunSpec) -> Derived:
    """The amounts that a configuration implies."""
    batch = spec.batch
    steps = spec.trainer.steps
    prompt_tokens = estimated_prompt_tokens(spec)
    samples = batch.prompts * batch.group_size
    per_batch = batch.minibatches * batch.epochs
    per_step = samples * spec.sampling.max_new_tokens
    microbatches = count_microbatches(
        groups=batch.prompts // batch.minibatches,
        group_size=batch.group_size,
        prompt_tokens=prompt_tokens or 0,
        completion_tokens=spec.sampling.max_new_tokens,
        budget_tokens=batch.microbatch_budget,
    )
    evaluations = 1 + occurrences(steps, spec.eval.every_steps)
    eval_limit = spec.eval.max_new_tokens or spec.sampling.max_new_tokens
    eval_samples = evaluations * spec.eval.most_prompts * (1 + spec.eval.samples_per_prompt)
    checkpoints = occurrences(steps, spec.checkpoint.every_steps)
    return Derived(
        samples_per_step=samples,
        optimizer_steps_per_batch=per_batch,
        samples_per_optimizer_step=samples // batch.minibatches,
        optimizer_steps=spec.policy_steps,
        samples=steps * samples,
        prompt_tokens=prompt_tokens,
        microbatches_per_optimizer_step=microbatches,
        microbatches_per_step=microbatches * per_batch,
        completion_tokens_per_step=per_step,
        completion_tokens=steps * per_step,
        trained_tokens=steps * per_step * batch.epochs,
        evaluations=evaluations,
        eval_samples=eval_samples,
        eval_tokens=eval_samples * eval_limit,
        checkpoints=checkpoints,
        checkpoints_kept=min(checkpoints, spec.checkpoint.keep_last + spec.checkpoint.keep_best),
    )


def occurrences(steps: int, every: int) -> int:
    """How often something happens that is due every so many steps and after the last step; 0: only after the last."""
    return 1 + ((steps - 1) // every if every else 0)


def count_microbatches(
    *, groups: int, group_size: int, prompt_tokens: int, completion_tokens: int, budget_tokens: int
) -> int:
    """Number of microbatches for samples of equal length, packed in order. A group's prompt counts once in each
    microbatch that contains one of its samples."""
    if groups * group_size > MAX_SIMULATED_SAMPLES:
        packed = groups * (prompt_tokens + group_size * completion_tokens)
        return -(-packed // budget_tokens)
    microbatches = 0
    used = 0
    last_group = -1  # its prompt is in the open microbatch
    for sample in range(groups * group_size):
        group = sample // group_size
        cost = completion_tokens + (prompt_tokens if group != last_group else 0)
        if microbatches == 0 or used + cost > budget_tokens:
            microbatches += 1
            used = 0
            cost = completion_tokens + prompt_tokens
        used, last_group = used + cost, group
    return microbatches


def estimated_prompt_tokens(spec: RunSpec) -> int | None:
    """Length of the longest prompt at one token per character; None unless the configuration determines the text."""
    task = spec.task
    if not isinstance(task, ArithmeticTask):
        return None
    question = 2 * task.digits + 2  # 12+34=
    answer = (2 * task.digits if "*" in task.operators else task.digits + 1) + 1  # and its newline
    return task.shots * (question + answer) + question


def as_lines(topics: Iterable[Topic]) -> str:
    return "\n".join(f"{topic:<{TOPIC_CHARS}}{text}" for topic, text in topics)


def topics(spec: RunSpec, *, purpose: Purpose = "train") -> list[Topic]:
    """The summary of a run. "note" may occur several times."""
    if purpose == "generate":
        return [("model", _model(spec)), ("sampling", _sampling(spec))]
    if purpose == "eval":
        size = _evaluation_size(spec)
        return [("model", _model(spec)), ("task", _task(spec)), ("evaluation", size), *_drawn(spec)]
    derived, batch, slots = derive(spec), spec.batch, spec.engine.slots
    together = "all decoded together" if derived.samples_per_step <= slots else f"{number(slots)} decoded at a time"
    step = (
        f"{counted(batch.prompts, 'prompt')} × {counted(batch.group_size, 'sample')} = "
        f"{counted(derived.samples_per_step, 'sample')} × {counted(spec.sampling.max_new_tokens, 'new token')} = "
        f"at most {counted(derived.completion_tokens_per_step, 'completion token')}; {together}"
    )
    run = (
        f"{counted(spec.trainer.steps, 'step')}: {counted(derived.optimizer_steps, 'optimizer step')}, "
        f"{counted(derived.samples, 'sample')}, at most {counted(derived.completion_tokens, 'token')} generated and "
        f"{number(derived.trained_tokens)} trained on"
    )
    every = f"every {counted(spec.eval.every_steps, 'step')}, " if spec.eval.every_steps else ""
    evaluation = (
        f"{counted(derived.evaluations, 'time')} (before training, {every}after the last step) × "
        f"{_evaluation_size(spec)}: at most {counted(derived.eval_tokens, 'token')} in total"
    )
    return [
        ("model", _model(spec)),
        ("task", _task(spec)),
        ("step", step),
        ("schedule", _schedule(spec)),
        ("algorithm", _algorithm(spec)),
        *([("scoring", text)] if (text := _scoring(spec)) else []),
        *([("engine", text)] if (text := _engine(spec)) else []),
        *([("workers", _workers(spec))] if spec.is_elastic else []),
        ("learning", _learning(spec, derived)),
        ("run", run),
        ("evaluation", evaluation),
        *_drawn(spec),
        ("checkpoint", _checkpoint(spec, derived)),
        ("directory", f"{spec.directory}; the same command resumes the run"),
        *(("note", note) for note in notes(spec)),
    ]


def _model(spec: RunSpec) -> str:
    source, lora = spec.model.source, spec.model.lora
    precision = {"fp32": "fp32", "bf16": "bf16 autocast with fp32 weights", "auto": "bf16 autocast on a GPU, else fp32"}
    text = source if source in BUILT_IN_MODELS else f"{source} (local folder or hub id)"
    if lora.enabled:
        text += f" with a LoRA adapter of rank {lora.rank} on {' and '.join(lora.targets) or 'all linear layers'}"
    if spec.algorithm.kl_beta:
        text += ", KL reference without the adapter" if lora.enabled else ", frozen copy as KL reference"
    return f"{text}; {precision[spec.trainer.precision]}"


def _task(spec: RunSpec) -> str:
    task = spec.task
    if isinstance(task, ArithmeticTask):
        digits = "1 digit" if task.digits == 1 else f"1 to {task.digits} digits"
        numbers = f"numbers of {digits}" if task.largest is None else f"numbers up to {task.largest}"
        text = f"arithmetic: {' '.join(task.operators)} on {numbers}, {counted(task.shots, 'worked example')}"
    elif isinstance(task, FileTask):
        text = f"{task.kind}: {' + '.join(str(source.path) for source in task.all_sources)}"
    elif isinstance(task, PythonTask):
        text = f"rows of {task.function}"
    elif isinstance(task, ServedTask):
        return "prompts of clients"
    elif isinstance(task, EnvironmentTask):
        text = f"{spec.env.name}: {counted(task.train_size, 'training task')}"
    else:
        text = f"reasoning-gym {task.name}: {counted(task.train_size, 'training prompt')}"
    rewards = spec.scoring.rewards
    terms = [reward.kind if reward.weight == 1 else f"{reward.weight:g} × {reward.kind}" for reward in rewards]
    text = f"{text}; reward = {' + '.join(terms)}"
    sandboxed = " and ".join(sorted({reward.kind for reward in rewards} & {"task", "tests"}))
    if sandboxed and spec.sandbox.backend == "none":
        return f"{text}; {sandboxed} without a sandbox"
    return f"{text}; {sandboxed} in a sandbox ({spec.sandbox.backend})" if sandboxed else text


def _sampling(spec: RunSpec) -> str:
    sampling, settings = spec.sampling, ["greedy"]
    if sampling.temperature:
        settings = [f"temperature {sampling.temperature:g}"]
        settings += [f"top-k {sampling.top_k}"] if sampling.top_k else []
        settings += [f"top-p {sampling.top_p:g}"] if sampling.top_p < 1 else []
    return ", ".join([*settings, f"at most {counted(sampling.max_new_tokens, 'new token')}"])


def _schedule(spec: RunSpec) -> str:
    schedule, batch = spec.schedule, spec.batch
    if schedule.max_policy_lag == 0:
        text = "strictly on policy: each batch is generated by the weights it trains"
        if schedule.tail == "batching":
            slots = f"{number(spec.nominal_slots)} nominal slots" if spec.nominal_slots else "unlimited nominal slots"
            text += (
                f"; tail batching: a round starts up to {counted(spec.short_round, 'group')}, trains the "
                f"{number(batch.prompts)} that end first with {slots}, and the others in later rounds"
            )
            if extra := schedule.extra_samples:
                text += (
                    f"; of {number(batch.group_size + extra)} samples per prompt the {batch.group_size} shortest count"
                )
        return text
    ahead = schedule.most_left_over(batch.prompts)
    text = (
        f"tokens at most {counted(schedule.max_policy_lag, 'version')} old: up to {counted(ahead, 'group')} in flight "
        f"beyond the {number(batch.prompts)} of the next batch; membership {schedule.membership}; "
        f"samples in flight at a publish: {schedule.unfinished}"
    )
    if schedule.keeps_cache:
        text += " and keep their keys and values"
    if schedule.fresh_fraction > 0:
        text += f"; at least {number(batch.prompts - ahead)} groups of each batch start under its own version"
    if schedule.membership == "first_finished":
        text += f"; groups at the lag limit: {schedule.on_lag_limit}"
    return text


def _algorithm(spec: RunSpec) -> str:
    algorithm = spec.algorithm
    parts = [f"advantage {algorithm.advantage}{', whitened over the batch' if algorithm.whiten else ''}"]
    if algorithm.needs_critic:
        separate = f"separate critic{' on a Ray actor' if spec.placement.critic == 'actor' else ''}"
        parts.append("critic shares the policy's trunk" if spec.critic.kind == "shared" else separate)
    if algorithm.kl_beta:
        parts.append(f"KL in the {algorithm.kl_in}, weight {algorithm.kl_beta:g}")
    parts += [f"loss {algorithm.loss}, mean by {algorithm.normalize}", f"correction {algorithm.correction.kind}"]
    if changed := algorithm.changed_from_preset():
        values = [getattr(algorithm, key) for key in changed]
        names = [value.kind if isinstance(value, CorrectionConfig) else value for value in values]
        parts.append("changed from the preset: " + ", ".join(map("{} = {}".format, changed, names)))
    return f"{algorithm.name}: {'; '.join(parts)}"


def _scoring(spec: RunSpec) -> str:
    """Reward models and the reference; empty if there are none."""
    placement = spec.placement
    reading = spec.reading
    models = list[str]()
    if count := len(spec.scoring.model_folders):
        where = "on Ray actors" if placement.reward_model == "actor" else "in the controller's process"
        models.append(f"{counted(count, 'reward model')} {where}")
    if spec.algorithm.kl_beta:
        models.append(f"reference {'on a Ray actor' if placement.reference == 'actor' else 'in the trainer'}")
    if placement.scoring_engine == "vllm" and {"reward_model", "reference"} & {*placement.on_actors}:
        models[-1] += f"; on actors vLLM scores, with {counted(placement.actor_tensor_parallel, 'rank')} for each model"
    if models and reading.ahead:
        chunk, cache = counted(reading.chunk_tokens, "token"), counted(reading.cache_tokens, "token")
        models[-1] += f"; samples are processed while they are generated, {chunk} at a time, with a KV cache of {cache}"
    return " and ".join(models)


def _engine(spec: RunSpec) -> str:
    """The reserved engine; empty if it has the trainer's parameters."""
    kind, processes = spec.engine.kind, "each shard" if spec.trainer.shards > 1 else "the trainer's process"
    if spec.placement.engine == "colocated":
        return f"{kind} in {processes}, in turns with the trainer"
    if not spec.engine_is_apart:
        return ""
    lane = "broadcast to it" if spec.weights.lane == "collective" else "pulled by it"
    return f"{kind} on the reserved side in a process of its own; weights are {lane}"


def _workers(spec: RunSpec) -> str:
    pool, place = spec.pool, "simulated in this process"
    if spec.runtime == "ray":
        place = f"Ray actors on {f'the cluster at {spec.ray.address}' if spec.ray.address else 'a local cluster'}"
    if isinstance(pool, StaticPool):
        text = f"{counted(pool.workers, 'preemptible worker')} from the start"
    elif isinstance(pool, TracePool):
        start = f" from second {pool.start_s:g}" if pool.start_s else ""
        speed = f", {pool.speed:g} times as fast" if pool.speed != 1 else ""
        text = f"preemptible workers as in {pool.path}{start}{speed}, at most {pool.max_workers}"
    elif isinstance(pool, SyntheticPool):
        text = (
            f"{counted(pool.workers, 'preemptible worker')}, each evicted after {pool.mean_time_to_eviction_s:g} s and "
            f"back {pool.mean_time_to_return_s:g} s later on average"
        )
    else:
        labels = ", ".join(f"{name}={value}" for name, value in pool.selector.items())
        text = f"at most {counted(pool.max_workers, 'preemptible worker')} on nodes with labels {labels or '(any)'}"
    if notice_s := _notice_s(spec):
        noticed = f"{100 * pool.noticed:g} % of" if isinstance(pool, SyntheticPool) else "all"
        text += f"; {noticed} evictions with a notice of {notice_s:g} s"
    if not spec.fleet.seeding:
        text += "; the reserved side never generates, and the run waits while there is no worker"
    return f"{text}; {place}"


def _notice_s(spec: RunSpec) -> float:
    return spec.pool.notice_s if isinstance(spec.pool, TracePool | SyntheticPool) else 0.0


def _learning(spec: RunSpec, derived: Derived) -> str:
    batch, optimizer = spec.batch, spec.optimizer
    microbatches = counted(derived.microbatches_per_optimizer_step, "microbatch")
    if derived.prompt_tokens is None:
        packed = f"at least {microbatches}, not counting prompts of unknown length"
    else:
        packed = f"about {microbatches} with prompts of about {counted(derived.prompt_tokens, 'token')}"
    falling = "" if optimizer.schedule == "constant" else f" over {counted(spec.schedule_steps, 'optimizer step')}"
    return (
        f"{counted(batch.epochs, 'epoch')} × {counted(batch.minibatches, 'minibatch')} = "
        f"{counted(derived.optimizer_steps_per_batch, 'optimizer step')} per batch, each on "
        f"{counted(derived.samples_per_optimizer_step, 'sample')} in {packed}; learning rate "
        f"{optimizer.learning_rate:g}, {optimizer.schedule}{falling}, {counted(optimizer.warmup_steps, 'warm-up step')}"
    )


def _evaluation_size(spec: RunSpec) -> str:
    limit = spec.eval.max_new_tokens or spec.sampling.max_new_tokens
    prompts = counted(spec.eval.prompts, "held-out prompt")
    sets = "".join(f" and {number(each.prompts or spec.eval.prompts)} of {each.name}" for each in spec.eval.sets)
    return f"at most {prompts}{sets}, greedy, at most {counted(limit, 'new token')} each"


def _drawn(spec: RunSpec) -> list[Topic]:
    """Samples drawn at an evaluation; empty if none are."""
    if not spec.eval.samples_per_prompt:
        return []
    ks = ", ".join(f"pass@{k}" for k in spec.eval.ks)
    samples = counted(spec.eval.samples_per_prompt, "sample")
    return [("samples", f"{samples} per prompt for {ks}; {_sampling(spec)}")]


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


def notes(spec: RunSpec) -> list[str]:
    """Notes on valid settings that probably do not do what the user expects."""
    return [*without_effect(spec), *_compute_notes(spec), *_algorithm_notes(spec), *_run_notes(spec)]


def _compute_notes(spec: RunSpec) -> Iterator[str]:
    notice_s = _notice_s(spec)
    drain_margin_s = spec.fleet.drain_margin_s
    reading = spec.reading
    if 0 < notice_s <= drain_margin_s:
        limit = f"fleet.drain_margin_s = {drain_margin_s:g}"
        yield f"a notice of {notice_s:g} s is not longer than {limit}: workers hand their samples back immediately"
    if reading.ahead and spec.has_frozen_scorers:
        if reading.chunk_tokens > spec.sampling.max_new_tokens:
            chunk = f"reading.chunk_tokens = {reading.chunk_tokens}"
            yield f"{chunk} is longer than any completion: only prompts are processed ahead"
        if spec.runtime == "inprocess" and not reading.own_thread:
            yield "with reading.own_thread = false, reading.ahead uses the one compute thread, which is rarely idle"


def _algorithm_notes(spec: RunSpec) -> Iterator[str]:
    algorithm = spec.algorithm
    if algorithm.name == "dapo" and not algorithm.overlong_buffer_tokens:
        yield (
            "DAPO's overlong penalty is off; set algorithm.overlong_buffer_tokens (the paper uses a fifth of "
            "max_new_tokens)"
        )
    if spec.corrects_each_publish:
        samples = spec.schedule.most_left_over(spec.batch.prompts) * spec.batch.group_size
        yield (
            'algorithm.correction.kind = "mu_step" costs one forward pass per publish over the samples in flight: up '
            f"to {counted(samples, 'sample')}"
        )
    elif algorithm.correction.kind == "mu_step" and not spec.schedule.max_policy_lag:
        yield 'algorithm.correction.kind = "mu_step" equals "tis" at schedule.max_policy_lag = 0'
    if algorithm.proximal == "rollout" and algorithm.correction.kind != "none":
        yield 'algorithm.correction has no effect with algorithm.proximal = "rollout"'


def _run_notes(spec: RunSpec) -> Iterator[str]:
    batch, optimizer, schedule, sampling = spec.batch, spec.optimizer, spec.schedule, spec.sampling
    if spec.engine.batch_invariant:
        alone = "engine.batch_invariant alone does not make runs reproducible: timing affects"
        if not schedule.one_version:
            lag = f"schedule.max_policy_lag = {schedule.max_policy_lag}"
            yield f'{alone} which version generates a token at {lag}; set schedule.unfinished = "wait"'
        if schedule.max_policy_lag and schedule.membership == "first_finished":
            yield f'{alone} which groups a batch contains; set schedule.membership = "planned"'
        if batch.order == "arrival" and schedule.tail == "wait":
            yield f'{alone} the order of a batch; set batch.order = "canonical"'
    falls = optimizer.schedule != "constant"
    rising_steps = min(spec.policy_steps, spec.schedule_steps) if falls else spec.policy_steps
    if not spec.policy_steps:
        warmup = f"critic.warmup_steps = {number(spec.critic.warmup_steps)}"
        yield f"the policy is never trained: {warmup} covers every optimizer step"
    elif optimizer.warmup_steps >= rising_steps:
        yield (
            f"the learning rate never reaches its peak: warm-up takes {number(optimizer.warmup_steps)} of "
            f"{counted(rising_steps, 'optimizer step')}"
        )
    if spec.policy_steps and (remark := optimizer.schedule_remark(spec.policy_steps)):
        yield remark
    if spec.model.lora.enabled and optimizer.learning_rate <= MAX_FULL_MODEL_LEARNING_RATE:
        yield (
            f"optimizer.learning_rate = {optimizer.learning_rate:g} is low for a LoRA adapter, which usually needs ten "
            "times the learning rate of a whole model"
        )
    if any(reward.kind == "random" and reward.weight for reward in spec.scoring.rewards):
        yield "rewards are random: a control that should learn nothing"
    if sampling.temperature not in (0, 1):
        yield f"samples and trainer logprobs use temperature {sampling.temperature:g}"
    prompt_tokens = estimated_prompt_tokens(spec)
    if prompt_tokens and sampling.max_new_tokens + prompt_tokens > batch.microbatch_budget:
        yield (
            f"one prompt of about {number(prompt_tokens)} tokens with its completion may exceed "
            f"batch.microbatch_tokens = {number(batch.microbatch_budget)}; each sample then runs alone"
        )
