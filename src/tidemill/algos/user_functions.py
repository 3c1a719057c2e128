"""User advantages, policy losses and loss terms: called by argument name, with checked results."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tidemill.algos.advantages import Scope
from tidemill.core.errors import UserError
from tidemill.extensions.registry import Extension, resolve
from tidemill.extensions.results import placed, raised, shown, wrong_result
from tidemill.extensions.signature import Wanted, check_offered, wanted_arguments

DoubleArray = npt.NDArray[np.float64]
ADVANTAGE_INPUTS = ("rewards", "valid", "lengths", "truncated", "components", "step", "group")
LOSS_INPUTS = (
    "logprobs", "proximal_logprobs", "rollout_logprobs", "ref_logprobs", "advantages", "mask", "sample_index",
    "clip_low", "clip_high", "step",
)  # fmt: skip
ADVANTAGE_WHERE = "algorithm.advantage"


@dataclass(frozen=True, slots=True, kw_only=True)
class UserAdvantage:
    """A user function from rewards to advantages."""

    extension: Extension
    wanted: Wanted

    @property
    def scope(self) -> Scope:
        scope: Scope = self.extension.options.get("scope", "group")
        return scope

    def __call__(self, *, lengths: Sequence[int], **inputs: Any) -> list[float | DoubleArray]:
        """The advantages of S samples: one number each, or one array float64 [T] with a number per trained token.

        Args:
            lengths: trained tokens of each sample.
            inputs: the other arguments of `ADVANTAGE_INPUTS`. Tensors [S].

        Raises:
            UserError: the function raised, or returned something else.
        """
        values = self.wanted.choose({**inputs, "lengths": torch.tensor(lengths)})
        what = f"advantage {self.extension.name}"
        with _double():
            result = _call(self.extension.function, values, what=what, where=ADVANTAGE_WHERE)
        try:
            rows = _rows(result, len(lengths))
            return [_checked_row(row, length) for row, length in zip(rows, lengths, strict=True)]
        except WrongAdvantagesError as error:
            expected = (
                "return one number per sample, in order, or a list with one array per sample (a number per token)"
            )
            raise wrong_result(
                what, self.extension.function, f"returned {error}", where=ADVANTAGE_WHERE, expected=expected
            ) from None


class WrongAdvantagesError(Exception):
    """What a function returned instead of advantages."""


@contextmanager
def _double() -> Iterator[None]:
    """Make new tensors float64, as the rewards are: `torch.zeros(n)[valid] = rewards[valid]` needs equal types."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def user_advantage(ref: str) -> UserAdvantage:
    """Raises UserError: the function does not exist or takes other arguments."""
    extension = resolve(ref, "advantage", where=ADVANTAGE_WHERE)
    called = f"{extension.name}({', '.join(ADVANTAGE_INPUTS[:2])})"
    wanted = wanted_arguments(extension.function, called=called, where=ADVANTAGE_WHERE)
    offered = ADVANTAGE_INPUTS if extension.options.get("scope") == "batch" else ADVANTAGE_INPUTS[:-1]
    check_offered(wanted, offered, name=placed(extension.name, extension.function), where=ADVANTAGE_WHERE)
    return UserAdvantage(extension=extension, wanted=wanted)


def _rows(result: Any, samples: int) -> Sequence[Any]:
    """Raises WrongAdvantagesError: it is not a sequence with an element per sample."""
    rows: Any
    if isinstance(result, Tensor):
        rows = result.detach().cpu() if result.ndim else None
    elif isinstance(result, np.ndarray):
        rows = result if result.ndim else None
    else:
        rows = result if isinstance(result, (list, tuple)) else None
    if rows is None:
        raise WrongAdvantagesError(f"{shown(result)}, for {samples} samples")
    if len(rows) != samples:
        raise WrongAdvantagesError(f"{len(rows)} values for {samples} samples")
    return rows.tolist() if isinstance(rows, (Tensor, np.ndarray)) and rows.ndim == 1 else list(rows)


def _checked_row(row: Any, length: int) -> float | DoubleArray:
    """Raises WrongAdvantagesError: it is neither a finite number nor an array of them with an element per token."""
    if isinstance(row, float) and math.isfinite(row):
        return row
    try:
        if isinstance(row, Tensor):
            row = row.detach().cpu()
            row = row.numpy() if row.is_complex() else row.double().numpy()  # bfloat16 has no array
        values = np.asarray(row)
        if values.dtype.kind not in "biuf":
            raise WrongAdvantagesError(f"{shown(row)} for a sample")
        values = values.astype(np.float64)
    except (TypeError, ValueError):
        raise WrongAdvantagesError(f"{shown(row)} for a sample") from None
    if values.ndim == 0 and np.isfinite(values):
        return float(values)
    if values.shape not in ((), (length,)):
        raise WrongAdvantagesError(f"an array of shape {list(values.shape)} for a sample of {length} tokens")
    if not np.isfinite(values).all():
        raise WrongAdvantagesError("a value that is not finite")
    return values


@dataclass(frozen=True, slots=True, kw_only=True)
class UserLoss:
    """A user function from per-token tensors to the loss of every token."""

    extension: Extension
    kind: Literal["loss", "loss_term"]
    where: str
    wanted: Wanted
    weight: float = 1.0

    def __call__(self, inputs: dict[str, Any]) -> Tensor:
        """float [T] with gradient.

        Args:
            inputs: the arguments of `LOSS_INPUTS`. Tensors [T]; `ref_logprobs` is None without a reference model.

        Raises:
            UserError: the function raised, or returned something else.
        """
        what = f"{self.kind.replace('_', ' ')} {self.extension.name}"
        result = _call(self.extension.function, self.wanted.choose(inputs), what=what, where=self.where)
        if (fault := _loss_fault(result, inputs["logprobs"])) is not None:
            hint = f"return one loss per token, computed from `logprobs` with torch: {shown(inputs['logprobs'])} here"
            raise wrong_result(what, self.extension.function, fault, where=self.where, expected=hint)
        loss: Tensor = result
        return loss


def _loss_fault(result: Any, logprobs: Tensor) -> str | None:
    """What is wrong with the result of a loss, as a verb and its object; None if nothing is."""
    if not isinstance(result, Tensor) or result.shape != logprobs.shape:
        return f"returned {shown(result)}"
    if result.device != logprobs.device:
        return f"returned a tensor on {result.device}, and the others are on {logprobs.device}"
    if logprobs.requires_grad and not result.requires_grad:
        return "returned a tensor that has no gradient"
    if not bool(torch.isfinite(result.detach()).all()):
        return "returned a value that is not finite"
    return None


def user_loss(
    ref: str, kind: Literal["loss", "loss_term"], *, where: str, weight: float = 1.0, has_reference: bool
) -> UserLoss:
    """Raises UserError: the function does not exist, takes other arguments, or needs a reference model, and there is
    none."""
    extension = resolve(ref, kind, where=where)
    called = f"{extension.name}(logprobs, advantages)"
    wanted = wanted_arguments(extension.function, called=called, where=where)
    check_offered(wanted, LOSS_INPUTS, name=placed(extension.name, extension.function), where=where)
    if "ref_logprobs" in wanted.required and not has_reference:
        what = f"{extension.name} takes ref_logprobs, and the run has no reference model"
        raise UserError(what, where=where, hint="set algorithm.kl_beta above 0, which loads one, or drop the argument")
    return UserLoss(extension=extension, kind=kind, where=where, wanted=wanted, weight=weight)


def _call(function: Callable[..., Any], values: dict[str, Any], *, what: str, where: str) -> Any:
    """Raises UserError: the function raised."""
    try:
        return function(**values)
    except (Exception, SystemExit) as error:
        raise raised(what, function, error, where=where) from error
