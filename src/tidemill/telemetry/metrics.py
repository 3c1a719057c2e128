"""The metrics of a step: their names, units and meanings, and their lines in metrics.jsonl."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, NamedTuple

from tidemill.core.records import StepMetrics
from tidemill.telemetry.events import EVENTS, timestamp
from tidemill.telemetry.jsonl import finite_number, read_lines


class Metric(NamedTuple):
    """What a number means. An empty unit is a plain ratio or score."""

    unit: str
    meaning: str


HELD_OUT: Final = "eval/"
"""Before a metric's name: of examples that are held out."""
HELD_OUT_REWARD: Final = "eval/reward_mean"
HELD_OUT_STDERR: Final = "eval/reward_stderr"
GREEDY_ACCURACY: Final = "eval/greedy_accuracy"
HELD_OUT_LOSS: Final = "eval/loss"
PEAK_RSS: Final = "peak_rss_bytes"
CONTROLLER_CPU: Final = "cpu_controller_s"
STEP_TIME: Final = "time_step_s"
EVICTIONS: Final = "evictions"
CRASHES: Final = "crashes"
MIGRATIONS: Final = "migrations"
TOKENS_LOST: Final = "tokens_lost"
TOKENS_RECOMPUTED: Final = "tokens_recomputed"
WORKERS_MEAN: Final = "workers_mean"
SEED_WINDOW: Final = "seed_window_s"
TRAINER_IDLE: Final = "time_trainer_idle_s"
TRAINER_WAIT: Final = "time_trainer_wait_s"
CRITIC_WAIT: Final = "time_critic_wait_s"
REMOTE_WAIT: Final = "time_remote_wait_s"

METRICS: dict[str, Metric] = {
    "reward_mean": Metric("", "mean reward of the batch's valid samples"),
    "reward_std": Metric("", "standard deviation of those rewards"),
    HELD_OUT_REWARD: Metric("", "mean valid reward of greedy completions of held-out prompts, after this step"),
    HELD_OUT_STDERR: Metric("", "standard error of that mean, over prompts"),
    GREEDY_ACCURACY: Metric("", "share of those completions that are right; only where answers are right or wrong"),
    "eval/n": Metric("prompts", "held-out prompts of that evaluation"),
    "entropy": Metric("nats", "mean entropy of the policy's next-token distribution over trained tokens"),
    "kl_ref": Metric("nats/token", "k3 estimate of KL(policy ‖ reference); only with algorithm.kl_beta > 0"),
    "kl_ref_k1": Metric("nats/token", "mean log(policy / reference), the same without k3's leaps at a rare token"),
    "kl_beta": Metric("", "the KL coefficient the batch was learned with; it moves where there is a kl_target"),
    "approx_kl": Metric("nats/token", "k3 estimate of how far the update moved the policy from where it began"),
    "clip_fraction": Metric("", "share of trained tokens whose importance ratio was clipped"),
    "completion_tokens_mean": Metric("tokens", "mean completion length"),
    "completion_tokens_max": Metric("tokens", "longest completion"),
    "truncated_fraction": Metric("", "share of completions cut by max_new_tokens"),
    "groups_without_signal": Metric("groups", "groups skipped because all their rewards are equal"),
    "groups_skipped_invalid": Metric("groups", "groups skipped because fewer than two of their samples were valid"),
    "samples_invalid": Metric("samples", "samples left out because their reward raised, timed out or was not a number"),
    "samples": Metric("samples", "completions of the batch"),
    "samples_left_out": Metric("samples", "completions of weight 0: invalid, or cut and masked"),
    "tokens_generated": Metric("tokens", "completion tokens of this batch"),
    "tokens_recovered": Metric("tokens", "of these, tokens an earlier session had generated"),
    "tokens_other_weights": Metric(
        "tokens", "of these, tokens made by weights of this version's number but not digest"
    ),
    "deltas_ignored": Metric("messages", "token deltas refused because their lease, attempt or position was outdated"),
    "tokens_trained": Metric("tokens", "completion tokens that carried loss, once per epoch"),
    "tokens_packed": Metric("tokens", "tokens of the forward and backward passes, shared prefixes once"),
    "pairs_packed": Metric("pairs", "the square of the tokens of each such pass, summed: what attention looks at"),
    "tokens_unpacked": Metric("tokens", "what these would have been with every sample by itself"),
    "optimizer_steps_skipped": Metric("steps", "optimizer steps not taken because the gradient was not finite"),
    "minibatches_dropped": Metric(
        "minibatches", "not learned from because the policy had moved past algorithm.kl_stop"
    ),
    "prompt_tokens_computed": Metric("tokens", "prompt tokens the engine computed for this batch"),
    "prompt_tokens_reused": Metric("tokens", "prompt tokens served from a shared prefix instead of being computed"),
    "loss": Metric("", "the objective minimised, mean over the batch's optimizer steps"),
    "grad_norm": Metric("", "global gradient norm before clipping, mean over optimizer steps"),
    "learning_rate": Metric("", "learning rate of the last optimizer step"),
    "mismatch_kl": Metric("nats/token", "k3 estimate between the engine's and the trainer's logprobs of one token"),
    "ratio_mean": Metric("", "mean importance ratio over trained tokens"),
    "ratio_var": Metric("", "variance of the importance ratio"),
    "ratio_max": Metric("", "largest importance ratio"),
    "correction_truncated": Metric("", "share of trained tokens whose weight algorithm.correction held at a limit"),
    "correction_masked": Metric("", "share of trained tokens that algorithm.correction left out"),
    "policy_lag_mean": Metric(
        "versions", "trainer's version minus the one that made a trained token, mean over tokens"
    ),
    "policy_lag_max": Metric("versions", "the largest such lag"),
    "value_loss": Metric("", "the critic's loss, normalised as the policy's, mean over its optimizer steps"),
    "value_clip_fraction": Metric("", "share of tokens whose value moved beyond critic.value_clip"),
    "value_grad_norm": Metric("", "global gradient norm of the critic's own parameters before clipping"),
    "explained_variance": Metric(
        "", "1 - Var(return - value) / Var(return) at the update's start: 1 is a perfect critic"
    ),
    "returns_mean": Metric("", "mean return that the critic learned"),
    "effective_sample_size": Metric("", "(Σw)² / (n Σw²) of the importance ratios: 1 is fully on policy"),
    "time_rollout_s": Metric("s", "generating; may overlap with training and scoring"),
    "time_train_s": Metric("s", "forward, backward and optimizer"),
    "cpu_train_s": Metric("s", "of that, the trainer's thread on a processor"),
    CRITIC_WAIT: Metric("s", "of that, waiting for a critic in a process of its own"),
    "time_publish_logprobs_s": Metric(
        "s", "the new version's logprobs of tokens in flight; only with algorithm.correction.kind mu_step"
    ),
    "time_score_s": Metric("s", "waiting for rewards that nothing else overlapped"),
    "tokens_read_ahead": Metric(
        "tokens", "computed by reward models and the reference while their samples were generated (reading.ahead)"
    ),
    "tokens_read_late": Metric("tokens", "computed by them once their samples were finished"),
    "token_accuracy": Metric("", "sft: share of trained tokens that the model held most probable"),
    "pairwise_accuracy": Metric("", "share of preference pairs whose chosen side the model puts first"),
    "score_margin": Metric("", "reward model: mean score of the chosen sides minus that of the rejected ones"),
    "score_mean": Metric("", "reward model: mean score of both sides"),
    "reward_margin": Metric("", "dpo: β times how much more than the reference the policy prefers the chosen side"),
    "reward_chosen": Metric("", "dpo: β times the log-ratio of policy to reference of the chosen side"),
    "reward_rejected": Metric("", "dpo: the same of the rejected side"),
    "examples": Metric("examples", "demonstrations or preference pairs of the optimizer step"),
    "epoch": Metric("", "which pass over the examples the step belongs to, from 1"),
    HELD_OUT_LOSS: Metric("", "the loss on held-out examples; each figure above has an eval/ one, too"),
    "time_eval_s": Metric("s", "evaluating after this step"),
    STEP_TIME: Metric("s", "wall time of the step; evaluation and checkpoints left out"),
    "tokens_per_s": Metric("tokens/s", "completion tokens generated per second of rollout"),
    EVICTIONS: Metric("machines", "preemptible machines taken away since the step before, whatever was going on"),
    CRASHES: Metric("workers", "preemptible workers that raised an error since the step before"),
    MIGRATIONS: Metric(
        "samples",
        "samples a preemptible worker had and another went on with, from the tokens they had, since the step before",
    ),
    TOKENS_LOST: Metric(
        "tokens", "generated by workers taken or crashed since the step before, never received; an estimate"
    ),
    TOKENS_RECOMPUTED: Metric("tokens", "tokens of resubmitted samples that their next worker computed again"),
    WORKERS_MEAN: Metric(
        "workers", "preemptible workers that served the step or pulled its weights, mean over its rollout"
    ),
    SEED_WINDOW: Metric("s", "how long the reserved side was to generate beside preemptible workers in this step"),
    "tokens_discarded": Metric("tokens", "of samples that began again and groups that were given up or replaced"),
    "samples_restarted": Metric("samples", "begun again because they were, or would have become, too old"),
    "groups_dropped": Metric("groups", "given up because they would have become too old"),
    "groups_redrawn": Metric("groups", "replaced because all their rewards were equal (algorithm.dynamic_sampling)"),
    TRAINER_IDLE: Metric("s", "the trainer had nothing to learn from, whoever was generating"),
    TRAINER_WAIT: Metric("s", "of that, while the reserved side was not generating either"),
    REMOTE_WAIT: Metric("s", "preemptible workers had nothing left to generate, mean over workers"),
    CONTROLLER_CPU: Metric("s", "the controller's own thread on a processor, since the line before"),
    PEAK_RSS: Metric("bytes", "largest resident memory of the process so far"),
}
"""Names this project writes, besides `reward/NAME` for each of several rewards and `lag/N` for each lag.

Others are stored and reported all the same, under their bare name.
"""

HEADER = ("step", "policy_version", "weights_digest", "optimizer_steps", "time", "session", "elapsed_s")


class MetricLine(NamedTuple):
    """One line of metrics.jsonl, read back."""

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
    """Flat, so that any table reader takes the file as it is."""
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
    """Every whole line that has a step, in order of steps; of two lines for one step the later counts."""
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


def describe_metrics() -> str:
    """The text of docs/metrics.md."""
    metric_rows = [f"| `{name}` | {metric.unit or '-'} | {metric.meaning} |" for name, metric in METRICS.items()]
    event_rows = [f"| `{name}` | {meaning} |" for name, meaning in EVENTS.items()]
    return "\n".join([*METRICS_INTRODUCTION, *metric_rows, *EVENTS_INTRODUCTION, *event_rows, *SAMPLES_TEXT, ""])


METRICS_INTRODUCTION = (
    "# Metrics, events and samples of a run",
    "",
    "## `metrics.jsonl`",
    "",
    "One line per step: a step learns from one batch and publishes one version. Beside the values below each line has",
    "`step`, `policy_version`, `weights_digest`, `optimizer_steps` (taken by this step), `time` (UTC), `session` and",
    "`elapsed_s` (since that session began). A value that is not a finite number is `null`. A resumed run drops the",
    "lines after the step it resumes from and writes them again, so the file always tells one history.",
    "",
    "| name | unit | meaning |",
    "|---|---|---|",
)
EVENTS_INTRODUCTION = (
    "",
    "With several rewards, `reward/NAME` is the mean of each. `lag/N` is the share of trained tokens that were made N",
    "versions before the trainer's.",
    "",
    "## `events.jsonl`",
    "",
    "Only ever appended to: what happened, in the order it happened, over all sessions. Every line has `time` (UTC),",
    "`session`, `elapsed_s` and `event`; spans are written when they end and carry `duration_s`.",
    "",
    "| event | meaning |",
    "|---|---|",
)
FLEET_KEYS = {
    "leases": "preemptible machines held, each time it came counted",
    "joins": "preemptible workers that came up on them, weights and all",
    "notices": "warnings that a machine would be taken",
    "evictions": "machines taken from workers that were up; `evictions_noticed` of them after a warning",
    "crashes": "workers that were up and raised an error; not among the evictions",
    "quarantined": "workers given back because their logprobs differed from the trainer's",
    "migrations": "samples that a preemptible worker had and another went on with: `samples_kept` of machines that "
    "were taken or had been warned, the others to even out the load or because their worker was faulty",
    "tokens_kept": "tokens that `samples_kept` had and went on from",
    "tokens_lost": "generated there and never received, an estimate",
    "tokens_recomputed": "tokens of moved samples that their next worker computed again",
    "goodput_tokens_per_s": "`tokens_trained` per second of `wall_s`",
    "cost_usd": "`cost_by_kind_usd` together: `reserved` is `fleet.reserved_usd_per_hour` for as long as sessions ran, "
    "`preemptible` the price of each machine for as long as it was held (until the last word of a session that was "
    "killed)",
    "reserved_only_usd": "what the run would have cost with the reserved side generating every token: the time in "
    "which anybody generated, replaced by all tokens at the rate of the reserved side's own stretches; `null` when it "
    "generated nothing or has no price",
}
SAMPLES_TEXT = (
    "",
    "## `samples/step_000012.jsonl`",
    "",
    "One line per sample of the step, written at once; evaluation samples go to `step_000012.eval-NAME.jsonl`.",
    "`prompt`, `completion`, `answer`; `token_ids`, `tokens` (the completion's text cut at token borders) and",
    "`logprobs` (natural log, of the distribution sampled from; `null` for tokens the model did not make) run in",
    "parallel; `reward`, `components`, `valid`, `reason`; `finish`, `weight`, and `versions` as",
    "`[version, digest, start, end]`.",
    "",
    "## `summary.json`",
    "",
    "Written when a session ends. `steps`, `tokens_generated`, `tokens_trained`, `optimizer_steps`, `training_s` and",
    "`time` count each step of the surviving history once; `wall_s` and `sessions` are over everything that ran,",
    "repeated work included; `peak_rss_bytes` is the largest of all sessions. `eval` has `before` (step 0), `after`",
    "(the newest evaluation) and `best` (the highest mean reward), each with `reward_mean`, its standard error",
    "`reward_stderr`, `greedy_accuracy`, `step` and `n`, its number of prompts; the `n` beside them is the newest.",
    "`trainer_idle_share` is `time_trainer_idle_s` in `time_step_s`, over the steps that count. What was not measured",
    "is `null`.",
    "",
    "`greedy_accuracy` is measured where answers are right or wrong: by the rewards `exact`, `numeric`, `math_verify`,",
    "`regex` and `task`, of which 1 is right and less is wrong, and by any other reward if it gave only 0 and 1. A",
    "sample whose reward failed is wrong, and is not in the mean reward.",
    "",
    "What the fleet did and cost is over everything that ran, too: an eviction in a step that was rewound happened.",
    "",
    "| key | meaning |",
    "|---|---|",
    *(f"| `{key}` | {meaning} |" for key, meaning in FLEET_KEYS.items()),
)
