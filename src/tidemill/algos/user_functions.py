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
from tidemill.core.errors import UserError, exception_text
from tidemill.extensions.registry import Extension, resolve
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
        name = self.extension.name
        values = self.wanted.choose({**inputs, "lengths": torch.tensor(lengths)})
        with _double():
            result = _call(self.extension.function, values, what=f"advantage {name}", where=ADVANTAGE_WHERE)
        rows = _rows(result, name)
        if len(rows) != len(lengths):
            raise _wrong(name, f"returned {len(rows)} values for {len(lengths)} samples")
        return [_checked_row(row, length, name) for row, length in zip(rows, lengths, strict=True)]


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
    check_offered(wanted, offered, name=extension.name, where=ADVANTAGE_WHERE)
    return UserAdvantage(extension=extension, wanted=wanted)


def _rows(result: Any, name: str) -> Sequence[Any]:
    if isinstance(result, Tensor):
        return result.detach().cpu().tolist() if result.ndim == 1 else list(result)
    if isinstance(result, np.ndarray):
        return result.tolist() if result.ndim == 1 else list(result)
    if isinstance(result, (list, tuple)):
        return result
    raise _wrong(name, f"returned a {type(result).__name__}")


def _checked_row(row: Any, length: int, name: str) -> float | DoubleArray:
    if isinstance(row, float) and math.isfinite(row):
        return row
    if isinstance(row, Tensor):
        row = row.detach().cpu().numpy()
    try:
        values = np.asarray(row, np.float64)
    except (TypeError, ValueError):
        raise _wrong(name, f"returned {row!r:.40} for a sample") from None
    if not np.isfinite(values).all():
        raise _wrong(name, "returned a value that is not finite")
    if values.ndim == 0:
        return float(values)
    if values.shape != (length,):
        raise _wrong(name, f"returned an array of shape {list(values.shape)} for a sample of {length} tokens")
    return values


def _wrong(name: str, fault: str) -> UserError:
    hint = "return one number per sample, in order, or a list with one array per sample (one number per token)"
    return UserError(f"advantage {name} {fault}", where=ADVANTAGE_WHERE, hint=hint)


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
        expected = inputs["logprobs"]
        if not isinstance(result, Tensor) or result.shape != expected.shape:
            found = f"a tensor {list(result.shape)}" if isinstance(result, Tensor) else f"a {type(result).__name__}"
            fault, hint = f"returned {found}", f"return one loss per token: a tensor {list(expected.shape)} here"
            raise UserError(f"{what} {fault}", where=self.where, hint=hint)
        if expected.requires_grad and not result.requires_grad:
            hint = "compute it from `logprobs` with torch, without detach or numpy"
            raise UserError(f"{what} has no gradient", where=self.where, hint=hint)
        return result


def user_loss(
    ref: str, kind: Literal["loss", "loss_term"], *, where: str, weight: float = 1.0, has_reference: bool
) -> UserLoss:
    """
    Args:
        has_reference: whether there is a reference model.

    Raises:
        UserError: the function does not exist, takes other arguments, or needs a reference model that is missing.
    """
    extension = resolve(ref, kind, where=where)
    called = f"{extension.name}(logprobs, advantages)"
    wanted = wanted_arguments(extension.function, called=called, where=where)
    check_offered(wanted, LOSS_INPUTS, name=extension.name, where=where)
    if "ref_logprobs" in wanted.required and not has_reference:
        what = f"{extension.name} takes ref_logprobs, and the run has no reference model"
        raise UserError(what, where=where, hint="set algorithm.kl_beta above 0, which loads one, or drop the argument")
    return UserLoss(extension=extension, kind=kind, where=where, wanted=wanted, weight=weight)


def _call(function: Callable[..., Any], values: dict[str, Any], *, what: str, where: str) -> Any:
    try:
        return function(**values)
    except Exception as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        place = f" (line {trace.tb_lineno} of {trace.tb_frame.f_code.co_filename})" if trace is not None else ""
        hint = "correct the function; the run resumes from its last checkpoint"
        raise UserError(f"{what} raised {exception_text(error)}{place}", where=where, hint=hint) from error
