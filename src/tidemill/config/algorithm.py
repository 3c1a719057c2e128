"""The algorithm: how rewards become advantages, advantages a loss, and what corrects for older or other policies."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from pydantic import Field, model_validator

from tidemill.config.base import Config, Probability, refuse

CorrectionKind = Literal["none", "tis", "icepop", "sequence_tis", "geometric", "clip_range", "mu_step"]
AdvantageName = Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "gae"]
LossName = Literal["ppo_clip", "gspo", "cispo"]
NormalizeName = Literal["sample", "token", "constant"]
PresetName = Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "dapo", "gspo", "cispo", "ppo"]


class Limits(NamedTuple):
    """Bounds of an importance ratio; None where the correction has no such bound."""

    low: float | None
    high: float | None


CORRECTION_LIMITS: dict[CorrectionKind, Limits] = {
    "none": Limits(None, None),
    "tis": Limits(None, 2.0),
    "icepop": Limits(0.5, 5.0),
    "sequence_tis": Limits(None, 2.0),
    "geometric": Limits(0.999, 1.001),
    "clip_range": Limits(0.5, 2.0),
    "mu_step": Limits(None, 2.0),
}
"""What `low` and `high` are where they are not given."""


class CorrectionConfig(Config):
    """How a token's loss is weighted by r = exp(proximal - rollout), its ratio to the policy that generated it."""

    kind: CorrectionKind = "tis"
    """none; tis: min(r, high); icepop: 0 outside [low, high]; sequence_tis: the whole sample's ratio, at most high;
    geometric: whole samples left out whose mean ratio is outside [low, high]; clip_range: held in [low, high]; mu_step:
    as tis, each published version between the two apart. `tidemill algorithms` has the formulas. Not given: tis, and
    sequence_tis for gspo."""
    low: float | None = Field(None, gt=0)
    """Lower bound of the ratio; none takes what is usual for the kind."""
    high: float | None = Field(None, gt=0)
    """Upper bound of the ratio; none takes what is usual for the kind."""

    @model_validator(mode="before")
    @classmethod
    def _usual_limits(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        kind = given.get("kind", "tis")
        usual = CORRECTION_LIMITS.get(kind) if isinstance(kind, str) else None  # type: ignore[call-overload]
        if usual is None:
            return given
        return given | {name: value for name, value in usual._asdict().items() if given.get(name) is None}

    @model_validator(mode="after")
    def _in_order(self) -> CorrectionConfig:
        faults = []
        for name, usual in CORRECTION_LIMITS[self.kind]._asdict().items():
            if usual is None and getattr(self, name) is not None:
                others = [kind for kind, limits in CORRECTION_LIMITS.items() if limits._asdict()[name] is not None]
                faults.append(
                    f'{name} = {getattr(self, name):g} means nothing to kind = "{self.kind}"; leave it out (none) or '
                    f"take one of {', '.join(others)}"
                )
        if self.low is not None and self.high is not None and not self.low < 1 < self.high:
            faults.append(
                f"low = {self.low:g} and high = {self.high:g} do not enclose 1, so that tokens which the trainer's own "
                "policy made would be corrected; choose low < 1 < high"
            )
        elif self.low is None and self.high is not None and self.high < 1:
            faults.append(
                f"high = {self.high:g} is below 1, so that tokens which the trainer's own policy made would be "
                "corrected; choose at least 1"
            )
        return refuse(faults, self)


LOSS_DEFAULTS: dict[LossName, dict[str, Any]] = {
    "ppo_clip": {"clip_low": 0.2, "clip_high": 0.2},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4, "correction": {"kind": "sequence_tis"}},
    "cispo": {"clip_high": 5.0},
}
"""The clip's widths, and a correction other than tis, where neither they nor a preset of this loss are given."""


class Preset(NamedTuple):
    """A published algorithm: what it says of the section's keys; what it does not say stays at its default."""

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
        "DAPO, arXiv 2503.14476; its overlong shaping has a length of one's own: set overlong_buffer_tokens",
    ),
    "gspo": Preset({"loss": "gspo", **LOSS_DEFAULTS["gspo"]}, "GSPO, arXiv 2507.18071"),
    "cispo": Preset({"loss": "cispo", **LOSS_DEFAULTS["cispo"], "normalize": "token"}, "MiniMax-M1, arXiv 2506.13585"),
    "ppo": Preset(
        {"advantage": "gae", "whiten": True, "normalize": "token", "kl_in": "reward", "kl_beta": 0.01},
        "PPO, arXiv 1707.06347; for language models, arXiv 1909.08593",
    ),
}
"""By `algorithm.name`. Keys that may be none stay out of it: a written configuration could not unset them."""


class AlgorithmConfig(Config):
    name: PresetName = "grpo"
    """A published algorithm: it sets what the keys below are where they are not given. `tidemill algorithms` lists
    them."""
    advantage: AdvantageName = "grpo"
    """How rewards become advantages; gae learns a critic beside the policy (see [critic])."""
    whiten: bool = False
    """Advantages to mean 0 and deviation 1 over the batch's tokens; learning then waits for the whole batch."""
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount per token (gae, reinforce_pp)."""
    lam: Probability = 0.95
    """gae: how far ahead rewards are believed rather than values; 1 is the plain return."""
    bootstrap_truncated: bool = False
    """gae: a completion cut by max_new_tokens goes on with the value of where it was cut. Only where its reward says
    nothing of what is missing: a reward that judges the cut text already is its whole return."""
    loss: LossName = "ppo_clip"
    """The policy objective."""
    normalize: NormalizeName = "sample"
    """sample: mean over a sample's tokens, then over samples (GRPO). token: mean over the batch's tokens (DAPO).
    constant: sum over tokens, divided by samples × sampling.max_new_tokens (Dr. GRPO)."""
    clip_low: float = Field(0.2, gt=0, lt=1)
    """Importance ratios below 1 - clip_low are clipped; of no meaning to cispo. Not given: 0.2, and 0.0003 for gspo."""
    clip_high: float = Field(0.2, gt=0)
    """Importance ratios above 1 + clip_high are clipped; for cispo it is the largest ratio itself. Not given: 0.2 (0.28
    under dapo), 0.0004 for gspo and 5 for cispo."""
    dual_clip: float | None = Field(None, gt=1)
    """Floor c·A on the objective where the advantage is negative; none by default."""
    entropy_bonus: float = Field(0.0, ge=0)
    """Weight of the policy's entropy in the objective."""
    kl_beta: float = Field(0.0, ge=0)
    """Weight of the KL divergence to the reference (the initial model); 0 keeps no reference copy."""
    kl_in: Literal["loss", "reward"] = "loss"
    """loss: k3 estimate as a loss term. reward: log(rollout / reference) is taken off each token's reward."""
    kl_ratio: bool = False
    """kl_in = "loss": weight the term by the importance ratio, so that off policy, too, its gradient is that of the
    divergence."""
    kl_target: float | None = Field(None, gt=0)
    """Nats per token: after each batch kl_beta moves, by at most 2 %, so that kl_ref approaches this. None: fixed."""
    kl_stop: float | None = Field(None, gt=0)
    """Stop the update's remaining epochs and minibatches when approximate KL passes this."""
    value_clip: float = Field(0.2, ge=0)
    """gae: a value may move so far from that of the update's start; 0 for no limit."""
    value_coefficient: float = Field(0.5, gt=0)
    """gae: weight of the value loss where critic and policy share a trunk."""
    critic_warmup_steps: int = Field(0, ge=0)
    """gae: so many optimizer steps teach the critic alone."""
    dynamic_sampling: bool = False
    """Groups whose rewards are all equal are replaced by others."""
    overlong_buffer_tokens: int = Field(0, ge=0)
    """In the last so many tokens before sampling.max_new_tokens the reward falls linearly, by 1 at the limit; 0 for no
    such penalty."""
    proximal: Literal["recomputed", "rollout", "interpolated"] = "recomputed"
    """What clipping is measured from. recomputed: the policy at the update's start. rollout: the one that generated,
    without a correction. interpolated: between rollout and now by lag, which saves a forward pass per minibatch.
    Approximate KL, and kl_stop with it, counts from there."""
    correction: CorrectionConfig = CorrectionConfig()

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        name = given.get("name", "grpo")
        preset = PRESETS.get(name) if isinstance(name, str) else None  # type: ignore[call-overload]
        if preset is None:
            return given
        usual, own = dict(preset.settings), preset.settings.get("loss", "ppo_clip")
        loss = given.get("loss", own)
        if loss != own and isinstance(loss, str):  # the preset's limits and correction are for another objective
            usual.pop("correction", None)
            usual |= LOSS_DEFAULTS.get(loss, {})  # type: ignore[call-overload]
        correction = given.get("correction")
        if isinstance(correction, dict):  # limits without a kind are for the usual kind
            usual["correction"] = usual.get("correction", {}) | correction
            given = {key: value for key, value in given.items() if key != "correction"}
        return usual | given

    @model_validator(mode="after")
    def _coherent(self) -> AlgorithmConfig:
        faults = []
        if self.loss == "gspo" and self.normalize != "sample":
            faults.append(
                f'normalize = "{self.normalize}" would weigh whole sequences by their length, and loss = "gspo" has '
                'one ratio a sequence; set normalize = "sample"'
            )
        if self.loss == "cispo" and self.clip_high < 1:
            faults.append(
                f'clip_high = {self.clip_high:g} is the largest ratio itself for loss = "cispo" and would shrink every '
                "gradient; leave clip_high out, which takes 5"
            )
        if self.dual_clip is not None and self.loss != "ppo_clip":
            faults.append(f'dual_clip is only for loss = "ppo_clip", and loss is "{self.loss}"; leave dual_clip out')
        if self.kl_target is not None and not self.kl_beta:
            faults.append("kl_target moves kl_beta, and kl_beta is 0; give kl_beta a start, for example 0.01")
        if self.kl_ratio and self.kl_in == "reward":
            faults.append('kl_ratio is for kl_in = "loss", and kl_in is "reward"; set one of them')
        if self.critic_warmup_steps and not self.needs_critic:
            faults.append(
                f'critic_warmup_steps teaches a critic, and advantage = "{self.advantage}" has none; set advantage = '
                '"gae" or leave it out'
            )
        return refuse(faults, self)

    @property
    def needs_critic(self) -> bool:
        return self.advantage == "gae"

    @property
    def needs_rollout_logprobs(self) -> list[str]:
        """Settings that nothing can be done about without the logprobs of the tokens at sampling time."""
        settings = [f'algorithm.correction.kind = "{self.correction.kind}"'] if self.correction.kind != "none" else []
        if self.proximal != "recomputed":
            settings.append(f'algorithm.proximal = "{self.proximal}"')
        if self.kl_beta > 0 and self.kl_in == "reward":
            settings.append('algorithm.kl_in = "reward"')
        return settings

    @property
    def compares_siblings(self) -> bool:
        """Whether a sample's advantage depends on the others of its group."""
        return self.advantage in ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline")

    def changed_from_preset(self) -> list[str]:
        """The keys whose value is not what `name` alone would give, in the schema's order."""
        plain = AlgorithmConfig(name=self.name)
        return [key for key in AlgorithmConfig.model_fields if getattr(self, key) != getattr(plain, key)]


CRITIC_LEARNING_RATES = {"own": 1e-5, "shared": 1e-3}
"""By `critic.kind`, where `learning_rate` is not given. A head at a model's own rate still says zero after 20 steps."""


class CriticConfig(Config):
    """The value function of algorithm.advantage = "gae"; of no meaning elsewhere."""

    kind: Literal["own", "shared"] = "own"
    """own: a second model with a value head (under model.lora a second adapter). shared: a head on the policy's own
    hidden states."""
    source: str | None = None
    """own: where its weights come from, as model.source; none takes the policy's own. A reward model brings its head
    (where rewards are its scores, values then begin near them); any other head begins with zeros."""
    learning_rate: float = Field(CRITIC_LEARNING_RATES["own"], gt=0)
    """Of the critic's own parameters; a shared trunk moves at optimizer.learning_rate. By default 1e-5 for a model of
    its own and 1e-3 for a head, which begins with zeros and learns alone."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Global gradient norm of the critic's own parameters is clipped to this."""
    normalize: bool = False
    """Learn returns scaled to mean 0 and deviation 1 (running figures), and scale values back."""

    @model_validator(mode="before")
    @classmethod
    def _usual_learning_rate(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        kind = given.get("kind", "own")
        usual = CRITIC_LEARNING_RATES.get(kind) if isinstance(kind, str) else None
        return {"learning_rate": usual} | given if usual else given

    @model_validator(mode="after")
    def _coherent(self) -> CriticConfig:
        faults = []
        if self.source is not None and self.kind == "shared":
            faults.append(
                'source is where a critic of its own comes from, and kind is "shared"; set kind = "own" or leave it out'
            )
        return refuse(faults, self)
