"""Robots: the task and its simulation, training, transfer to another simulator, the bundle for a robot's computer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import product
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from tidemill.config.addresses import DataPath
from tidemill.config.base import NEUTRAL, Config, NameOrFunction, OutputFolder, Probability

WORLDS_PER_SHARD = 64
"""Worlds of a shard: the unit that a worker simulates and an eviction repeats."""


CONTROL_TASKS = ("swingup", "reach", "quadruped", "tandem")


def _range(ends: tuple[float, float]) -> tuple[float, float]:
    if ends[0] > ends[1]:
        raise ValueError(f"starts at {ends[0]:g} and ends at {ends[1]:g}; write the smaller number first")
    return ends


NotNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Range = Annotated[tuple[NotNegative, NotNegative], AfterValidator(_range)]
Factor = Annotated[tuple[Positive, Positive], AfterValidator(_range)]


class RandomiseConfig(Config):
    """Drawn uniformly at the start of each episode, and recorded with it."""

    mass: Factor = (1.0, 1.0)
    """Factor of the mass of every body, without its inertia."""
    inertia: Factor = (1.0, 1.0)
    """Factor of the rotational inertia of every body."""
    friction: Factor = (1.0, 1.0)
    """Factor of the sliding friction of every geom."""
    gains: Factor = (1.0, 1.0)
    """Factor of the gains of every actuator."""
    delay_s: Range = (0.0, 0.0)
    """Time between an observation and the effect of its action, in seconds, rounded to the physics timestep."""
    observation_noise: float = Field(0.0, ge=0)
    """Scale of the normal noise on the observations of policies; 1: the standard deviations that the task names."""
    push_interval_s: float = Field(0.0, ge=0)
    """Mean time between two pushes, in seconds; 0: none."""
    push_speed: float = Field(0.5, gt=0)
    """Greatest change of velocity by a push, in m/s (of a fixed robot: rad/s of a joint)."""


class RobotConfig(Config):
    """What is simulated."""

    task: Annotated[str, NameOrFunction("control_task", CONTROL_TASKS)] = "swingup"
    """swingup, reach, quadruped, tandem, or path/file.py:Task."""
    engine: Literal["mujoco", "newton"] = "mujoco"
    """mujoco: C MuJoCo. newton: Newton's SolverMuJoCo (MuJoCo Warp)."""
    worlds: int = Field(512, ge=1)
    """Worlds simulated at the same time. They are divided into shards of 64."""
    history: int = Field(1, ge=1, le=64)
    """Observations that a policy reads: the newest and history - 1 before it."""
    randomise: RandomiseConfig = RandomiseConfig()
    """Parameters that vary between episodes."""
    parameters: DataPath | None = None
    """JSON file of physical parameters that replace those of the model: the output of an `identify` stage."""
    environment: str = ""
    """An environment in place of the task: package.module:function, which returns an rsl_rl VecEnv or a gymnasium
    VectorEnv. It is called with num_envs and seed."""
    environment_args: dict[str, bool | int | float | str] = {}
    """Further arguments of the environment's function."""
    python: Annotated[str, NEUTRAL, AfterValidator(os.path.expanduser)] = ""
    """Interpreter in which the environment runs; empty: this one."""

    @property
    def shards(self) -> int:
        return self.worlds // WORLDS_PER_SHARD

    def issues(self) -> Iterator[str]:
        if self.worlds % WORLDS_PER_SHARD:
            near = max(1, round(self.worlds / WORLDS_PER_SHARD)) * WORLDS_PER_SHARD
            yield f"worlds = {self.worlds} is not a multiple of {WORLDS_PER_SHARD}, the worlds of a shard; write {near}"
        for key in ("environment_args", "python"):
            if getattr(self, key) and not self.environment:
                yield f"{key} has an effect only with environment; name one, or leave it out"
        for key in ("engine", "randomise", "parameters"):
            if self.environment and getattr(self, key) != type(self).model_fields[key].default:
                yield f"{key} has no effect on an environment, which has its own physics; leave it out"


Activation = Literal["elu", "relu", "tanh"]
PPO_ELSEWHERE: dict[str, tuple[Any, ...]] = {
    "class_name": ("PPO", "rsl_rl.algorithms.PPO"),
    "optimizer": ("adam",),
    "rnd_cfg": (None, {}),
    "symmetry_cfg": (None, {}),
    "use_mixed_precision": (False,),
    "multi_gpu_cfg": (None, {}),
    "share_cnn_encoders": (False,),
    # A scalar standard deviation takes other optimizer steps than its logarithm.
    "noise_std_type": ("log",),
    # The normaliser is part of the network.
    "empirical_normalization": (True, None),
    "actor_obs_normalization": (True,),
    "critic_obs_normalization": (True,),
}
"""Keys of rsl_rl's PPO without a counterpart, and the values that mean what is done here."""


def _tuples(value: Any) -> Any:
    """With tuples for lists: what a validator returns is no longer JSON, and strict mode takes no list for a tuple."""
    if isinstance(value, dict):
        return {name: _tuples(each) for name, each in value.items()}
    return tuple(value) if isinstance(value, list) else value


HiddenSizes = Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1)]


class ControlConfig(Config):
    """PPO for continuous actions. Keys have the names of rsl_rl; trainer.steps is the number of iterations."""

    num_steps_per_env: int = Field(32, ge=1)
    """Control steps of every world in one iteration."""
    num_learning_epochs: int = Field(5, ge=1)
    """Passes over the experience of an iteration."""
    num_mini_batches: int = Field(4, ge=1)
    """Optimizer steps of a pass."""
    learning_rate: float = Field(1e-3, gt=0)
    """Initial learning rate of Adam."""
    schedule: Literal["adaptive", "fixed"] = "adaptive"
    """adaptive: the learning rate follows the KL divergence of an update."""
    desired_kl: float = Field(0.01, gt=0)
    """KL divergence of an update, in nats: above twice this the rate falls, below half of it the rate rises, by 1.5."""
    clip_param: float = Field(0.2, gt=0, lt=1)
    """Range of the importance ratio, and of a value's change with use_clipped_value_loss."""
    use_clipped_value_loss: bool = True
    """Clip the change of a value in one iteration. Needs returns of the order of 1: rewards are multiplied by the
    control step for this reason."""
    value_loss_coef: float = Field(1.0, ge=0)
    """Weight of the value loss."""
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of the entropy bonus."""
    gamma: float = Field(0.99, gt=0, le=1)
    """Discount per control step."""
    lam: float = Field(0.95, ge=0, le=1)
    """Lambda of generalised advantages."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Greatest norm of a gradient."""
    normalize_advantage_per_mini_batch: bool = False
    """Whiten advantages within each mini-batch instead of the whole iteration."""
    actor_hidden_dims: HiddenSizes = (64, 64)
    """Units of the hidden layers of each actor."""
    critic_hidden_dims: HiddenSizes = (64, 64)
    """The same of the critic."""
    activation: Activation = "elu"
    """Of the hidden layers."""
    init_noise_std: float = Field(1.0, gt=0)
    """Initial standard deviation of actions."""
    obs_groups: dict[str, Annotated[tuple[str, ...], Field(min_length=1)]] = {}
    """Groups of observations that each policy and "critic" read, as in rsl_rl ("actor" and "policy" name the same).
    Default: those of the task."""
    critic: Literal["central", "separate"] = "central"
    """Tasks with several policies. central: one critic that reads the groups of all. separate: one for each policy,
    which reads its groups."""
    max_policy_lag: int = Field(0, ge=0, le=1)
    """0: strictly on policy. 1: experience is generated while the iteration before is trained on, always by the version
    before."""
    eval_episodes: int = Field(64, ge=0)
    """Episodes before and after training, without exploration and randomisation; rounded up to whole shards."""

    @model_validator(mode="before")
    @classmethod
    def _of_rsl_rl(cls, given: Any) -> Any:
        """Accept the settings of rsl_rl's PPO as they are."""
        if not isinstance(given, dict):
            return given
        for name, accepted in PPO_ELSEWHERE.items():
            if name in given and given[name] not in accepted:
                raise ValueError(f"{name} = {given[name]!r} is not supported: it is {accepted[0]!r} here; leave it out")
        own = {name: _tuples(value) for name, value in given.items() if name not in PPO_ELSEWHERE}
        if isinstance(groups := own.get("obs_groups"), dict) and "actor" in groups:  # "policy" before rsl_rl 5
            own["obs_groups"] = {"policy" if name == "actor" else name: each for name, each in groups.items()}
        return own


class CloneConfig(Config):
    """Behaviour cloning."""

    path: DataPath | None = None
    """Recorded episodes: a folder of Tidemill's format, or a LeRobot v3 dataset (its tables; videos are not read)."""
    teacher: DataPath | None = None
    """A trained policy that records the episodes, or labels observations: "stage:NAME", or a folder."""
    episodes: int = Field(200, ge=1)
    """Episodes that the teacher records."""
    on_policy: bool = False
    """The student acts and the teacher labels (distillation): the student need not read the teacher's groups."""
    epochs: int = Field(60, ge=1)
    """Passes over the recorded episodes. On policy: control.num_learning_epochs over the experience of an iteration."""
    batch_size: int = Field(1024, ge=1)
    """Observations of an optimizer step."""
    learning_rate: float = Field(3e-3, gt=0)
    """Learning rate of Adam; with recorded episodes it falls linearly to a tenth."""
    rename_joints: dict[str, str] = {}
    """Names of the task's joints for those of the recorded episodes, where they differ."""


class OptimiseConfig(Config):
    """A trajectory of controls by gradients through Newton's physics."""

    steps: int = Field(60, ge=1)
    """Control steps of the trajectory."""
    iterations: int = Field(200, ge=1)
    """Gradient steps."""
    learning_rate: float = Field(0.05, gt=0)
    """Step size of Adam, in units of actions."""
    check_directions: int = Field(4, ge=1)
    """Random directions in which the gradient is compared with finite differences before the first step."""
    check_tolerance: float = Field(0.005, gt=0)
    """Greatest relative difference of the comparison; above it the stage ends."""


class IdentifyConfig(Config):
    """Physical parameters from logs of a robot, with the optimiser of mujoco.sysid."""

    path: DataPath | None = None
    """Logs: a folder of recorded episodes with joint positions and controls."""
    parameters: tuple[str, ...] = ()
    """What is identified: mass:BODY, length:BODY, damping:JOINT, friction:GEOM, gain:ACTUATOR."""
    within: Factor = (0.5, 2.0)
    """Range of every parameter, in units of the model's value."""
    confidence: Annotated[float, Field(gt=0.5, lt=1)] = 0.95
    """Coverage of the reported intervals."""


class TwinConfig(Config):
    """A policy in another simulator, or with other parameters, over a grid."""

    policy: DataPath | None = None
    """"stage:NAME", a folder of a trained policy, or an ONNX file with the names of its joints in its metadata."""
    engine: Literal["mujoco", "newton"] = "newton"
    """Engine of the twin."""
    episodes: int = Field(64, ge=1)
    """Episodes of each cell, rounded up to whole shards."""
    mass: tuple[Positive, ...] = (1.0,)
    """Factors of mass and inertia in the grid."""
    friction: tuple[Positive, ...] = (1.0,)
    """Factors of friction in the grid."""
    gains: tuple[Positive, ...] = (1.0,)
    """Factors of gains in the grid."""
    delay_s: tuple[NotNegative, ...] = (0.0,)
    """Delays in the grid, in seconds."""
    timestep: tuple[Positive, ...] = (1.0,)
    """Factors of the physics timestep in the grid."""
    full_grid: bool = False
    """false: vary one parameter at a time. true: every combination."""
    min_success: Probability = 0.9
    """The lower 95 % Wilson bound of success must reach this in every required cell."""
    max_falls: Probability = 0.1
    """The upper 95 % Wilson bound of terminated episodes may not exceed this in a required cell."""
    required: Literal["all", "nominal"] = "all"
    """Cells that the thresholds apply to."""

    @property
    def cells(self) -> list[dict[str, float]]:
        """The parameters of every cell; the nominal one first."""
        axes = {name: getattr(self, name) for name in ("mass", "friction", "gains", "delay_s", "timestep")}
        nominal = {name: 0.0 if name == "delay_s" else 1.0 for name in axes}
        if self.full_grid:
            found = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
        else:
            found = [nominal | {name: value} for name, values in axes.items() for value in values]
        return [nominal, *(cell for at, cell in enumerate(found) if cell != nominal and cell not in found[:at])]


class BundleConfig(Config):
    """Files for a robot's computer."""

    policy: DataPath | None = None
    """"stage:NAME" of a trained policy."""
    twin: DataPath | None = None
    """"stage:NAME" of its twin, which must have passed."""
    path: OutputFolder = None
    """Output folder. Default: `bundle` in the stage's folder."""
    deadline_ms: float = Field(2.0, gt=0)
    """Time for one decision, in milliseconds; the 99.9th percentile must be below it."""
    decisions: int = Field(5000, ge=100)
    """Decisions that the deadline harness measures."""
    max_observation_age_ms: float = Field(40.0, gt=0)
    """Age of an observation above which the robot must use the safe action instead, in milliseconds."""
    safe_action: Literal["hold", "damp", "zero"] = "hold"
    """What the robot does without a valid action. hold: the default pose. damp: damping only. zero: no force."""
