"""The registry of metrics: name, unit, meaning, terminal label and chart of each; and the lines of metrics.jsonl.

Charts, terminal views, findings and the tables of docs/reference/metrics.md are derived from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from tidemill.core.formatting import compact, decimal, percent
from tidemill.core.records import EpisodeEnd, StepMetrics
from tidemill.telemetry.events import timestamp
from tidemill.telemetry.jsonl import finite_number, read_lines


class Metric(NamedTuple):
    """A number of a step. An empty unit is a plain ratio or score."""

    unit: str
    meaning: str
    label: str  # in the terminal; empty: not shown there
    write: Callable[[float], str]  # how the terminal writes it


METRICS: dict[str, Metric] = {}
"""Every metric this project writes, besides those of a `..._OF`, `COMPONENT`, `LAG`, `TERM` or
`ROBOT_FIGURE` prefix.

Other names are stored and reported, too, with a chart each.
"""


def _define(name: str, unit: str, meaning: str, *, label: str = "", write: Callable[[float], str] = decimal) -> str:
    METRICS[name] = Metric(unit, meaning, label, write)
    return name


REWARD_MEAN = _define("reward_mean", "", "mean reward of the batch's valid samples", label="reward")
REWARD_STD = _define("reward_std", "", "standard deviation of those rewards")
COMPONENT = "reward/"
"""Prefix of the mean of each of several rewards."""
HELD_OUT = "eval/"
"""Prefix of metrics of held-out prompts or examples."""
HELD_OUT_NAME = "held_out"
"""Name of the evaluation of the task's own held-out prompts, beside those of `eval.sets`."""
PASS_AT = "pass_at_"
"""Follows the prefix in the name of pass@k, for each k."""
HELD_OUT_REWARD = _define(
    "eval/reward_mean", "", "mean valid reward of greedy completions of held-out prompts, after this step",
    label="held-out reward",
)  # fmt: skip
_define("eval/reward_stderr", "", "standard error of that mean, over prompts")
GREEDY_ACCURACY = _define(
    "eval/greedy_accuracy", "", "share of those completions that are correct; only for rewards that define correctness",
    label="held-out accuracy",
)  # fmt: skip
DRAWN_REWARD = _define(
    "eval/drawn_reward_mean", "", "mean valid reward of eval.samples_per_prompt drawn samples, mean over prompts"
)
_define("eval/n", "prompts", "held-out prompts of that evaluation")
ENTROPY = _define(
    "entropy",
    "nats",
    "mean entropy of the policy's distribution of next tokens over trained tokens; robots: of actions",
    label="entropy",
)
KL_REF = _define(
    "kl_ref", "nats/token", "k3 estimate of KL(policy ‖ reference); only with algorithm.kl_beta > 0", label="KL"
)
_define(
    "kl_ref_k1", "nats/token", "k1 estimate of the same, mean log(policy / reference): not dominated by rare tokens"
)
_define("kl_beta", "", "KL coefficient of the batch; constant without algorithm.kl_target")
APPROX_KL = _define(
    "approx_kl",
    "nats/token",
    "k3 estimate of KL between the policy before and after the update; robots: of actions",
    label="KL",
)
CLIP_FRACTION = _define(
    "clip_fraction",
    "",
    "share of trained tokens (robots: actions) whose importance ratio was clipped",
    label="clipped",
    write=percent,
)
LENGTH_MEAN = _define(
    "completion_tokens_mean", "tokens", "mean number of generated tokens of a sample", label="length", write=compact
)
LENGTH_MAX = _define("completion_tokens_max", "tokens", "generated tokens of the longest sample", write=compact)
TRUNCATED = _define(
    "truncated_fraction", "", "share of completions cut at max_new_tokens or the context length", write=percent
)
NO_SIGNAL = _define(
    "groups_without_signal", "groups", "groups skipped because all their advantages are 0",
    label="no signal", write=compact,
)  # fmt: skip
_define("groups_skipped_invalid", "groups", "groups skipped because fewer than two of their samples were valid")
SAMPLES_INVALID = _define(
    "samples_invalid", "samples", "samples excluded because their reward raised, timed out or was not a number",
    label="invalid", write=compact,
)  # fmt: skip
_define("samples", "samples", "completions of the batch")
_define("samples_left_out", "samples", "completions of weight 0: invalid, or truncated and masked")
TURNS_MEAN = _define("turns_mean", "turns", "turns of an agent's episode, mean over the batch", label="turns")
_define("calls_mean", "calls", "tool calls of an agent's episode, mean over the batch")
EPISODE_ENDS = {
    end: _define(f"episodes_ended/{end}", "", f"share of the batch's episodes whose `episode_end` is `{end}`")
    for end in get_args(EpisodeEnd)
    if end
}
BUDGETS: dict[str, str] = {
    "tokens": "sampling.max_new_tokens",
    "context": "engine.context_tokens",
    "turns": "env.turns",
    "calls": "env.calls",
    "seconds": "env.seconds",
}
"""The key of each budget of an episode, by `EpisodeEnd`."""
_define("time_env_answer_s", "s", "time from the end of a turn to its environment's answer, mean over turns")
ENV_CALLS = _define(
    "env_calls",
    "calls",
    "steps, tool calls and scores that environments made since the previous step, evaluations included",
)
ENV_MISTAKES = _define(
    "env_mistakes",
    "calls",
    "exceptions in them, and tool calls that were not made (unknown tool, wrong arguments): the agent sees both",
)
ENV_TIMEOUTS = _define("env_timeouts", "calls", "of these, calls past their deadline")
_define("env_cut", "observations", "observations longer than env.observation_tokens, which were cut")
_define(
    "env_cleaned",
    "observations",
    "observations with NUL, lone surrogates or characters unknown to the model, which were replaced or left out",
)
ENV_RETRIES = _define("env_retries", "calls", "attempts repeated because the environment's process was lost")
ENV_FAILURES = _define("env_failures", "episodes", "episodes that broke their environment and got failure_reward")
ENV_FAULTS = _define(
    "env_faults", "episodes", "episodes left out of their group because of a fault of the environment",
    label="faults", write=compact,
)  # fmt: skip
TOKENS_GENERATED = _define("tokens_generated", "tokens", "completion tokens of this batch")
_define("tokens_recovered", "tokens", "of these, tokens generated in an earlier session")
_define("tokens_other_weights", "tokens", "of these, tokens from weights with this version's number but another digest")
_define("deltas_ignored", "messages", "token deltas ignored because their lease, attempt or position was outdated")
TOKENS_TRAINED = _define("tokens_trained", "tokens", "completion tokens that carried loss, once per epoch")
_define("tokens_packed", "tokens", "tokens of the forward and backward passes, shared prefixes once")
_define("pairs_packed", "pairs", "sum over passes of the squared number of tokens: the size of the attention")
_define("tokens_unpacked", "tokens", "tokens of those passes without shared prefixes")
UPDATES_SKIPPED = _define(
    "optimizer_steps_skipped", "steps", "optimizer steps skipped because the gradient was not finite",
    label="updates skipped", write=compact,
)  # fmt: skip
_define("minibatches_dropped", "minibatches", "not trained on because the policy had moved past algorithm.kl_stop")
_define("prompt_tokens_computed", "tokens", "prompt tokens the engine computed for this batch")
_define("prompt_tokens_reused", "tokens", "prompt tokens served from a shared prefix instead of being computed")
LOSS = _define("loss", "", "the objective minimised, mean over the batch's optimizer steps", label="loss")
GRAD_NORM = _define(
    "grad_norm", "", "global gradient norm before clipping, mean over optimizer steps", label="gradient"
)
LEARNING_RATE = _define("learning_rate", "", "learning rate of the last optimizer step", label="rate")
MISMATCH_KL = _define(
    "mismatch_kl", "nats/token", "k3 estimate of KL between the engine's and the trainer's logprobs of the same tokens"
)
MISMATCH_KL_KEPT_CACHE = _define(
    "mismatch_kl_kept_cache",
    "nats/token",
    "of that, the mean over tokens that a newer version generated than the first of the same turn and lease: with "
    "schedule.keep_cache they were sampled from keys and values of older weights",
)
_define("kept_cache_fraction", "", "share of these tokens")
MISMATCH_OF = "mismatch_kl/"
"""Prefix of the mismatch of an engine ("vllm"), and of an engine's worker ("vllm/spot-3")."""
MISMATCH_TOKENS_OF = "mismatch_tokens/"
"""Prefix of the number of tokens in that mean."""
_define("ratio_mean", "", "mean importance ratio over trained tokens")
_define("ratio_var", "", "variance of the importance ratio")
_define("ratio_max", "", "largest importance ratio")
_define("correction_truncated", "", "share of trained tokens whose weight algorithm.correction truncated")
_define("correction_masked", "", "share of trained tokens that algorithm.correction masked")
_define(
    "policy_lag_mean",
    "versions",
    "trainer's version minus the version that generated a trained token, mean over tokens",
)
_define("policy_lag_max", "versions", "the largest such lag")
LAG = "lag/"
"""Prefix of the share of trained tokens of each lag."""
_define("value_loss", "", "the critic's loss, normalised as the policy's, mean over its optimizer steps")
_define("value_clip_fraction", "", "share of tokens whose value moved beyond critic.value_clip")
_define("value_grad_norm", "", "global gradient norm of the critic's parameters before clipping")
_define("explained_variance", "", "1 - Var(return - value) / Var(return) before the update: 1 is a perfect critic")
_define("returns_mean", "", "mean return the critic was trained on")
_define("effective_sample_size", "", "(Σw)² / (n Σw²) of the importance ratios: 1 is fully on policy")
RETURN_MEAN = _define(
    "robot/return_mean", "", "robots: mean return of the episodes that ended in this iteration", label="return"
)
_define("robot/length_mean", "steps", "control steps of those episodes, mean")
SUCCESS = _define("robot/success", "", "share of those episodes that succeeded", label="success", write=percent)
FALLS = _define("robot/falls", "", "share of them that the task ended as failed", label="falls", write=percent)
_define("robot/episodes", "episodes", "number of those episodes")
TERM = "robot/term/"
"""Prefix of the mean of a reward term over an episode."""
ROBOT_FIGURE = "robot/figure/"
"""Prefix of the mean of one of the task's further figures, such as a speed."""
_define("robot/action_std", "", "standard deviation of the policy's actions, mean over actions")
INVALID_WORLDS = _define(
    "robot/invalid", "worlds", "worlds that were reset, once or more often, because their physics was not finite",
    label="invalid", write=compact,
)  # fmt: skip
_define("robot/restarted", "episodes", "episodes that started again because their environment was lost with its worker")
STEPS_PER_CPU_S = _define(
    "robot/steps_per_cpu_s", "steps/s", "control steps of all worlds per second of CPU time in simulation",
    label="steps/s", write=compact,
)  # fmt: skip
SIMULATION_CPU = _define("robot/simulation_cpu_s", "s", "CPU time of the chunks of this iteration")
REPEATED_CHUNKS = _define("robot/repeated_chunks", "chunks", "chunks computed again because their worker was lost")
ROLLOUT_TIME = _define("time_rollout_s", "s", "generating; may overlap with training and scoring")
TRAIN_TIME = _define("time_train_s", "s", "forward, backward and optimizer")
TRAIN_CPU = _define("cpu_train_s", "s", "of that, CPU time of the trainer's thread")
CRITIC_WAIT = _define("time_critic_wait_s", "s", "waiting for a critic in a separate process")
_define(
    "time_publish_logprobs_s", "s",
    "the new version's logprobs of tokens in flight; only with algorithm.correction.kind mu_step",
)  # fmt: skip
SCORE_TIME = _define("time_score_s", "s", "waiting for rewards while nothing else ran")
_define("tokens_read_ahead", "tokens", "read by reward models and the reference during generation (reading.ahead)")
_define("tokens_read_late", "tokens", "read by them after their samples were finished")
TOKEN_ACCURACY = _define(
    "token_accuracy", "", "sft: share of trained tokens that the model ranks first", label="accuracy"
)
PAIRWISE_ACCURACY = _define(
    "pairwise_accuracy", "", "share of preference pairs whose chosen side the model ranks first", label="accuracy"
)
_define("score_margin", "", "reward model: mean score of the chosen sides minus that of the rejected sides")
_define("score_mean", "", "reward model: mean score of both sides")
_define("reward_margin", "", "dpo: reward of the chosen side minus reward of the rejected side")
_define("reward_chosen", "", "dpo: reward of the chosen side, β times its log-ratio of policy to reference")
_define("reward_rejected", "", "dpo: reward of the rejected side")
EXAMPLES = _define("examples", "examples", "demonstrations or preference pairs of the optimizer step")
_define("epoch", "", "pass over the examples, from 1")
HELD_OUT_LOSS = _define(
    "eval/loss", "", "loss on held-out examples; the metrics above also have an eval/ variant there",
    label="held-out loss",
)  # fmt: skip
EVAL_TIME = _define("time_eval_s", "s", "evaluating after this step")
STEP_TIME = _define("time_step_s", "s", "wall time of the step without evaluation and checkpoints")
TOKENS_PER_S = _define(
    "tokens_per_s", "tokens/s", "completion tokens generated per second of rollout", label="tok/s", write=compact
)
_define("evictions", "machines", "preemptible machines evicted since the previous step")
_define("crashes", "workers", "preemptible workers that raised an error since the previous step")
_define("migrations", "samples", "samples that continued on another worker since the previous step")
_define(
    "tokens_lost", "tokens",
    "estimate of tokens generated but never received from evicted or crashed workers, since the previous step",
)  # fmt: skip
TOKENS_RECOMPUTED = _define(
    "tokens_recomputed", "tokens", "tokens of migrated samples that their next worker computed again"
)
_define(
    "workers_mean", "workers", "preemptible workers that served the step or pulled its weights, mean over its rollout"
)
_define(
    "seed_window_s", "s", "planned time for the reserved side to generate alongside preemptible workers in this step"
)
_define("tokens_discarded", "tokens", "tokens of restarted samples and of dropped, redrawn or returned groups")
_define("samples_restarted", "samples", "samples restarted because they exceeded max_policy_lag or would have")
_define("groups_dropped", "groups", "groups dropped because they would have exceeded max_policy_lag")
_define("groups_redrawn", "groups", "groups replaced because all their rewards were equal (algorithm.dynamic_sampling)")
_define(
    "groups_returned", "groups",
    "groups of the step's round that are not in the batch and start again in a later round "
    '(schedule.tail = "batching"); 0 in a long round',
)  # fmt: skip
_define(
    "prompts_waiting", "prompts", 'prompts that wait for a long round (schedule.tail = "batching"), after this step'
)
TRAINER_IDLE = _define("time_trainer_idle_s", "s", "the trainer had no groups to train on")
_define("time_trainer_wait_s", "s", "of that, while the reserved side was not generating either")
_define("time_remote_wait_s", "s", "idle time of preemptible workers, mean over workers")
CONTROLLER_CPU = _define("cpu_controller_s", "s", "CPU time of the controller's thread since the previous line")
STEP_CPU = _define(
    "cpu_step_s",
    "s",
    "CPU time of everything since the previous line: the run's process with all its threads; on Ray "
    "the controller, the trainer's thread and the workers",
)
PEAK_RSS = _define("peak_rss_bytes", "bytes", "largest resident memory of the process so far")


def mismatches(rows: Iterable[Mapping[str, float]]) -> dict[str, tuple[float, float]]:
    """(mean KL in nats per token, tokens) by engine, and by engine and worker, over the metrics of several steps."""
    sums = dict[str, tuple[float, float]]()
    for row in rows:
        for metric, kl in row.items():
            name = metric.removeprefix(MISMATCH_OF)
            if name != metric:
                tokens, total = row.get(MISMATCH_TOKENS_OF + name, 0.0), sums.get(name, (0.0, 0.0))
                sums[name] = total[0] + kl * tokens, total[1] + tokens
    return {name: (kl / tokens, tokens) for name, (kl, tokens) in sums.items() if tokens}


def held_out_prefix(name: str) -> str:
    """Prefix of the metrics of one evaluation: `eval/`, or `eval/NAME/` for a set of `eval.sets`."""
    return HELD_OUT if name == HELD_OUT_NAME else f"{HELD_OUT}{name}/"


class Chart(NamedTuple):
    """One curve of the report, or several that share an axis. `band` is drawn around the first series."""

    title: str
    note: str
    series: Mapping[str, str]  # label by metric
    band: str = ""  # metric: half the band's height
    kind: Literal["line", "points", "stacked"] = "line"
    low: float | None = 0
    high: float | None = None
    scale: float = 1.0  # plotted value = metric * scale
    group: str = "Other"


FORECAST_STEP = "forecast/step_s"
FORECAST_HALF = "forecast/half_s"
"""Added by the report to the metrics of steps that were forecast."""

_CHARTS = (
    Chart("Held-out accuracy", "greedy completions", {GREEDY_ACCURACY: "accuracy"}, kind="points", high=1),
    Chart(
        "Held-out reward",
        "mean, greedy completions",
        {HELD_OUT_REWARD: "mean", DRAWN_REWARD: "drawn samples"},
        kind="points",
        low=None,
    ),
    Chart("Reward", "mean ± standard deviation", {REWARD_MEAN: "mean"}, band=REWARD_STD, low=None),
    Chart("Standard error", "of the held-out reward", {"eval/reward_stderr": "error"}, kind="points"),
    Chart("Held-out prompts", "evaluated", {"eval/n": "prompts"}, kind="points"),
    Chart("Turns and calls", "mean of an episode", {TURNS_MEAN: "turns", "calls_mean": "calls"}),
    Chart(
        "Ends of episodes",
        "% of episodes",
        {name: end for end, name in EPISODE_ENDS.items()},
        kind="stacked",
        scale=100,
    ),
    Chart("Answers of environments", "seconds a turn", {"time_env_answer_s": "mean"}),
    Chart("Mistakes of agents", "calls per step", {ENV_MISTAKES: "mistakes", ENV_TIMEOUTS: "timeouts"}),
    Chart(
        "Environment faults",
        "per step",
        {ENV_RETRIES: "retries", ENV_FAILURES: "failures", ENV_FAULTS: "episodes left out"},
    ),
    Chart("Calls of environments", "per step", {ENV_CALLS: "calls"}),
    Chart("Changed observations", "per step", {"env_cut": "cut", "env_cleaned": "cleaned"}),
    Chart("Success and falls", "% of episodes", {SUCCESS: "success", FALLS: "falls"}, high=100, scale=100),
    Chart("Episode return", "mean", {RETURN_MEAN: "return"}, low=None),
    Chart("Episode length", "control steps", {"robot/length_mean": "mean"}),
    Chart("Episodes", "per iteration", {"robot/episodes": "episodes"}),
    Chart("Action noise", "standard deviation", {"robot/action_std": "mean over actions"}),
    Chart("Simulation speed", "control steps per CPU second", {STEPS_PER_CPU_S: "speed"}),
    Chart("Simulation", "CPU seconds per iteration", {SIMULATION_CPU: "chunks"}),
    Chart(
        "Faults of chunks",
        "per iteration",
        {REPEATED_CHUNKS: "chunks repeated", INVALID_WORLDS: "worlds reset", "robot/restarted": "episodes restarted"},
    ),
    Chart("Loss", "mean", {HELD_OUT_LOSS: "held-out", LOSS: "training"}, low=None),
    Chart("Token accuracy", "share", {HELD_OUT + TOKEN_ACCURACY: "held-out", TOKEN_ACCURACY: "training"}, high=1),
    Chart(
        "Pairwise accuracy", "share", {HELD_OUT + PAIRWISE_ACCURACY: "held-out", PAIRWISE_ACCURACY: "training"}, high=1
    ),
    Chart(
        "DPO rewards",
        "β times the log-ratio to the reference",
        {"reward_margin": "margin", "reward_chosen": "chosen", "reward_rejected": "rejected"},
        low=None,
    ),
    Chart("Reward model scores", "", {"score_margin": "margin", "score_mean": "mean"}, low=None),
    Chart("Examples", "per step", {EXAMPLES: "examples"}),
    Chart("Epoch", "pass over the examples", {"epoch": "epoch"}),
    Chart("Entropy", "nats per token or action", {ENTROPY: "entropy"}, low=None),
    Chart("KL", "nats per token or action", {APPROX_KL: "of the update", KL_REF: "to reference"}),
    Chart("KL to reference, k1", "nats per token", {"kl_ref_k1": "log-ratio"}, low=None),
    Chart("KL coefficient", "", {"kl_beta": "beta"}),
    Chart("Clip fraction", "% of tokens or actions", {CLIP_FRACTION: "clipped"}, scale=100),
    Chart("Gradient norm", "before clipping", {GRAD_NORM: "norm"}),
    Chart("Learning rate", "", {LEARNING_RATE: "rate"}),
    Chart(
        "Skipped updates",
        "per step",
        {"minibatches_dropped": "minibatches, kl_stop", UPDATES_SKIPPED: "optimizer steps, not finite"},
    ),
    Chart("Completion length", "tokens", {LENGTH_MEAN: "mean", LENGTH_MAX: "longest"}),
    Chart("Truncated", "% of samples", {TRUNCATED: "truncated"}, scale=100),
    Chart(
        "No signal or invalid",
        "per step",
        {
            NO_SIGNAL: "groups without signal",
            "groups_skipped_invalid": "groups invalid",
            SAMPLES_INVALID: "samples invalid",
        },
    ),
    Chart("Samples of the batch", "per step", {"samples": "all", "samples_left_out": "left out"}),
    Chart(
        "Restarted and dropped",
        "per step",
        {
            "samples_restarted": "samples restarted, too old",
            "groups_dropped": "groups dropped, too old",
            "groups_redrawn": "groups redrawn, no signal",
            "groups_returned": "groups returned, in a later round",
        },
    ),
    Chart("Tail batching", "prompts", {"prompts_waiting": "wait for a long round"}),
    Chart(
        "Engine and trainer mismatch",
        "KL, nats per token",
        {MISMATCH_KL: "all tokens", MISMATCH_KL_KEPT_CACHE: "on kept caches"},
    ),
    Chart("Tokens from kept caches", "% of tokens", {"kept_cache_fraction": "share"}, scale=100),
    Chart("Importance ratio", "", {"ratio_mean": "mean", "ratio_max": "largest"}, low=None),
    Chart("Variance of the ratio", "", {"ratio_var": "variance"}),
    Chart("Effective sample size", "share", {"effective_sample_size": "share"}, high=1),
    Chart(
        "Importance correction",
        "% of tokens",
        {"correction_masked": "masked", "correction_truncated": "truncated"},
        scale=100,
    ),
    Chart("Policy lag", "versions", {"policy_lag_mean": "mean", "policy_lag_max": "largest"}),
    Chart("Value loss", "", {"value_loss": "loss"}),
    Chart("Explained variance", "share", {"explained_variance": "share"}, high=1, low=None),
    Chart("Critic's clip fraction", "% of tokens", {"value_clip_fraction": "clipped"}, scale=100),
    Chart("Critic's gradient norm", "before clipping", {"value_grad_norm": "norm"}),
    Chart("Return", "mean", {"returns_mean": "return"}, low=None),
    Chart(
        "Time per step",
        "seconds",
        {ROLLOUT_TIME: "rollout", TRAIN_TIME: "training", SCORE_TIME: "scoring", EVAL_TIME: "evaluation"},
        kind="stacked",
    ),
    Chart(
        "Step time",
        "seconds",
        {FORECAST_STEP: "forecast", STEP_TIME: "actual"},
        band=FORECAST_HALF,
    ),
    Chart(
        "Idle side",
        "seconds per step",
        {"time_trainer_wait_s": "trainer", "time_remote_wait_s": "workers", "seed_window_s": "seeding window"},
    ),
    Chart("Trainer waiting", "seconds per step", {TRAINER_IDLE: "for samples", CRITIC_WAIT: "for its critic"}),
    Chart("Logprobs at publish", "seconds", {"time_publish_logprobs_s": "samples in flight"}),
    Chart("CPU time", "seconds per step", {STEP_CPU: "all", TRAIN_CPU: "training", CONTROLLER_CPU: "controller"}),
    Chart("Generation speed", "tokens per second", {TOKENS_PER_S: "speed"}),
    Chart("Tokens of the batch", "per step", {TOKENS_GENERATED: "generated", TOKENS_TRAINED: "trained"}),
    Chart("Size of the attention", "pairs of tokens per step", {"pairs_packed": "pairs"}),
    Chart("Prompt tokens", "per step", {"prompt_tokens_computed": "computed", "prompt_tokens_reused": "reused"}),
    Chart(
        "Trained tokens",
        "per step, prompts included",
        {"tokens_packed": "shared prefixes once", "tokens_unpacked": "without sharing"},
    ),
    Chart(
        "Read by reward models and reference",
        "tokens",
        {"tokens_read_ahead": "during generation", "tokens_read_late": "afterwards"},
    ),
    Chart("Peak memory", "GB", {PEAK_RSS: "memory"}, scale=1e-09),
    Chart("Preemptible workers", "mean", {"workers_mean": "workers"}),
    Chart(
        "Evictions",
        "per step",
        {"evictions": "machines evicted", "crashes": "workers crashed", "migrations": "samples migrated"},
    ),
    Chart(
        "Lost and recomputed",
        "tokens per step",
        {"tokens_lost": "lost", TOKENS_RECOMPUTED: "recomputed", "tokens_discarded": "discarded"},
    ),
    Chart(
        "Recovered from earlier sessions",
        "tokens",
        {"tokens_recovered": "recovered", "tokens_other_weights": "of other weights"},
    ),
    Chart("Outdated messages", "per step", {"deltas_ignored": "ignored"}),
)
_GROUPS = {
    "Held-out accuracy": "Reward", "Turns and calls": "Agents",
    "Success and falls": "Episodes", "Loss": "Loss", "Entropy": "Policy",
    "Completion length": "Samples", "Engine and trainer mismatch": "Off-policy", "Value loss": "Critic",
    "Time per step": "Time", "Generation speed": "Tokens", "Preemptible workers": "Fleet",
}  # fmt: skip
"""Group by its first chart."""


def _grouped(charts: Iterable[Chart]) -> Iterable[Chart]:
    group = ""
    for chart in charts:
        group = _GROUPS.get(chart.title, group)
        yield chart._replace(group=group)


CHARTS = tuple(_grouped(_CHARTS))
"""The charts of runs by group, in page order; every metric is in one."""

HEADER = ("step", "policy_version", "weights_digest", "optimizer_steps", "time", "session", "elapsed_s")


class MetricLine(NamedTuple):
    """One line of metrics.jsonl."""

    step: int
    policy_version: int
    weights_digest: str
    optimizer_steps: int
    session: int
    elapsed_s: float
    values: Mapping[str, float]


def metric_line(
    metrics: StepMetrics, values: dict[str, float], *, unix_s: float, session: int, elapsed_s: float
) -> dict[str, Any]:
    """A flat object, so that any table reader can load the file."""
    return {
        "step": metrics.step,
        "policy_version": metrics.version.number,
        "weights_digest": metrics.version.digest,
        "optimizer_steps": metrics.optimizer_steps,
        "time": timestamp(unix_s),
        "session": session,
        "elapsed_s": round(elapsed_s, 3),
        **values,
    }


def parse_metrics(line: Mapping[str, Any]) -> MetricLine | None:
    """None for a line without a step."""
    step = line.get("step")
    if not isinstance(step, int) or finite_number(step) is None:
        return None
    return MetricLine(
        step=step,
        policy_version=int(finite_number(line.get("policy_version")) or 0),
        weights_digest=str(line.get("weights_digest") or ""),
        optimizer_steps=int(finite_number(line.get("optimizer_steps")) or 0),
        session=int(finite_number(line.get("session")) or 0),
        elapsed_s=finite_number(line.get("elapsed_s")) or 0.0,
        values={
            name: number
            for name, value in line.items()
            if (number := finite_number(value)) is not None and name not in HEADER
        },
    )


def read_metrics(path: Path) -> list[MetricLine]:
    """Every complete line that has a step, by step; the last line of a step counts."""
    lines = (parse_metrics(line) for _, line in read_lines(path))
    by_step = {line.step: line for line in lines if line is not None}
    return [by_step[step] for step in sorted(by_step)]
