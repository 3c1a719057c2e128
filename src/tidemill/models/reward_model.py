"""A scalar head over a model's hidden states: reward models and critics on disk.

config.json, model.safetensors, tokenizer files   the language model, which loads without its head as ever
head.safetensors                                  the head
tidemill.json                                     what the folder is, and which vocabulary it was trained with
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
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from tidemill.core.errors import UserError
from tidemill.core.records import Record, decode_json
from tidemill.models.attention import TreePlan, hidden_states
from tidemill.models.catalog import whole_model
from tidemill.models.codec import TextCodec, load_codec
from tidemill.models.folder import DESCRIPTION, read_header
from tidemill.models.loading import load_model
from tidemill.models.token_tree import Tokens, build_tree

HEAD = "head.safetensors"
FORMAT = 1

HeadKind: TypeAlias = Literal["reward_model", "value_model"]
Pooling: TypeAlias = Literal["last_token", "every_token"]


class HeadDescription(Record):
    """What tidemill.json says."""

    kind: HeadKind
    pooling: Pooling  # which hidden states the head was trained on
    hidden_size: int
    vocabulary_digest: str  # `TextCodec.vocabulary_digest` of the tokenizer whose ids it was trained on
    format: int = FORMAT


class ScalarHead(nn.Module):
    """One number per hidden state: weight · hidden + bias, in float32 whatever the model computes in.

    Args:
        hidden_size: of the model.
        std: deviation of the initial weights. 0 makes every number 0, as a value head should begin: what it is
            subtracted from is then the return itself.
        seed: of those weights; equal seeds, equal bytes on every processor.
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
    """Write the head and the description into a folder that has, or will have, its model.

    Raises:
        OSError: the disk is full or the folder is not writable.
    """
    description = HeadDescription(
        kind=kind, pooling=pooling, hidden_size=head.hidden_size, vocabulary_digest=vocabulary_digest
    )
    save_file({name: tensor.contiguous() for name, tensor in head.state_dict().items()}, folder / HEAD)
    (folder / DESCRIPTION).write_bytes(msgspec.json.format(msgspec.json.encode(description)) + b"\n")


def copy_head(source: Path, target: Path) -> None:
    """Bring a head into another folder with the same model; nothing happens where there is none."""
    for name in (HEAD, DESCRIPTION):
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def read_description(folder: Path, kind: HeadKind) -> HeadDescription:
    """What the folder says it is.

    Raises:
        UserError: it is something else than a `kind`, or its description cannot be read.
    """
    words, path = kind.replace("_", " "), folder / DESCRIPTION
    try:
        description = decode_json(path.read_bytes(), HeadDescription)
    except FileNotFoundError as error:
        raise UserError(
            f"the folder is no {words}: it has no {DESCRIPTION}",
            where=str(folder),
            hint=f"give the output of a stage that trains a {words}",
        ) from error
    except (OSError, msgspec.DecodeError) as error:
        raise UserError(
            f"the description of the {words} cannot be read: {error}", where=str(path), hint="copy the folder again"
        ) from error
    if description.kind != kind:
        raise UserError(
            f"the folder holds a {description.kind.replace('_', ' ')}, and a {words} is needed",
            where=str(folder),
            hint=f"give the output of a stage that trains a {words}",
        )
    if description.format != FORMAT:
        raise UserError(
            f"format {description.format} of the head is not known to this version, which reads {FORMAT}",
            where=str(path),
            hint="use the version of Tidemill that wrote it",
        )
    return description


def load_head(folder: Path, kind: HeadKind, *, device: torch.device) -> tuple[ScalarHead, HeadDescription]:
    """The head of a folder.

    Raises:
        UserError: the folder is no `kind`, or a file is missing, torn or of another model.
    """
    description, path = read_description(folder, kind), folder / HEAD
    shapes = {name: tensor.shape for name, tensor in read_header(path).items()}
    head = ScalarHead(description.hidden_size)
    expected = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
    if shapes != expected:
        raise UserError(
            f"the head has {shapes} where its description promises {expected}",
            where=str(path),
            hint="copy the folder again",
        )
    head.load_state_dict(load_file(path))
    head.to(device)
    return head, description


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModel:
    """The score of a sequence is the head's number at its last token."""

    model: PreTrainedModel
    head: ScalarHead
    description: HeadDescription


def load_reward_model(folder: Path, *, device: torch.device, dtype: torch.dtype = torch.float32) -> RewardModel:
    """A reward model, frozen, in eval mode.

    Raises:
        UserError: the folder is no reward model, or a file of it is missing, damaged or of another model.
    """
    head, description = load_head(folder, "reward_model", device=device)
    model = load_model(whole_model(folder, progress=lambda _: None), device=device, dtype=dtype)
    check_head_fits(model, head, folder)
    model.requires_grad_(False)
    head.requires_grad_(False)
    return RewardModel(model=model, head=head, description=description)


def check_head_fits(model: PreTrainedModel, head: ScalarHead, folder: Path) -> None:
    """Raises UserError: the head was made for another model."""
    width = hidden_size(model)
    if head.hidden_size != width:
        raise UserError(
            f"the head reads hidden states of {head.hidden_size} numbers, and the model's have {width}",
            where=str(folder / HEAD),
            hint="the head and the weights must come from the same folder; copy both again",
        )


def check_same_vocabulary(description: HeadDescription, folder: Path, policy: TextCodec, *, where: str) -> None:
    """Token ids go to the reward model as the policy made them: both must mean the same by them.

    Raises:
        UserError: they do not, or the folder's tokenizer is no longer the one its head was trained with.
    """
    if load_codec(folder).vocabulary_digest != description.vocabulary_digest:
        raise UserError(
            "the reward model's tokenizer is not the one its head was trained with",
            where=str(folder),
            hint="copy the whole folder again",
        )
    if policy.vocabulary_digest != description.vocabulary_digest:
        raise other_tokenizer(where)


def other_tokenizer(where: str) -> UserError:
    """The fault of a reward model that was not made from the policy's model."""
    return UserError(
        "the reward model has another tokenizer than the policy: it would read other words than were written",
        where=where,
        hint="train the reward model from the policy's own model (a reward_model stage), or serve it behind "
        'HTTP with kind = "http", which exchanges text',
    )


def hidden_size(model: PreTrainedModel) -> int:
    """Numbers per hidden state."""
    return int(model.config.get_text_config().hidden_size)


def sequence_scores(model: PreTrainedModel, head: nn.Module, sequences: Sequence[Tokens]) -> tuple[Tensor, int]:
    """Scores float32 [S] of token sequences (int32 [T_s], T_s >= 1), with gradient where enabled; every shared prefix
    is computed once. Also returned: the tokens that were computed."""
    device = next(model.parameters()).device
    tree = build_tree(sequences)
    tokens, positions = (torch.from_numpy(array).to(device) for array in (tree.token_ids, tree.depths))
    last = torch.tensor([int(path[-1]) for path in tree.paths], device=device)
    scores: Tensor = head(hidden_states(model, tokens, positions, TreePlan(tree, device))[last])
    return scores, tree.size
