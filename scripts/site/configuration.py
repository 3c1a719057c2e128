"""The configuration reference: one page for each section of the schema, written from its keys."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import groupby

from scripts.site.pages import front_matter
from tidemill.cli.key_help import shown_default
from tidemill.config.algorithm import PRESETS
from tidemill.config.foreign_names import foreign_names
from tidemill.config.keys import ITEM, Key, all_keys, dotted, flattened, neutral_keys, resumable_keys, sections
from tidemill.config.search import SYNONYMS
from tidemill.config.toml import write_value

FOLDER = "reference/configuration"
TITLES = {
    "runtime": ("Runtime", "Where the parts of a run live: in one process, or as Ray actors."),
    "run": ("Run", "Name, directory and seed of a run."),
    "model": ("Model and LoRA", "The policy: its source, chat template and LoRA adapter."),
    "task": ("Task and prompts", "Where prompts and answers come from."),
    "data": ("Data of supervised stages", "Demonstrations for SFT, pairs for DPO and reward models."),
    "env": ("Environment of an agent", "The environment of multi-turn samples: its class, limits and processes."),
    "sandbox": ("Sandbox", "Where untrusted code runs, and its limits of memory, time and files."),
    "scoring": ("Rewards", "Reward functions, reward models, judges and their limits."),
    "sampling": ("Sampling", "Length and temperature of completions, and strings that end them."),
    "engine": ("Inference engine", "The engine that generates: its own or vLLM, slots, context and determinism."),
    "pool": ("Pool of preemptible workers", "Where preemptible workers come from: fixed, a trace, a market, or Ray."),
    "fleet": ("Fleet", "How preemptible workers are used: seeding, migration, deadlines, prices."),
    "ray": ("Ray", "The Ray cluster, and the CPUs and GPUs of trainer and workers."),
    "placement": ("Placement of models", "Which models share the trainer's process and which have a Ray actor."),
    "weights": ("Weight transfer", "How a new policy version reaches the workers."),
    "gateway": ("Gateway of `tidemill serve`", "Address, limits and sessions of the HTTP server."),
    "reading": ("Scoring while sampling", "Reward models and the reference process samples while they are generated."),
    "batch": ("Batch", "Prompts, samples per prompt, minibatches, epochs and the size of microbatches."),
    "schedule": ("Schedule and policy lag", "How far generation may run ahead of training."),
    "algorithm": ("Algorithm", "The RL algorithm: preset, advantage, loss, clipping, KL penalty, correction."),
    "supervised": ("Supervised training", "Epochs and batches of SFT, reward models and DPO."),
    "reward_model": ("Reward model training", "The loss of a reward model."),
    "preference": ("Preference optimization (DPO, IPO)", "The loss on pairs of completions."),
    "optimizer": ("Optimizer", "AdamW: learning rate, schedule, weight decay and gradient clipping."),
    "critic": ("Critic", "The value function of PPO."),
    "trainer": ("Trainer", "Length of the training, precision, device, shards and memory."),
    "eval": ("Evaluation", "Held-out prompts, further sets, samples for pass@k, and their rewards."),
    "checkpoint": ("Checkpoints", "How often checkpoints are written and how many are kept."),
    "guard": ("Guards", "What happens when the reward is hacked, the policy diverges or a machine is sick."),
    "telemetry": ("Telemetry", "Live page, logging to TensorBoard, W&B and trackio, alerts, samples files."),
    "data_generation": ("Data generation", "Stages that generate demonstrations or pairs."),
    "export": ("Export", "Folder and data type of an exported model."),
    "robot": ("Robot", "The simulated robot, its task, worlds and randomisation."),
    "control": ("Control (PPO for robots)", "PPO for continuous actions."),
    "clone": ("Behaviour cloning", "Cloning a teacher's actions."),
    "optimise": ("Trajectory optimisation", "Gradients through the simulation of a robot."),
    "identify": ("System identification", "Physical parameters from logs of a robot."),
    "twin": ("Twin", "A check of a robot policy in another simulator and over a grid of parameters."),
    "bundle": ("Bundle", "Files for a robot's computer."),
    "simulation": ("Simulation", "What `tidemill simulate` forecasts: schedules, machines, lengths."),
    "deploy": ("Deployment", "Kubernetes, Slurm, SkyPilot and OSMO."),
}
"""Title and first sentence of a section's page."""
UNITS = (
    ("_usd_per_hour", "dollars per hour"),
    ("usd_per_million_tokens", "dollars per million tokens"),
    ("_usd", "dollars"),
    ("_ms", "milliseconds"),
    ("_s", "seconds"),
    ("seconds", "seconds"),
    ("hours", "hours"),
    ("_gb", "GB"),
    ("_mb", "MB"),
    ("_kb", "KB"),
    ("_tokens", "tokens"),
    ("_steps", "steps"),
)
"""By the end of a key's name."""
WORD = re.compile(r"(?<![\w.`/])([a-z_]+(?:\.[a-z_]+)+)(?![\w`/(])")
CODE = re.compile(r"(`[^`]+`)")
SPECIAL = re.compile(r"[*<\[\]\\]")


def pages() -> dict[str, str]:
    """The pages by name.

    Raises:
        KeyError: a section of the schema has no title.
    """
    by_section = {name: list(keys) for name, keys in groupby(all_keys(), key=lambda key: key.path[0])}
    index = f"{FOLDER}/index.md"
    return {index: index_page(by_section)} | {
        f"{FOLDER}/{name}.md": section_page(name, keys) for name, keys in by_section.items()
    }


def names() -> list[str]:
    """The names of the pages."""
    return [f"{FOLDER}/index.md", *dict.fromkeys(f"{FOLDER}/{key.path[0]}.md" for key in all_keys())]


def index_page(by_section: Mapping[str, Sequence[Key]]) -> str:
    count = len({key.dotted for key in all_keys()})
    lines = [
        *front_matter("Every configuration key of Tidemill, by section."),
        "# Configuration reference",
        "",
        f"The {count} keys of a recipe in {len(by_section)} sections, written from the schema of this version.",
        "A recipe is a TOML file with these sections; on the command line a key is `--section.key value`.",
        "",
        "| section | what it configures |",
        "|---|---|",
    ]
    lines += [f"| [`{name}`]({name}.md) | {TITLES[name][1]} |" for name in by_section]
    lines += [
        "",
        "`tidemill train --help SECTION` prints the same texts, and `tidemill config search WORDS` finds keys, also by",
        "their names in TRL, verl, OpenRLHF and prime-rl.",
    ]
    return "\n".join(lines) + "\n"


def section_page(name: str, keys: Sequence[Key]) -> str:
    title, sentence = TITLES[name]
    lines = [*front_matter(sentence), f"# {title}: `{name}`", "", sentence, ""]
    distinct: dict[tuple[str, ...], list[Key]] = {}
    for key in keys:  # the same key of several variants is not always adjacent
        distinct.setdefault(key.path, []).append(key)
    lines += ["| key | accepts | default |", "|---|---|---|"]
    for path, same in distinct.items():
        short = dotted(path).removeprefix(f"{name}.")
        accepts = cell(accepted(same))
        lines.append(f"| [`{short}`](#{anchor(path)}) | {accepts} | {cell(default(same[0]))} |")
    for path, same in distinct.items():
        lines += ["", f"## `{dotted(path)}` {{ #{anchor(path)} }}", "", *key_lines(same)]
    return "\n".join(lines) + "\n"


def key_lines(same: Sequence[Key]) -> Iterator[str]:
    """The text of one key, which several variants of its section may have."""
    first = same[0]
    unit = unit_of(first)
    facts = [f"**Accepts:** {accepted(same)}", f"**default:** {default(first)}"]
    facts += [f"**unit:** {unit}"] if unit else []
    yield "; ".join(facts) + "."
    kinds = [key.variant for key in same if key.variant]
    if kinds:
        yield ""
        quoted = " or ".join(f'`"{kind}"`' for kind in kinds)
        yield f"Only with `{first.path[0]}.kind` = {quoted}."
    texts = dict.fromkeys(key.doc for key in same if key.doc)
    for text in texts:
        yield ""
        owners = [key.variant for key in same if key.doc == text and key.variant]
        prefix = f"`{owners[0]}`: " if len(texts) > 1 and owners else ""
        yield prefix + linked(text, first)
    if presets := preset_values(first):
        yield ""
        yield f"Presets: {presets}."
    conditions = dict.fromkeys(mark.reason for mark in first.active_if)
    for reason in conditions:
        yield ""
        yield f"Without effect if {linked(reason, first)}."
    if first.dotted in neutral_keys("rl"):
        yield ""
        yield "It does not affect the trained weights and may change when a run is resumed."
    elif first.dotted in resumable_keys():
        yield ""
        yield "It may change when a run is resumed."
    if names := foreign(first.dotted):
        yield ""
        yield f"In other frameworks: {names}."
    if words := SYNONYMS.get(first.dotted):
        yield ""
        yield f'<span class="keywords" data-search>{words}</span>'


def anchor(path: Sequence[str]) -> str:
    """`("scoring", "rewards", "[]", "kind")` as `scoring.rewards.kind`."""
    return ".".join(part for part in path if part != ITEM)


@cache
def anchors() -> dict[str, str]:
    """Dotted keys and sections, as pages write them, with page and anchor below docs/."""
    targets = {}
    for key in all_keys():
        target = f"{FOLDER}/{key.path[0]}.md#{anchor(key.path)}"
        targets[key.dotted] = target
        targets[anchor(key.path)] = target
    for path in sections():
        targets.setdefault(anchor(path), f"{FOLDER}/{path[0]}.md")
    return targets


def accepted(same: Sequence[Key]) -> str:
    """The values that a key accepts, those of all variants."""
    text = " or ".join(dict.fromkeys(key.accepts for key in same)).replace(">=", "≥").replace("<=", "≤")
    return re.sub(r'"[^"]*"', lambda quoted: f"`{quoted[0]}`", text)


def default(key: Key) -> str:
    return "required" if key.required else f"`{shown_default(key)}`"


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def unit_of(key: Key) -> str:
    if not key.is_number:
        return ""
    return next((unit for end, unit in UNITS if key.path[-1].endswith(end)), "")


def preset_values(key: Key) -> str:
    """`` `dapo` sets `0.28` ``: the values of the presets of `algorithm.name`."""
    if key.path[0] != "algorithm":
        return ""
    values = {name: flattened({"algorithm": dict(preset.settings)}).get(key.dotted) for name, preset in PRESETS.items()}
    return ", ".join(f"`{name}` sets `{write_value(value)}`" for name, value in values.items() if value is not None)


def foreign(key: str) -> str:
    """The names that other frameworks have for a key."""
    names: dict[str, dict[str, None]] = {}
    for name in foreign_names():
        if key in name.ours and not name.name.endswith("*"):
            names.setdefault(name.framework, {})[name.shown] = None
    return "; ".join(
        f"{framework} {', '.join(f'`{name}`' for name in list(of_framework)[:4])}"
        for framework, of_framework in names.items()
    )


def linked(text: str, key: Key) -> str:
    """A docstring as Markdown, with links to the keys that it names."""

    def link(word: re.Match[str]) -> str:
        target = anchors().get(word[1])
        if target is None or word[1] == key.dotted:
            return word[0]
        return f"[`{word[1]}`]({target.removeprefix(f'{FOLDER}/')})"

    parts = CODE.split(text)  # code at odd places
    return "".join(
        part if number % 2 else WORD.sub(link, SPECIAL.sub(r"\\\g<0>", part)) for number, part in enumerate(parts)
    )
