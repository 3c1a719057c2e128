"""A language model with a scalar head that says how good a whole sequence is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tidemill.core.errors import UserError
from tidemill.models.attention import TreePlan, hidden_states
from tidemill.models.catalog import whole_model
from tidemill.models.codec import TextCodec, load_codec
from tidemill.models.heads import HEAD, HeadDescription, ScalarHead, load_head
from tidemill.models.loading import load_model
from tidemill.models.token_tree import Tokens, build_tree


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
            cure="the head and the weights must come from the same folder; copy both again",
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
            cure="copy the whole folder again",
        )
    if policy.vocabulary_digest != description.vocabulary_digest:
        raise other_tokenizer(where)


def other_tokenizer(where: str) -> UserError:
    """The fault of a reward model that was not made from the policy's model."""
    return UserError(
        "the reward model has another tokenizer than the policy: it would read other words than were written",
        where=where,
        cure="train the reward model from the policy's own model (a reward_model stage), or serve it behind "
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
