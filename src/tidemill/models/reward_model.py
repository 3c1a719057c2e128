"""Reward models and critics: a scalar head over a model's hidden states, and its files.

config.json, model.safetensors, tokenizer files   the language model; it loads without the head
head.safetensors                                  the head
tidemill.json                                     the kind of head and the vocabulary it was trained with
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec
import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from tidemill.core.errors import UserError
from tidemill.core.records import Record, decode_json
from tidemill.models.auto import first_line
from tidemill.models.catalog import merged_folder
from tidemill.models.codec import TextCodec, load_codec
from tidemill.models.folder import DESCRIPTION, damaged
from tidemill.models.loading import load_model
from tidemill.models.token_tree import Tokens, build_tree
from tidemill.models.transfer import on_device
from tidemill.models.tree_forward import TreeForward

HEAD = "head.safetensors"
FORMAT = 1

HeadKind: TypeAlias = Literal["reward_model", "value_model"]
Pooling: TypeAlias = Literal["last_token", "every_token"]


class HeadDescription(Record):
    """The content of tidemill.json."""

    kind: HeadKind
    pooling: Pooling  # the hidden states the head was trained on
    hidden_size: int
    vocabulary_digest: str  # `TextCodec.vocabulary_digest` of the tokenizer it was trained with
    format: int = FORMAT


class ScalarHead(nn.Module):
    """One number per hidden state: weight · hidden + bias, in float32 also under autocast.

    Args:
        hidden_size: of the model.
        std: standard deviation of the initial weights. 0 gives an initial value of 0 for every state, as usual for a
            value head: the first advantages are then the returns.
        seed: of the weights; equal seeds give equal bytes on every processor.
    """

    def __init__(self, hidden_size: int, *, std: float = 0.0, seed: int = 0) -> None:
        super().__init__()
        stream = hashlib.blake2b(f"scalar head {seed}".encode(), digest_size=7).digest()
        generator = np.random.Generator(np.random.PCG64(int.from_bytes(stream, "little")))
        values = generator.standard_normal(hidden_size, dtype=np.float32)
        self.weight = nn.Parameter(torch.from_numpy(values) * std)  # one axis: no weight decay
        self.bias = nn.Parameter(torch.zeros(1))

    @property
    def hidden_size(self) -> int:
        return len(self.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        """float32 [N] of hidden states [N, hidden]."""
        with torch.autocast(hidden.device.type, enabled=False):
            return hidden.float() @ self.weight + self.bias


def reward_head(hidden_size: int, *, seed: int = 0) -> ScalarHead:
    """A new reward head: weights of variance 1 / (hidden + 1), as in arXiv 2009.01325, appendix B."""
    return ScalarHead(hidden_size, std=(hidden_size + 1) ** -0.5, seed=seed)


def save_head(folder: Path, head: ScalarHead, *, kind: HeadKind, pooling: Pooling, vocabulary_digest: str) -> None:
    """Write the head and its description into a model's folder.

    Raises:
        OSError: the disk is full or the folder is not writable.
    """
    description = HeadDescription(
        kind=kind, pooling=pooling, hidden_size=head.hidden_size, vocabulary_digest=vocabulary_digest
    )
    save_file({name: tensor.contiguous() for name, tensor in head.state_dict().items()}, folder / HEAD)
    (folder / DESCRIPTION).write_bytes(msgspec.json.format(msgspec.json.encode(description)) + b"\n")


def copy_head(source: Path, target: Path) -> None:
    """Copy a head and its description, if `source` has them, to another folder with the same model."""
    for name in (HEAD, DESCRIPTION):
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def read_description(folder: Path, kind: HeadKind) -> HeadDescription:
    """Read the description of a head of `kind`.

    Raises:
        UserError: the folder holds no head or another kind, or the description is damaged.
    """
    name, path = kind.replace("_", " "), folder / DESCRIPTION
    hint = f"give the output of a stage that trains a {name}"
    try:
        description = decode_json(path.read_bytes(), HeadDescription)
    except FileNotFoundError as error:
        raise UserError(f"not a {name}: the folder has no {DESCRIPTION}", where=str(folder), hint=hint) from error
    except (OSError, msgspec.DecodeError) as error:
        raise damaged(f"the description of the {name} cannot be read: {error}", path) from error
    if description.kind != kind:
        found = description.kind.replace("_", " ")
        raise UserError(f"the folder holds a {found}, expected a {name}", where=str(folder), hint=hint)
    if description.format != FORMAT:
        raise UserError(
            f"the head has format {description.format}; this version reads format {FORMAT}",
            where=str(path),
            hint="use the version of Tidemill that wrote it",
        )
    return description


def load_head(folder: Path, kind: HeadKind, *, device: torch.device) -> tuple[ScalarHead, HeadDescription]:
    """The head of a folder.

    Raises:
        UserError: the folder has no head of `kind`, or a file is missing, damaged or of another size.
    """
    description, path = read_description(folder, kind), folder / HEAD
    head = ScalarHead(description.hidden_size)
    try:
        head.load_state_dict(load_file(path))
    except FileNotFoundError as error:
        raise damaged("the weight file of the head is missing", path) from error
    except (OSError, SafetensorError) as error:
        raise damaged(f"the weight file of the head is damaged ({first_line(error)})", path) from error
    except RuntimeError as error:
        raise damaged("the weights of the head do not fit its description", path) from error
    head.to(device)
    return head, description


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModel:
    """A model and its head; the score of a sequence is the head's output at the last token."""

    model: PreTrainedModel
    head: ScalarHead
    description: HeadDescription


def load_reward_model(folder: Path, *, device: torch.device) -> RewardModel:
    """A frozen reward model in eval mode.

    Raises:
        UserError: the folder holds no reward model, or a file is missing, damaged or of another model.
    """
    head, description = load_head(folder, "reward_model", device=device)
    model = load_model(merged_folder(folder, progress=lambda _: None), device=device)
    check_head_fits(model, head, folder)
    model.requires_grad_(False)
    head.requires_grad_(False)
    return RewardModel(model=model, head=head, description=description)


def check_head_fits(model: PreTrainedModel, head: ScalarHead, folder: Path) -> None:
    """Raises UserError: the head has another hidden size than the model."""
    width = hidden_size(model)
    if head.hidden_size != width:
        raise UserError(
            f"the head has hidden size {head.hidden_size}, and the model {width}",
            where=str(folder / HEAD),
            hint="head and weights must come from the same folder; copy both again",
        )


def check_same_vocabulary(description: HeadDescription, folder: Path, policy: TextCodec, *, where: str) -> None:
    """Raises UserError: the reward model, which reads the policy's token ids, does not have the policy's vocabulary, or
    the folder's tokenizer is not the one its head was trained with."""
    if load_codec(folder).vocabulary_digest != description.vocabulary_digest:
        raise damaged("the reward model's tokenizer is not the one its head was trained with", folder)
    if policy.vocabulary_digest != description.vocabulary_digest:
        raise other_tokenizer(where)


def other_tokenizer(where: str) -> UserError:
    """The error for a reward model with another tokenizer than the policy's."""
    return UserError(
        "the reward model has another tokenizer than the policy and would read other text",
        where=where,
        hint="train the reward model from the policy's own model (a reward_model stage), or serve it behind "
        'HTTP with kind = "http", which exchanges text',
    )


def hidden_size(model: PreTrainedModel) -> int:
    return int(model.config.get_text_config().hidden_size)


def sequence_scores(forward: TreeForward, head: nn.Module, sequences: Sequence[Tokens]) -> tuple[Tensor, int]:
    """Scores float32 [S] of token sequences (int32 [T_s], T_s >= 1), with gradient if enabled.

    Also returns the number of tokens computed: a shared prefix is computed once.
    """
    device = forward.device
    tree = build_tree(sequences)
    last = on_device(np.array([path[-1] for path in tree.paths], np.int64), device)
    scores: Tensor = head(forward(tree, last).states)
    return scores, tree.size
