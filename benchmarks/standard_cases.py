"""The runs of `benchmarks.standard_runs`: command lines, and the files that they read."""

from __future__ import annotations

from typing import NamedTuple

SMALL = r"""
run = { name = "small" }
model = { source = "char", char = { alphabet = "0123456789+=\n", hidden_size = 32, layers = 2 } }
task = { kind = "arithmetic", operators = "+", digits = 1, shots = 0, held_out_fraction = 0.2 }
scoring = { rewards = [{ kind = "regex", pattern = '^\d' }, { kind = "length", target_tokens = 5 }] }
sampling = { max_new_tokens = 8 }
engine = { slots = 8 }
batch = { prompts = 4, group_size = 4, minibatches = 2 }
optimizer = { learning_rate = 1e-3 }
trainer = { steps = 6, threads = 1 }
eval = { every_steps = 3, prompts = 8 }
checkpoint = { every_steps = 3 }
"""
PREFERENCES = """
scoring = { rewards = [{ kind = "exact" }] }
data = { end_token = false }
supervised = { epochs = 6, minibatch_tokens = 128, microbatch_tokens = 64 }
eval = { samples_per_prompt = 2 }
stage = [
    { name = "written", kind = "demonstrations" },
    { name = "sft", kind = "sft", data.path = "stage:written" },
    { name = "pairs", kind = "pairs", model.source = "stage:sft", data_generation.samples_per_prompt = 8 },
    { name = "dpo", kind = "dpo", model.source = "stage:sft", data.path = "stage:pairs", supervised.epochs = 1 },
    { name = "measure", kind = "eval", model.source = "stage:dpo", eval.compare_with = "stage:sft" },
    { name = "out", kind = "export", model.source = "stage:dpo" },
]
"""
TOOLS = """
model = { source = "chat", chat_template = true }
task = { kind = "environment", train_size = 48, held_out_size = 8 }
env = { name = "benchmarks.standard_functions:Letters", turns = 3, turn_tokens = 80 }
sandbox = { backend = "none" }
engine = { batch_invariant = true }
scoring = { rewards = [{ kind = "environment" }] }
sampling = { max_new_tokens = 160 }
supervised = { epochs = 20, minibatch_tokens = 2048, microbatch_tokens = 2048 }
stage = [
    { name = "written", kind = "demonstrations" },
    { name = "sft", kind = "sft", data = { path = "stage:written" }, optimizer = { learning_rate = 5e-3 } },
    { name = "rl", kind = "rl", model = { source = "stage:sft" }, trainer = { steps = 3 } },
]
"""
LINES = """
task = { kind = "file", path = "rows.jsonl", columns = { prompt = "question" } }
"""
EVICTED = """
model = { char = { hidden_size = 64 } }
sampling = { max_new_tokens = 32 }
scoring = { rewards = [{ kind = "length", target_tokens = 32 }] }
engine = { batch_invariant = true, slots = 6, tick_s = 0.005 }
trainer = { steps = 10 }
fleet = { seed_window_s = 0.05, window_gain = 1e6, drain_margin_s = 0.1 }
"""
FILES = {
    "small.toml": SMALL,
    "preferences.toml": PREFERENCES,
    "tools.toml": TOOLS,
    "lines.toml": LINES,
    "evicted.toml": EVICTED,
    "rows.jsonl": "".join(f'{{"question": "{a}+{b}=", "answer": "{a + b}\\n"}}\n' for a in range(10) for b in range(6)),
    "trace.csv": "seconds,count\n" + "".join(f"{time * 0.15:.2f},{(3, 1, 2, 0)[time % 4]}\n" for time in range(800)),
}
"""In the folder of every run."""


class StandardRun(NamedTuple):
    """Command lines, in order. What `--json` prints counts; one that starts with `killed` is killed after a while."""

    commands: tuple[str, ...]
    moves: bool = False  # machines or environments act in real time, which the figures about them depend on
    needs: str = ""  # an event that must have happened


SMALL_RUN = "tidemill train @small.toml --run.dir run"
LONG = f"{SMALL_RUN} --trainer.steps 30 --checkpoint.every_steps 10 --engine.batch_invariant true"
LAG = f"{SMALL_RUN} @evicted.toml --schedule.max_policy_lag 1 --schedule.unfinished wait"
ON_TRACE = "--pool.kind trace --pool.path trace.csv --pool.max_workers 3"
CLUSTER = f"{SMALL_RUN} --runtime ray --engine.batch_invariant true"
OFTEN_MOVED = "--pool.workers 2 --fleet.seed_window_s 0.05 --fleet.window_gain 1e6"
GUESS = """tidemill train @guess --run.dir run --trainer.threads 1 --stage.written.data_generation.prompts 500
 --model.char.hidden_size 64 --task.held_out_size 16 --stage.sft.supervised.epochs 2
 --stage.sft.supervised.evaluate_every_steps 10 --stage.sft.optimizer.warmup_steps 0 --stage.rl.fleet.seed_window_s 0.1
 --stage.rl.engine.batch_invariant true --stage.rl.batch.prompts 8 --stage.rl.batch.minibatches 2
 --stage.rl.trainer.steps 4 --stage.rl.eval.prompts 16 --stage.rl.eval.every_steps 2 --stage.rl.algorithm.credit gigpo
 --stage.rl.checkpoint.every_steps 2"""
RLHF = """tidemill train @rlhf --run.dir run --model.source char --model.char.alphabet '0123456789+=\n'
 --model.char.hidden_size 32 --model.char.layers 2 --task.digits 1 --task.largest 9 --task.shots 0 --trainer.threads 1
 --stage.sft.supervised.epochs 20 --stage.sft.optimizer.learning_rate 3e-3 --stage.rm.supervised.epochs 1
 --stage.ppo.critic.warmup_steps 2 --stage.ppo.trainer.steps 4 --stage.ppo.batch.prompts 4
 --stage.ppo.optimizer.learning_rate 1e-4 --stage.measure.eval.samples_per_prompt 2"""
RECIPES = (
    *(
        "calc-tool",
        "char-addition",
        "code-tests",
        "guess",
        "hacked",
        "jsonl",
        "python-tool",
        "ray-local",
        "reasoning-gym",
    ),
    *("rlhf", "robot", "shards-local", "smollm2-addition", "smollm2-lora", "spot-market", "spot-trace", "vllm-local"),
)
LORA = (
    f"{SMALL_RUN} --model.lora.rank 4 --algorithm.kl_beta 0.05",
    "tidemill model merge run merged --json",
    "tidemill export run exported --dtype bf16",
)
EVALUATED_ROWS = (
    f"{SMALL_RUN} @lines.toml --batch.sampler benchmarks.standard_functions:least_visited",
    "tidemill eval --checkpoint run --eval.samples_per_prompt 4 --json",
    "tidemill generate 1+2= 3+4= --checkpoint run --json",
)
TOOL_RUN = (
    "python -m benchmarks.standard_functions chat",
    "tidemill train @small.toml @tools.toml --run.dir run",
)
SIMULATIONS = (
    "tidemill simulate @rlboost-14b --trainer.steps 3 --json",
    *(f"python -m tests.fault_simulation --seed {seed} --log" for seed in (3, 7)),
)
PLANS = (
    "tidemill plan memory --params 70e9 --algorithm ppo --gpu h100-80gb --json",
    "tidemill plan weights --params 70e9 --dtype bf16 --link-gbps 400 --step-s 10 --json",
    "tidemill plan placement --params 14e9 --machines rlboost-8xh100:1 --preemptible rlboost-2xh100:2 --json",
    "tidemill plan run @char-addition --machines rlboost-8xh100:1 --params 14e9 --seeds 2 --json",
)
DAPO = "--algorithm.name dapo --algorithm.overlong_buffer_tokens 2 --batch.group_size 2"
PPO = f"{SMALL_RUN} --algorithm.name ppo"

RUNS: dict[str, StandardRun] = {
    "grpo": StandardRun((LONG,)),
    "grpo-killed": StandardRun((f"killed {LONG}", LONG), moves=True, needs="resume"),
    "dapo": StandardRun((f"{SMALL_RUN} {DAPO}",)),
    "ppo-value-head": StandardRun((f"{PPO} --critic.kind shared",)),
    "ppo-critic": StandardRun((f"{PPO} --critic.kind own --critic.learning_rate 1e-3",)),
    "reference": StandardRun((f"{SMALL_RUN} --algorithm.kl_beta 0.1 --algorithm.kl_target 0.01 --batch.epochs 2",)),
    "gspo": StandardRun((f"{SMALL_RUN} --algorithm.name gspo --algorithm.proximal rollout",)),
    "lora": StandardRun(LORA),
    "rows": StandardRun(EVALUATED_ROWS),
    "python": StandardRun(("python -m benchmarks.standard_functions",)),
    "lag": StandardRun((LAG,)),
    "lag-evicted": StandardRun((f"{LAG} {ON_TRACE}",), moves=True, needs="eviction"),
    "guess": StandardRun((GUESS,), moves=True, needs="eviction"),
    "tools": StandardRun(TOOL_RUN, moves=True),
    "rlhf": StandardRun((RLHF,)),
    "preferences": StandardRun(("tidemill train @small.toml @preferences.toml --run.dir run",)),
    "ray": StandardRun((CLUSTER,)),
    "ray-workers": StandardRun((f"{CLUSTER} {OFTEN_MOVED}",), moves=True, needs="join"),
    "ray-shards": StandardRun((f"{CLUSTER} --trainer.shards 2 --batch.microbatch_tokens 64",)),
    "recipes": StandardRun(tuple(f"tidemill train @{name} --dry-run --json" for name in RECIPES)),
    "simulation": StandardRun(SIMULATIONS),
    "plans": StandardRun(PLANS),
}
SAME = {"grpo-killed": "grpo", "lag-evicted": "lag", "ray-workers": "ray"}
"""Runs whose samples and weights are those of another."""
