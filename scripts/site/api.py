"""The reference of the Python API: pages for mkdocstrings, which reads the docstrings."""

from __future__ import annotations

import importlib
import inspect

import tidemill
from scripts.site.pages import front_matter

FOLDER = "reference/api"
GROUPS = {
    "training": (
        "Training and runs",
        "Train a model with reinforcement learning, and read the results of a run.",
        ("train", "train_async", "load_config", "Run", "Sample", "Callback", "TidemillError"),
    ),
    "stages": (
        "SFT, reward models and DPO",
        "Supervised training from Python, and data for it.",
        ("sft", "reward_model", "dpo", "demonstrations", "pairs"),
    ),
    "functions": (
        "Rewards, advantages and losses",
        "Decorators that mark your functions, and the built-in rewards.",
        ("reward", "rewards", "advantage", "loss", "loss_term", "task", "prompt_sampler"),
    ),
    "environments": (
        "Environments and tools",
        "Classes for agents: multi-turn environments and tools.",
        ("Environment", "ToolEnvironment", "Step", "tool"),
    ),
    "evaluation": (
        "Evaluation, generation, export",
        "Evaluate, sample from and export a model, and watch a run.",
        ("evaluate", "generate", "export", "watch"),
    ),
}
"""Title, first sentence and names of a page."""


def pages() -> dict[str, str]:
    """The pages by name.

    Raises:
        ValueError: a public name is on no page, or a name on a page is not public.
    """
    grouped = {name for _, _, names in GROUPS.values() for name in names}
    if different := sorted(grouped ^ set(tidemill.__all__)):
        raise ValueError(f"scripts/site/api.py and tidemill.__all__ differ in {', '.join(different)}")
    return {f"{FOLDER}/index.md": index_page()} | {f"{FOLDER}/{page}.md": group_page(page) for page in GROUPS}


def names() -> dict[str, tuple[str, ...]]:
    """The names of the pages, with the public names on them."""
    every = tuple(name for _, _, names in GROUPS.values() for name in names)
    return {f"{FOLDER}/index.md": every} | {f"{FOLDER}/{page}.md": names for page, (_, _, names) in GROUPS.items()}


def index_page() -> str:
    lines = ["# Python API", "", "Every public name of `import tidemill`. All other modules are private.", ""]
    for page, (title, _, names) in GROUPS.items():
        lines += [f"## [{title}]({page}.md) {{ #{page} }}", "", "| name | what it is |", "|---|---|"]
        lines += [f"| [`tidemill.{name}`]({page}.md#tidemill.{name}) | {first_sentence(name)} |" for name in names]
        lines.append("")
    return "\n".join(lines)


def group_page(page: str) -> str:
    title, sentence, names = GROUPS[page]
    lines = [*front_matter(sentence), f"# {title}", "", sentence, ""]
    for name in names:
        lines += [f"::: tidemill.{name}", ""]
        if name == "rewards":
            lines[-1:] = ["    options:", "      members_order: source", "      show_root_members_full_path: false", ""]
    return "\n".join(lines)


def first_sentence(name: str) -> str:
    """Of the docstring of a public name; for a module, of the module."""
    value = importlib.import_module("tidemill.api.rewards") if name == "rewards" else getattr(tidemill, name)
    paragraph = " ".join((inspect.getdoc(value) or "").partition("\n\n")[0].split())
    sentence, dot, _ = paragraph.partition(". ")
    return (sentence + dot.strip()).replace("|", "\\|")
