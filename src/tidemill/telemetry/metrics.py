"""The registry of metrics: name, unit, meaning, terminal label and chart of each; and the lines of metrics.jsonl.

Charts, terminal views, findings and the tables of docs/metrics.md are derived from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, get_args

from tidemill.core.formatting import compact, decimal, percent
from tidemill.core.records import EpisodeEnd, Record, StepMetrics
from tidemill.telemetry.events import timestamp
from tidemill.telemetry.jsonl import finite_number, read_lines


class Metric(NamedTuple):
    """A number of a step. An empty unit is a plain ratio or score."""

    unit: str
    meaning: str
    label: str  # in the terminal; empty: not shown there
    write: Callable[[float], str]  # how the terminal writes it


METRICS: dict[str, Metric] = {}
"""Every metric this project writes, besides those of a `..._OF`, `COMPONENT` or `LAG` prefix.

Other names are stored and reported, too, with a chart each.
"""


def _define(name: str, unit: str, meaning: str, *, label: str = "", write: Callable[[float], str] = decimal) -> str:
    METRICS[name] = Metric(unit, meaning, label, write)
    return name


REWARD_MEAN: Final = _define("reward_mean", "", "mean reward of the batch's valid samples", label="reward")
REWARD_STD: Final = _define("reward_std", "", "standard deviation of those rewards")
COMPONENT: Final = "reward/"
"""Prefix of the mean of each of several rewards."""
HELD_OUT: Final = "eval/"
"""Prefix of metrics of held-out prompts or examples."""
HELD_OUT_NAME: Final = "held_out"
"""Name of the evaluation of the task's own held-out prompts, beside those of `eval.sets`."""
PASS_AT: Final = "pass_at_"
"""Follows the prefix in the name of pass@k, for each k."""
HELD_OUT_REWARD: Final = _define(
    "eval/reward_mean", "", "mean valid reward of greedy completions of held-out prompts, after this step",
    label="held-out reward",
)  # fmt: skip
HELD_OUT_STDERR: Final = _define("eval/reward_stderr", "", "standard error of that mean, over prompts")
GREEDY_ACCURACY: Final = _define(
    "eval/greedy_accuracy", "", "share of those completions that are correct; only for rewards that define correctness",
    label="held-out accuracy",
)  # fmt: skip
DRAWN_REWARD: Final = _define(
    "eval/drawn_reward_mean", "", "mean valid reward of eval.samples_per_prompt drawn samples, mean over prompts"
)
HELD_OUT_COUNT: Final = _define("eval/n", "prompts", "held-out prompts of that evaluation")
ENTROPY: Final = _define(
    "entropy", "nats", "mean entropy of the policy's next-token distribution over trained tokens", label="entropy"
)
KL_REF: Final = _define(
    "kl_ref", "nats/token", "k3 estimate of KL(policy ‖ reference); only with algorithm.kl_beta > 0", label="KL"
)
KL_REF_K1: Final = _define(
    "kl_ref_k1", "nats/token", "k1 estimate of the same, mean log(policy / reference): not dominated by rare tokens"
)
KL_BETA: Final = _define("kl_beta", "", "KL coefficient of the batch; constant without algorithm.kl_target")
APPROX_KL: Final = _define(
    "approx_kl", "nats/token", "k3 estimate of KL between the policy before and after the update", label="KL"
)
CLIP_FRACTION: Final = _define(
    "clip_fraction", "", "share of trained tokens whose importance ratio was clipped", label="clipped", write=percent
)
LENGTH_MEAN: Final = _define(
    "completion_tokens_mean", "tokens", "mean number of generated tokens of a sample", label="length", write=compact
)
LENGTH_MAX: Final = _define("completion_tokens_max", "tokens", "generated tokens of the longest sample", write=compact)
TRUNCATED: Final = _define(
    "truncated_fraction", "", "share of completions cut at max_new_tokens or the context length", write=percent
)
NO_SIGNAL: Final = _define(
    "groups_without_signal", "groups", "groups skipped because all their advantages are 0",
    label="no signal", write=compact,
)  # fmt: skip
GROUPS_INVALID: Final = _define(
    "groups_skipped_invalid", "groups", "groups skipped because fewer than two of their samples were valid"
)
SAMPLES_INVALID: Final = _define(
    "samples_invalid", "samples", "samples excluded because their reward raised, timed out or was not a number",
    label="invalid", write=compact,
)  # fmt: skip
SAMPLES: Final = _define("samples", "samples", "completions of the batch")
SAMPLES_LEFT_OUT: Final = _define(
    "samples_left_out", "samples", "completions of weight 0: invalid, or truncated and masked"
)
TURNS_MEAN: Final = _define("turns_mean", "turns", "turns of an agent's episode, mean over the batch", label="turns")
CALLS_MEAN: Final = _define("calls_mean", "calls", "tool calls of an agent's episode, mean over the batch")
EPISODE_ENDS = {
    end: _define(f"episodes_ended/{end}", "", f"share of the batch's episodes whose `episode_end` is `{end}`")
    for end in get_args(EpisodeEnd)
    if end
}
BUDGETS: Final[dict[str, str]] = {
    "tokens": "sampling.max_new_tokens",
    "context": "engine.context_tokens",
    "turns": "env.turns",
    "calls": "env.calls",
    "seconds": "env.seconds",
}
"""The key of each budget of an episode, by `EpisodeEnd`."""
ENV_ANSWER_TIME: Final = _define(
    "time_env_answer_s", "s", "time from the end of a turn to its environment's answer, mean over turns"
)
ENV_CALLS: Final = _define(
    "env_calls",
    "calls",
    "steps, tool calls and scores that environments made since the previous step, evaluations included",
)
ENV_MISTAKES: Final = _define(
    "env_mistakes",
    "calls",
    "exceptions in them, and tool calls that were not made (unknown tool, wrong arguments): the agent sees both",
)
ENV_TIMEOUTS: Final = _define("env_timeouts", "calls", "of these, calls past their deadline")
ENV_CUT: Final = _define("env_cut", "observations", "observations longer than env.observation_tokens, which were cut")
ENV_CLEANED: Final = _define(
    "env_cleaned",
    "observations",
    "observations with NUL, lone surrogates or characters unknown to the model, which were replaced or left out",
)
ENV_RETRIES: Final = _define("env_retries", "calls", "attempts repeated because the environment's process was lost")
ENV_FAILURES: Final = _define(
    "env_failures", "episodes", "episodes that broke their environment and got failure_reward"
)
ENV_FAULTS: Final = _define(
    "env_faults", "episodes", "episodes left out of their group because of a fault of the environment",
    label="faults", write=compact,
)  # fmt: skip
TOKENS_GENERATED: Final = _define("tokens_generated", "tokens", "completion tokens of this batch")
TOKENS_RECOVERED: Final = _define("tokens_recovered", "tokens", "of these, tokens generated in an earlier session")
TOKENS_OTHER_WEIGHTS: Final = _define(
    "tokens_other_weights", "tokens", "of these, tokens from weights with this version's number but another digest"
)
DELTAS_IGNORED: Final = _define(
    "deltas_ignored", "messages", "token deltas ignored because their lease, attempt or position was outdated"
)
TOKENS_TRAINED: Final = _define("tokens_trained", "tokens", "completion tokens that carried loss, once per epoch")
TOKENS_PACKED: Final = _define(
    "tokens_packed", "tokens", "tokens of the forward and backward passes, shared prefixes once"
)
PAIRS_PACKED: Final = _define(
    "pairs_packed", "pairs", "sum over passes of the squared number of tokens: the size of the attention"
)
TOKENS_UNPACKED: Final = _define("tokens_unpacked", "tokens", "tokens of those passes without shared prefixes")
UPDATES_SKIPPED: Final = _define(
    "optimizer_steps_skipped", "steps", "optimizer steps skipped because the gradient was not finite",
    label="updates skipped", write=compact,
)  # fmt: skip
MINIBATCHES_DROPPED: Final = _define(
    "minibatches_dropped", "minibatches", "not trained on because the policy had moved past algorithm.kl_stop"
)
PROMPT_TOKENS_COMPUTED: Final = _define(
    "prompt_tokens_computed", "tokens", "prompt tokens the engine computed for this batch"
)
PROMPT_TOKENS_REUSED: Final = _define(
    "prompt_tokens_reused", "tokens", "prompt tokens served from a shared prefix instead of being computed"
)
LOSS: Final = _define("loss", "", "the objective minimised, mean over the batch's optimizer steps", label="loss")
GRAD_NORM: Final = _define(
    "grad_norm", "", "global gradient norm before clipping, mean over optimizer steps", label="gradient"
)
LEARNING_RATE: Final = _define("learning_rate", "", "learning rate of the last optimizer step", label="rate")
MISMATCH_KL: Final = _define(
    "mismatch_kl", "nats/token", "k3 estimate of KL between the engine's and the trainer's logprobs of the same tokens"
)
MISMATCH_OF: Final = "mismatch_kl/"
"""Prefix of the mismatch of an engine ("vllm"), and of an engine's worker ("vllm/spot-3")."""
MISMATCH_TOKENS_OF: Final = "mismatch_tokens/"
"""Prefix of the number of tokens in that mean."""
RATIO_MEAN: Final = _define("ratio_mean", "", "mean importance ratio over trained tokens")
RATIO_VAR: Final = _define("ratio_var", "", "variance of the importance ratio")
RATIO_MAX: Final = _define("ratio_max", "", "largest importance ratio")
CORRECTION_TRUNCATED: Final = _define(
    "correction_truncated", "", "share of trained tokens whose weight algorithm.correction truncated"
)
CORRECTION_MASKED: Final = _define("correction_masked", "", "share of trained tokens that algorithm.correction masked")
LAG_MEAN: Final = _define(
    "policy_lag_mean",
    "versions",
    "trainer's version minus the version that generated a trained token, mean over tokens",
)
LAG_MAX: Final = _define("policy_lag_max", "versions", "the largest such lag")
LAG: Final = "lag/"
"""Prefix of the share of trained tokens of each lag."""
VALUE_LOSS: Final = _define(
    "value_loss", "", "the critic's loss, normalised as the policy's, mean over its optimizer steps"
)
VALUE_CLIP_FRACTION: Final = _define(
    "value_clip_fraction", "", "share of tokens whose value moved beyond critic.value_clip"
)
VALUE_GRAD_NORM: Final = _define(
    "value_grad_norm", "", "global gradient norm of the critic's parameters before clipping"
)
EXPLAINED_VARIANCE: Final = _define(
    "explained_variance", "", "1 - Var(return - value) / Var(return) before the update: 1 is a perfect critic"
)
RETURNS_MEAN: Final = _define("returns_mean", "", "mean return the critic was trained on")
EFFECTIVE_SAMPLE_SIZE: Final = _define(
    "effective_sample_size", "", "(Σw)² / (n Σw²) of the importance ratios: 1 is fully on policy"
)
ROLLOUT_TIME: Final = _define("time_rollout_s", "s", "generating; may overlap with training and scoring")
TRAIN_TIME: Final = _define("time_train_s", "s", "forward, backward and optimizer")
TRAIN_CPU: Final = _define("cpu_train_s", "s", "of that, CPU time of the trainer's thread")
CRITIC_WAIT: Final = _define("time_critic_wait_s", "s", "waiting for a critic in a separate process")
PUBLISH_LOGPROBS_TIME: Final = _define(
    "time_publish_logprobs_s", "s",
    "the new version's logprobs of tokens in flight; only with algorithm.correction.kind mu_step",
)  # fmt: skip
SCORE_TIME: Final = _define("time_score_s", "s", "waiting for rewards while nothing else ran")
TOKENS_READ_AHEAD: Final = _define(
    "tokens_read_ahead", "tokens", "read by reward models and the reference during generation (reading.ahead)"
)
TOKENS_READ_LATE: Final = _define("tokens_read_late", "tokens", "read by them after their samples were finished")
TOKEN_ACCURACY: Final = _define(
    "token_accuracy", "", "sft: share of trained tokens that the model ranks first", label="accuracy"
)
PAIRWISE_ACCURACY: Final = _define(
    "pairwise_accuracy", "", "share of preference pairs whose chosen side the model ranks first", label="accuracy"
)
SCORE_MARGIN: Final = _define(
    "score_margin", "", "reward model: mean score of the chosen sides minus that of the rejected sides"
)
SCORE_MEAN: Final = _define("score_mean", "", "reward model: mean score of both sides")
REWARD_MARGIN: Final = _define("reward_margin", "", "dpo: reward of the chosen side minus reward of the rejected side")
REWARD_CHOSEN: Final = _define(
    "reward_chosen", "", "dpo: reward of the chosen side, β times its log-ratio of policy to reference"
)
REWARD_REJECTED: Final = _define("reward_rejected", "", "dpo: reward of the rejected side")
EXAMPLES: Final = _define("examples", "examples", "demonstrations or preference pairs of the optimizer step")
EPOCH: Final = _define("epoch", "", "pass over the examples, from 1")
HELD_OUT_LOSS: Final = _define(
    "eval/loss", "", "loss on held-out examples; the metrics above also have an eval/ variant there",
    label="held-out loss",
)  # fmt: skip
EVAL_TIME: Final = _define("time_eval_s", "s", "evaluating after this step")
STEP_TIME: Final = _define("time_step_s", "s", "wall time of the step without evaluation and checkpoints")
TOKENS_PER_S: Final = _define(
    "tokens_per_s", "tokens/s", "completion tokens generated per second of rollout", label="tok/s", write=compact
)
EVICTIONS: Final = _define("evictions", "machines", "preemptible machines evicted since the previous step")
CRASHES: Final = _define("crashes", "workers", "preemptible workers that raised an error since the previous step")
MIGRATIONS: Final = _define("migrations", "samples", "samples that continued on another worker since the previous step")
TOKENS_LOST: Final = _define(
    "tokens_lost", "tokens",
    "estimate of tokens generated but never received from evicted or crashed workers, since the previous step",
)  # fmt: skip
TOKENS_RECOMPUTED: Final = _define(
    "tokens_recomputed", "tokens", "tokens of migrated samples that their next worker computed again"
)
WORKERS_MEAN: Final = _define(
    "workers_mean", "workers", "preemptible workers that served the step or pulled its weights, mean over its rollout"
)
SEED_WINDOW: Final = _define(
    "seed_window_s", "s", "planned time for the reserved side to generate alongside preemptible workers in this step"
)
TOKENS_DISCARDED: Final = _define(
    "tokens_discarded", "tokens", "tokens of restarted samples and of dropped or redrawn groups"
)
SAMPLES_RESTARTED: Final = _define(
    "samples_restarted", "samples", "samples restarted because they exceeded max_policy_lag or would have"
)
GROUPS_DROPPED: Final = _define(
    "groups_dropped", "groups", "groups dropped because they would have exceeded max_policy_lag"
)
GROUPS_REDRAWN: Final = _define(
    "groups_redrawn", "groups", "groups replaced because all their rewards were equal (algorithm.dynamic_sampling)"
)
TRAINER_IDLE: Final = _define("time_trainer_idle_s", "s", "the trainer had no groups to train on")
TRAINER_WAIT: Final = _define("time_trainer_wait_s", "s", "of that, while the reserved side was not generating either")
REMOTE_WAIT: Final = _define("time_remote_wait_s", "s", "idle time of preemptible workers, mean over workers")
CONTROLLER_CPU: Final = _define("cpu_controller_s", "s", "CPU time of the controller's thread since the previous line")
STEP_CPU: Final = _define(
    "cpu_step_s",
    "s",
    "CPU time of everything since the previous line: the run's process with all its threads; on Ray "
    "the controller, the trainer's thread and the workers",
)
PEAK_RSS: Final = _define("peak_rss_bytes", "bytes", "largest resident memory of the process so far")


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


class Chart(Record):
    """One curve of the report, or several that share an axis. `band` is drawn around the first series."""

    title: str
    note: str
    series: tuple[tuple[str, str], ...]  # (metric, label)
    band: str = ""  # metric: half the band's height
    kind: Literal["line", "points", "stacked"] = "line"
    low: float | None = 0
    high: float | None = None
    scale: float = 1.0  # plotted value = metric * scale
    only_if_any: bool = False  # omitted while all values are 0
    only_with: str = ""  # metric: omitted if it was never measured


FORECAST_STEP: Final = "forecast/step_s"
FORECAST_HALF: Final = "forecast/half_s"
"""Added by the report to the metrics of steps that were forecast."""

CHARTS: tuple[Chart, ...] = (
    Chart(
        title="Held-out accuracy",
        note="greedy completions",
        series=((GREEDY_ACCURACY, "accuracy"),),
        kind="points",
        high=1,
    ),
    Chart(
        title="Held-out reward",
        note="mean, greedy completions",
        series=((HELD_OUT_REWARD, "mean"), (DRAWN_REWARD, "drawn samples")),
        kind="points",
        low=None,
    ),
    Chart(title="Reward", note="mean ± standard deviation", series=((REWARD_MEAN, "mean"),), band=REWARD_STD, low=None),
    Chart(title="Turns and calls", note="mean of an episode", series=((TURNS_MEAN, "turns"), (CALLS_MEAN, "calls"))),
    Chart(
        title="Ends of episodes",
        note="% of episodes",
        series=tuple((name, end) for end, name in EPISODE_ENDS.items()),
        kind="stacked",
        scale=100,
    ),
    Chart(title="Answers of environments", note="seconds a turn", series=((ENV_ANSWER_TIME, "mean"),)),
    Chart(
        title="Mistakes of agents",
        note="calls per step",
        series=((ENV_MISTAKES, "mistakes"), (ENV_TIMEOUTS, "timeouts")),
        only_if_any=True,
    ),
    Chart(
        title="Environment faults",
        note="per step",
        series=((ENV_RETRIES, "retries"), (ENV_FAILURES, "failures"), (ENV_FAULTS, "episodes left out")),
        only_if_any=True,
    ),
    Chart(
        title="Loss",
        note="mean",
        series=((HELD_OUT_LOSS, "held-out"), (LOSS, "training")),
        only_with=EXAMPLES,
        low=None,
    ),
    Chart(
        title="Token accuracy",
        note="share",
        series=((HELD_OUT + TOKEN_ACCURACY, "held-out"), (TOKEN_ACCURACY, "training")),
        high=1,
    ),
    Chart(
        title="Pairwise accuracy",
        note="share",
        series=((HELD_OUT + PAIRWISE_ACCURACY, "held-out"), (PAIRWISE_ACCURACY, "training")),
        high=1,
    ),
    Chart(title="Entropy", note="nats per token", series=((ENTROPY, "entropy"),)),
    Chart(
        title="DPO rewards",
        note="β times the log-ratio to the reference",
        series=((REWARD_MARGIN, "margin"), (REWARD_CHOSEN, "chosen"), (REWARD_REJECTED, "rejected")),
        low=None,
    ),
    Chart(title="Reward model scores", note="", series=((SCORE_MARGIN, "margin"), (SCORE_MEAN, "mean")), low=None),
    Chart(title="KL", note="nats per token", series=((APPROX_KL, "of the update"), (KL_REF, "to reference"))),
    Chart(title="KL to reference, k1", note="nats per token", series=((KL_REF_K1, "log-ratio"),), low=None),
    Chart(title="Clip fraction", note="% of tokens", series=((CLIP_FRACTION, "clipped"),), scale=100),
    Chart(title="Completion length", note="tokens", series=((LENGTH_MEAN, "mean"), (LENGTH_MAX, "longest"))),
    Chart(title="Truncated", note="% of samples", series=((TRUNCATED, "truncated"),), scale=100),
    Chart(
        title="No signal or invalid",
        note="per step",
        series=(
            (NO_SIGNAL, "groups without signal"),
            (GROUPS_INVALID, "groups invalid"),
            (SAMPLES_INVALID, "samples invalid"),
        ),
    ),
    Chart(title="Gradient norm", note="before clipping", series=((GRAD_NORM, "norm"),)),
    Chart(title="Learning rate", note="", series=((LEARNING_RATE, "rate"),)),
    Chart(
        title="Time per step",
        note="seconds",
        series=(
            (ROLLOUT_TIME, "rollout"),
            (TRAIN_TIME, "training"),
            (SCORE_TIME, "scoring"),
            (EVAL_TIME, "evaluation"),
        ),
        kind="stacked",
    ),
    Chart(
        title="Step time and forecast",
        note="seconds, ± two standard deviations",
        series=((FORECAST_STEP, "forecast"), (STEP_TIME, "actual")),
        band=FORECAST_HALF,
        only_with=FORECAST_STEP,
    ),
    Chart(title="Logprobs at publish", note="seconds", series=((PUBLISH_LOGPROBS_TIME, "samples in flight"),)),
    Chart(
        title="Read by reward models and reference",
        note="tokens",
        series=((TOKENS_READ_AHEAD, "during generation"), (TOKENS_READ_LATE, "afterwards")),
        only_if_any=True,
    ),
    Chart(title="Generation speed", note="tokens per second", series=((TOKENS_PER_S, "speed"),)),
    Chart(title="Engine and trainer mismatch", note="KL, nats per token", series=((MISMATCH_KL, "mismatch"),)),
    Chart(title="Importance ratio", note="", series=((RATIO_MEAN, "mean"), (RATIO_MAX, "largest")), low=None),
    Chart(title="Variance of the ratio", note="", series=((RATIO_VAR, "variance"),)),
    Chart(title="Effective sample size", note="share", series=((EFFECTIVE_SAMPLE_SIZE, "share"),), high=1),
    Chart(
        title="Importance correction",
        note="% of tokens",
        series=((CORRECTION_MASKED, "masked"), (CORRECTION_TRUNCATED, "truncated")),
        scale=100,
        only_if_any=True,
    ),
    Chart(title="Policy lag", note="versions", series=((LAG_MEAN, "mean"), (LAG_MAX, "largest")), only_if_any=True),
    Chart(title="Value loss", note="", series=((VALUE_LOSS, "loss"),)),
    Chart(title="Explained variance", note="share", series=((EXPLAINED_VARIANCE, "share"),), high=1, low=None),
    Chart(title="KL coefficient", note="", series=((KL_BETA, "beta"),), only_if_any=True),
    Chart(
        title="Prompt tokens",
        note="per step",
        series=((PROMPT_TOKENS_COMPUTED, "computed"), (PROMPT_TOKENS_REUSED, "reused")),
    ),
    Chart(
        title="Trained tokens",
        note="per step, prompts included",
        series=((TOKENS_PACKED, "shared prefixes once"), (TOKENS_UNPACKED, "without sharing")),
    ),
    Chart(
        title="Skipped updates",
        note="per step",
        series=((MINIBATCHES_DROPPED, "minibatches, kl_stop"), (UPDATES_SKIPPED, "optimizer steps, not finite")),
        only_if_any=True,
    ),
    Chart(
        title="Recovered from earlier sessions",
        note="tokens",
        series=((TOKENS_RECOVERED, "recovered"), (TOKENS_OTHER_WEIGHTS, "of other weights")),
        only_if_any=True,
    ),
    Chart(title="Outdated messages", note="per step", series=((DELTAS_IGNORED, "ignored"),), only_if_any=True),
    Chart(
        title="Evictions",
        note="per step",
        series=((EVICTIONS, "machines evicted"), (CRASHES, "workers crashed"), (MIGRATIONS, "samples migrated")),
        only_if_any=True,
    ),
    Chart(
        title="Lost and recomputed",
        note="tokens per step",
        series=((TOKENS_LOST, "lost"), (TOKENS_RECOMPUTED, "recomputed"), (TOKENS_DISCARDED, "discarded")),
        only_if_any=True,
    ),
    Chart(
        title="Restarted and dropped",
        note="per step",
        series=(
            (SAMPLES_RESTARTED, "samples restarted, too old"),
            (GROUPS_DROPPED, "groups dropped, too old"),
            (GROUPS_REDRAWN, "groups redrawn, no signal"),
        ),
        only_if_any=True,
    ),
    Chart(title="Preemptible workers", note="mean", series=((WORKERS_MEAN, "workers"),), only_if_any=True),
    Chart(
        title="Idle side",
        note="seconds per step",
        series=((TRAINER_WAIT, "trainer"), (REMOTE_WAIT, "workers"), (SEED_WINDOW, "seeding window")),
        only_if_any=True,
    ),
    Chart(
        title="Trainer waiting",
        note="seconds per step",
        series=((TRAINER_IDLE, "for samples"), (CRITIC_WAIT, "for its critic")),
        only_if_any=True,
    ),
    Chart(title="Peak memory", note="GB", series=((PEAK_RSS, "memory"),), scale=1e-09),
)
"""The charts of the report, in page order. A metric in no chart is not drawn."""

HEADER = ("step", "policy_version", "weights_digest", "optimizer_steps", "time", "session", "elapsed_s")


class MetricLine(NamedTuple):
    """One line of metrics.jsonl."""

    step: int
    policy_version: int
    weights_digest: str
    optimizer_steps: int
    session: int
    elapsed_s: float
    values: dict[str, float]


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


def read_metrics(path: Path) -> list[MetricLine]:
    """Every complete line that has a step, by step; the last line of a step counts."""
    by_step: dict[int, MetricLine] = {}
    for _, line in read_lines(path):
        if not isinstance(line.get("step"), int) or finite_number(line["step"]) is None:
            continue
        by_step[line["step"]] = MetricLine(
            step=line["step"],
            policy_version=int(finite_number(line.get("policy_version")) or 0),
            weights_digest=str(line.get("weights_digest") or ""),
            optimizer_steps=int(finite_number(line.get("optimizer_steps")) or 0),
            session=int(finite_number(line.get("session")) or 0),
            elapsed_s=finite_number(line.get("elapsed_s")) or 0.0,
            values={
                name: number
                for name, value in line.items()
                if name not in HEADER and (number := finite_number(value)) is not None
            },
        )
    return [by_step[step] for step in sorted(by_step)]
