"""The RL algorithm: presets, advantages, loss, KL penalty, off-policy correction and critic."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, model_validator

from tidemill.config.addresses import OptionalModelName
from tidemill.config.base import HAS_CRITIC, HAS_REFERENCE, ActiveIf, Config, NameOrFunction, Probability

CorrectionKind = Literal["none", "tis", "icepop", "sequence_tis", "geometric", "clip_range", "mu_step"]
ADVANTAGE_NAMES = ("grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "gae")
LOSS_NAMES = ("ppo_clip", "gspo", "cispo")
NormalizeName = Literal["sample", "token", "constant"]
PresetName = Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "dapo", "gspo", "cispo", "ppo"]


class RatioLimits(NamedTuple):
    """Bounds of an importance ratio; None: the correction has no such bound."""

    low: float | None
    high: float | None


CORRECTION_LIMITS: dict[CorrectionKind, RatioLimits] = {
    "none": RatioLimits(None, None),
    "tis": RatioLimits(None, 2.0),
    "icepop": RatioLimits(0.5, 5.0),
    "sequence_tis": RatioLimits(None, 2.0),
    "geometric": RatioLimits(0.999, 1.001),
    "clip_range": RatioLimits(0.5, 2.0),
    "mu_step": RatioLimits(None, 2.0),
}
"""Default `low` and `high` of each correction."""


class CorrectionConfig(Config):
    """Off-policy correction: weight of a token's loss, a function of the ratio r = exp(proximal − rollout logprob)."""

    kind: CorrectionKind = "tis"
    """none; tis: min(r, high); icepop: 0 outside [low, high]; sequence_tis: the ratio of the whole sample, at most
    high; geometric: samples whose mean ratio is outside [low, high] are dropped; clip_range: r clipped to [low, high];
    mu_step: tis with one factor for each version published in between. `tidemill algorithms` lists the formulas.
    Default: tis, and sequence_tis with loss = "gspo"."""
    low: float | None = Field(None, gt=0)
    """Lower bound of the ratio; none: the default of the kind."""
    high: float | None = Field(None, gt=0)
    """Upper bound of the ratio; none: the default of the kind."""

    @model_validator(mode="before")
    @classmethod
    def _default_limits(cls, given: Any) -> Any:
        limits = _lookup(CORRECTION_LIMITS, given, "kind", "tis")
        if limits is None:
            return given
        return given | {name: value for name, value in limits._asdict().items() if given.get(name) is None}

    def issues(self) -> Iterator[str]:
        for name, default in CORRECTION_LIMITS[self.kind]._asdict().items():
            if default is None and getattr(self, name) is not None:
                others = [kind for kind, limits in CORRECTION_LIMITS.items() if limits._asdict()[name] is not None]
                yield (
                    f'{name} = {getattr(self, name):g} has no meaning for kind = "{self.kind}"; leave it out (none) or '
                    f"choose one of {', '.join(others)}"
                )
        if self.low is not None and self.high is not None and not self.low < 1 < self.high:
            yield (
                f"low = {self.low:g} and high = {self.high:g} do not enclose 1, the ratio of on-policy tokens; choose "
                "low < 1 < high"
            )
        elif self.low is None and self.high is not None and self.high < 1:
            yield f"high = {self.high:g} is below 1, the ratio of on-policy tokens; choose at least 1"


LOSS_DEFAULTS: dict[str, dict[str, Any]] = {
    "ppo_clip": {"clip_low": 0.2, "clip_high": 0.2},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4, "correction": {"kind": "sequence_tis"}},
    "cispo": {"clip_high": 5.0},
}
"""Default clip range and correction of each loss, unless the preset has the same loss and sets them."""


class Preset(NamedTuple):
    """A published algorithm: the keys of [algorithm] that it sets. The others keep their defaults."""

    settings: dict[str, Any]
    source: str


PRESETS: dict[PresetName, Preset] = {
    "grpo": Preset({}, "DeepSeekMath, arXiv 2402.03300"),
    "dr_grpo": Preset({"advantage": "dr_grpo", "normalize": "constant"}, "Dr. GRPO, arXiv 2503.20783"),
    "rloo": Preset(
        {"advantage": "rloo", "normalize": "constant", "kl_in": "reward"},
        "Back to basics (RLOO), arXiv 2402.14740",
    ),
    "reinforce_pp": Preset(
        {"advantage": "reinforce_pp", "whiten": True, "normalize": "token", "kl_in": "reward", "kl_beta": 0.001},
        "REINFORCE++, arXiv 2501.03262",
    ),
    "reinforce_pp_baseline": Preset(
        {"advantage": "reinforce_pp_baseline", "whiten": True, "normalize": "token"}, "REINFORCE++, arXiv 2501.03262"
    ),
    "dapo": Preset(
        {"clip_high": 0.28, "normalize": "token", "dynamic_sampling": True},
        "DAPO, arXiv 2503.14476; set overlong_buffer_tokens for its overlong penalty",
    ),
    "gspo": Preset({"loss": "gspo", **LOSS_DEFAULTS["gspo"]}, "GSPO, arXiv 2507.18071"),
    "cispo": Preset({"loss": "cispo", **LOSS_DEFAULTS["cispo"], "normalize": "token"}, "MiniMax-M1, arXiv 2506.13585"),
    "ppo": Preset(
        {"advantage": "gae", "whiten": True, "normalize": "token", "kl_in": "reward", "kl_beta": 0.01},
        "PPO, arXiv 1707.06347; for language models, arXiv 1909.08593",
    ),
}
"""By `algorithm.name`. Must not set keys that accept none: config.toml cannot unset them."""


def _lookup(table: dict[Any, Any], given: Any, key: str, default: str) -> Any:
    """The table's row for the value of `key` in the input; None for invalid input, which validation reports."""
    value = given.get(key, default) if isinstance(given, dict) else None
    return table.get(value) if isinstance(value, str) else None


class LossTermConfig(Config):
    """A user function that is added to the loss of every token."""

    function: Annotated[str, NameOrFunction("loss_term")]
    """`path/file.py:function` or `package.module:function`. It takes any of logprobs, proximal_logprobs,
    rollout_logprobs, ref_logprobs, advantages, mask and sample_index (tensors of one value per token) and returns one
    loss per token."""
    weight: float = 1.0
    """Factor of the term."""


REDRAWS = ActiveIf(lambda spec: spec.algorithm.dynamic_sampling, "algorithm.dynamic_sampling is false")
DIFFERS_BY_TOKEN = ActiveIf(
    lambda spec: not spec.algorithm.compares_siblings, "the advantage is the same for all tokens of a sample"
)
CLIPS_LOW = ActiveIf(lambda spec: spec.algorithm.loss != "cispo", 'loss = "cispo" has no lower limit')
SEVERAL_OPTIMIZER_STEPS = ActiveIf(
    lambda spec: spec.batch.minibatches * spec.batch.epochs > 1, "each batch is a single optimizer step"
)


class AlgorithmConfig(Config):
    name: PresetName = "grpo"
    """Published algorithm that sets the defaults of the keys below. `tidemill algorithms` lists them."""
    advantage: Annotated[str, NameOrFunction("advantage", ADVANTAGE_NAMES)] = "grpo"
    """Advantage estimator; gae trains a critic (see [critic]). A function of yours takes any of rewards, valid,
    lengths, truncated, components, step (and group, for a whole batch) and returns one advantage per sample."""
    whiten: bool = False
    """Normalize advantages to mean 0 and standard deviation 1 over the batch's tokens. Training then starts when the
    whole batch is complete."""
    credit: Literal["outcome", "turn_returns", "gigpo"] = "outcome"
    """Advantage of the turns of an agent. outcome: that of the whole trajectory. turn_returns: from the discounted
    rewards after each turn. gigpo: outcome plus the advantage among equal states of the group; algorithm.advantage is
    then "dr_grpo" by default, which does not divide by a deviation."""
    turn_gamma: float = Field(0.95, gt=0, le=1)
    """turn_returns, gigpo: discount per turn."""
    step_weight: float = Field(1.0, ge=0)
    """gigpo: weight of the advantage among equal states."""
    gamma: Annotated[float, DIFFERS_BY_TOKEN] = Field(1.0, gt=0, le=1)
    """gae, reinforce_pp: discount per token."""
    lam: Annotated[Probability, HAS_CRITIC] = 0.95
    """gae: λ of generalized advantage estimation; 1 is the Monte Carlo return."""
    bootstrap_truncated: Annotated[bool, HAS_CRITIC] = False
    """gae: bootstrap a completion truncated by max_new_tokens with its last value. Use it only where the reward does
    not already score the truncated text."""
    loss: Annotated[str, NameOrFunction("loss", LOSS_NAMES)] = "ppo_clip"
    """Policy loss. A function of yours takes any of the arguments of a loss term, and returns one loss per token."""
    loss_terms: tuple[LossTermConfig, ...] = ()
    """Functions of yours that are added to the policy loss."""
    normalize: NormalizeName = "sample"
    """Reduction of the loss. sample: mean over a sample's tokens, then over samples (GRPO). token: mean over the
    batch's tokens (DAPO). constant: sum over tokens, divided by samples × sampling.max_new_tokens (Dr. GRPO)."""
    clip_low: Annotated[float, CLIPS_LOW] = Field(0.2, gt=0, lt=1)
    """Importance ratios below 1 − clip_low are clipped; unused by cispo. Default: 0.2, and 0.0003 for gspo."""
    clip_high: float = Field(0.2, gt=0)
    """Importance ratios above 1 + clip_high are clipped; for cispo it is the maximum ratio. Default: 0.2 (0.28 for
    dapo), 0.0004 for gspo and 5 for cispo."""
    dual_clip: float | None = Field(None, gt=1)
    """Dual-clip PPO: lower bound c·A of the objective for negative advantages; none: no bound."""
    entropy_bonus: float = Field(0.0, ge=0)
    """Weight of the entropy bonus."""
    kl_beta: float = Field(0.0, ge=0)
    """Weight of the KL penalty against the reference model (the initial policy); 0: no reference model."""
    kl_in: Annotated[Literal["loss", "reward"], HAS_REFERENCE] = "loss"
    """loss: the k3 estimator as a loss term. reward: kl_beta × log(rollout / reference) is subtracted from each token's
    reward."""
    kl_ratio: Annotated[bool, HAS_REFERENCE] = False
    """kl_in = "loss": multiply the KL term by the importance ratio, which gives the gradient of the KL divergence for
    off-policy samples too."""
    kl_target: float | None = Field(None, gt=0)
    """Adaptive KL: after each batch, change kl_beta by at most 2 % so that kl_ref approaches this value, in nats per
    token. none: kl_beta is constant."""
    kl_stop: Annotated[float | None, SEVERAL_OPTIMIZER_STEPS] = Field(None, gt=0)
    """Skip the remaining minibatches and epochs of a batch when the approximate KL exceeds this value."""
    dynamic_sampling: bool = False
    """Replace groups whose rewards are all equal (DAPO)."""
    max_redraws: Annotated[int, REDRAWS] = Field(3, ge=0)
    """dynamic_sampling: maximum number of batches' worth of groups replaced in one step."""
    overlong_buffer_tokens: int = Field(0, ge=0)
    """Overlong penalty (DAPO): over the last this many tokens before sampling.max_new_tokens the reward decreases
    linearly, by 1 at the limit; 0: no penalty."""
    proximal: Literal["recomputed", "rollout", "interpolated"] = "recomputed"
    """Policy from which clipping, approximate KL and kl_stop are measured. recomputed: the policy at the start of the
    update. rollout: the policy that generated the sample; there is no correction. interpolated: between the rollout
    policy and the current one, by lag, which saves a forward pass per minibatch."""
    correction: CorrectionConfig = CorrectionConfig()

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, given: Any) -> Any:
        preset = _lookup(PRESETS, given, "name", "grpo")
        if preset is None:
            return given
        defaults, preset_loss = dict(preset.settings), preset.settings.get("loss", "ppo_clip")
        if given.get("credit") == "gigpo":
            defaults = {"advantage": "dr_grpo"} | defaults
        loss = given.get("loss", preset_loss)
        if loss != preset_loss and isinstance(loss, str):  # the preset's limits and correction are for its own loss
            defaults.pop("correction", None)
            defaults |= LOSS_DEFAULTS.get(loss, {})
        correction = given.get("correction")
        if isinstance(correction, dict):  # limits without a kind belong to the default kind
            defaults["correction"] = defaults.get("correction", {}) | correction
            given = {key: value for key, value in given.items() if key != "correction"}
        if isinstance(given.get("loss_terms"), list):  # strict mode takes a JSON array only before this validator
            given = given | {"loss_terms": tuple(given["loss_terms"])}
        return defaults | given

    def issues(self) -> Iterator[str]:
        if self.loss == "gspo" and self.normalize != "sample":
            yield (
                f'normalize = "{self.normalize}" weights sequences by length, and loss = "gspo" has one ratio per '
                'sequence; set normalize = "sample"'
            )
        if self.loss == "cispo" and self.clip_high < 1:
            yield (
                f'clip_high = {self.clip_high:g} is the maximum ratio with loss = "cispo" and scales down every '
                "gradient; leave clip_high out (default 5)"
            )
        if self.dual_clip is not None and self.loss != "ppo_clip":
            yield f'dual_clip is only for loss = "ppo_clip", and loss is "{self.loss}"; leave dual_clip out'
        if self.kl_target is not None and not self.kl_beta:
            yield "kl_target adapts kl_beta, and kl_beta is 0; set kl_beta to an initial value, for example 0.01"
        if self.kl_ratio and self.kl_in == "reward":
            yield 'kl_ratio is for kl_in = "loss", and kl_in is "reward"; change one of them'

    @property
    def needs_critic(self) -> bool:
        return self.advantage == "gae"

    @property
    def needs_rollout_logprobs(self) -> list[str]:
        """The settings that require logprobs of the rollout."""
        settings = [f'algorithm.correction.kind = "{self.correction.kind}"'] if self.correction.kind != "none" else []
        if self.proximal != "recomputed":
            settings.append(f'algorithm.proximal = "{self.proximal}"')
        if self.kl_beta > 0 and self.kl_in == "reward":
            settings.append('algorithm.kl_in = "reward"')
        return settings

    @property
    def compares_siblings(self) -> bool:
        """Whether a sample's advantage depends on the other samples of its group."""
        return self.advantage in ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline")

    @property
    def has_user_advantage(self) -> bool:
        return self.advantage not in ADVANTAGE_NAMES

    @property
    def has_user_loss(self) -> bool:
        """Whether a user function adds to the loss; it may have a gradient where all advantages are 0."""
        return self.loss not in LOSS_NAMES or bool(self.loss_terms)

    def changed_from_preset(self) -> list[str]:
        """The keys whose value differs from the preset's, in the schema's order."""
        preset = AlgorithmConfig(name=self.name)
        return [key for key in AlgorithmConfig.model_fields if getattr(self, key) != getattr(preset, key)]


CRITIC_LEARNING_RATES = {"own": 1e-5, "shared": 1e-3}
"""Default `critic.learning_rate` by `critic.kind`. At 1e-5 a new head still outputs about 0 after 20 steps."""


class CriticConfig(Config):
    """The value function; only with algorithm.advantage = "gae"."""

    kind: Literal["own", "shared"] = "own"
    """own: a separate model with a value head (with model.lora, a second adapter). shared: a value head on the policy's
    hidden states."""
    source: OptionalModelName = None
    """kind = "own": the critic's initial weights, as model.source; none: those of the policy. A reward model keeps its
    head, so that values start near its scores; any other model gets a head initialised to output 0."""
    learning_rate: float = Field(CRITIC_LEARNING_RATES["own"], gt=0)
    """Learning rate of the critic's own parameters; a shared trunk uses optimizer.learning_rate. Default: 1e-5 for
    kind = "own", 1e-3 for "shared"."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Maximum global gradient norm of the critic's own parameters."""
    value_clip: float = Field(0.2, ge=0)
    """Clip range of the value loss; 0: no clipping."""
    value_coefficient: float = Field(0.5, gt=0)
    """kind = "shared": weight of the value loss."""
    warmup_steps: int = Field(0, ge=0)
    """Number of optimizer steps at the start that train only the critic."""
    normalize: bool = False
    """Train on returns normalized by their running mean and standard deviation, and scale values back."""

    @model_validator(mode="before")
    @classmethod
    def _default_learning_rate(cls, given: Any) -> Any:
        rate = _lookup(CRITIC_LEARNING_RATES, given, "kind", "own")
        return {"learning_rate": rate} | given if rate else given

    def issues(self) -> Iterator[str]:
        if self.source is not None and self.kind == "shared":
            yield 'source is for kind = "own", and kind is "shared"; set kind = "own" or leave source out'
