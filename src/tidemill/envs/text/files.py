"""A task of prompts and answers from files."""

from __future__ import annotations

from functools import partial

from tidemill.config.task import FileTask, JsonlTask
from tidemill.envs.text.content import content_digest
from tidemill.envs.text.data.schemas import read_items
from tidemill.envs.text.data.sides import read_sides
from tidemill.envs.text.prompts import ListedSource, Render
from tidemill.envs.text.task import Task, longest_of


def build_files(config: FileTask | JsonlTask, *, batch_prompts: int, seed: int, render: Render) -> Task:
    """The task of one file, or of a training and an evaluation file.

    Raises:
        UserError: naming file and row, when a file cannot be read or has too little in it.
    """
    read = partial(read_items, data_format=config.format)
    sides = read_sides(read, config.path, config.held_out_path, config.held_out_fraction, section="task")
    train, held_out = sides.train, sides.held_out
    return Task(
        source=ListedSource(train, held_out, batch_prompts=batch_prompts, seed=seed, render=render),
        default_stop_strings=(),
        check=None,
        train_size=len(train),
        held_out_size=len(held_out),
        longest=longest_of([*train, *held_out], render),
        digest=content_digest(train, held_out),
        description=f"{config.path.name}" + (f" (left out of training: {sides.left_out})" if sides.left_out else ""),
    )
