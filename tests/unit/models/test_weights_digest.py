"""The digest of weights: every change changes it; devices, ranks and memory layout do not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.model_shapes import llama
from tidemill.models import weights_digest as module
from tidemill.models.weights_digest import bit_sum, weights_digest

M64 = 2**64
GOLDEN = 0x9E3779B97F4A7C15
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
FEW_VALUES = st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, 2.0])


class Parameters(nn.Module):
    def __init__(self, **tensors: Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor))


def digest(*tensors: Tensor) -> str:
    return weights_digest(Parameters(**{f"p{at}": tensor for at, tensor in enumerate(tensors)}))


@st.composite
def matrices(draw: st.DrawFn, least: int = 1) -> Tensor:
    """Few different values: most changes move a value to another place."""
    rows, columns = draw(st.integers(least, 5)), draw(st.integers(least, 9))
    values = draw(st.lists(FEW_VALUES, min_size=rows * columns, max_size=rows * columns))
    return torch.tensor(values).view(rows, columns).to(draw(st.sampled_from(DTYPES)))


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def mixed(value: int) -> int:
    """SplitMix64's finalizer, as published."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % M64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % M64
    return value ^ (value >> 31)


def key(number: int) -> int:
    return mixed(number * GOLDEN % M64) | 1


def expected(rows: Sequence[bytes], width: int, start: int = 0) -> int:
    """The sum over rows of words of `width` bytes, in Python's integers."""
    total = 0
    for number, row in enumerate(rows, start):
        words = [int.from_bytes(row[at : at + width], "little", signed=True) for at in range(0, len(row), width)]
        between = [(one >> 32) % 2**32 + (two << 32) for one, two in pairwise(words)]
        hashed = sum(word * key(2 * at + 1) for at, word in enumerate(words))
        hashed += sum(word * key(2 * at + 2) for at, word in enumerate(between))
        total += mixed((hashed + number * GOLDEN) % M64)
    return total % M64


def test_by_hand() -> None:
    # float32, little-endian: 1 = 3f800000, -2 = c0000000; bfloat16: 0.5 = 3f00, 2 = 4000
    matrix = [bytes.fromhex("0000803f 000000c0"), bytes.fromhex("000000c0 0000803f")]
    vector, scalar = [bytes.fromhex("003f"), bytes.fromhex("0040")], [bytes.fromhex("000000c0")]
    total = (expected(matrix, 8) + expected(vector, 2, start=2) + expected(scalar, 4, start=4)) % M64
    text = f"p0\0torch.float32\0(2, 2)\0p1\0torch.bfloat16\0(2,)\0p2\0torch.float32\0()\0{total}\0"
    tensors = (
        torch.tensor([[1.0, -2.0], [-2.0, 1.0]]), torch.tensor([0.5, 2.0], dtype=torch.bfloat16), torch.tensor(-2.0)
    )  # fmt: skip
    assert digest(*tensors) == xxhash.xxh3_128(text.encode()).hexdigest()


@pytest.mark.parametrize(
    ("shape", "dtype", "width"),
    [
        ((300, 4098), torch.float32, 8),  # several blocks, of which the last is smaller
        ((3, 200_001), torch.bfloat16, 2),  # a row wider than a block
        ((4, 33), torch.float32, 4),
        ((4, 6), torch.bfloat16, 4),
        ((5, 3, 7), torch.bfloat16, 2),
        ((3, 5), torch.float8_e4m3fn, 1),
    ],
)
def test_blocks_and_the_widths_of_words_are_those_of_the_definition(
    shape: tuple[int, ...], dtype: torch.dtype, width: int
) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    rows = [bits(row).numpy().tobytes() for row in tensor]
    assert bit_sum([tensor]).item() % M64 == expected(rows, width)


@given(matrices(), st.data())
def test_each_changed_bit_changes_it(tensor: Tensor, data: st.DataObject) -> None:
    changed = tensor.clone()
    flat = changed.view(-1).view(torch.uint8)
    flat[data.draw(st.integers(0, len(flat) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert digest(tensor) != digest(changed)


@given(matrices(least=2), st.data(), st.sampled_from([0, 1]))
def test_swapped_rows_and_columns_change_it(tensor: Tensor, data: st.DataObject, axis: int) -> None:
    one, two = data.draw(st.permutations(range(tensor.shape[axis])))[:2]
    order = list(range(tensor.shape[axis]))
    order[one], order[two] = two, one
    swapped = tensor.index_select(axis, torch.tensor(order))
    same = torch.equal(bits(tensor), bits(swapped))
    assert (digest(tensor) == digest(swapped)) == same


@given(matrices(), matrices())
def test_equal_digests_mean_equal_bits(one: Tensor, two: Tensor) -> None:
    same = one.dtype == two.dtype and one.shape == two.shape and torch.equal(bits(one), bits(two))
    assert (digest(one) == digest(two)) == same
    assert (digest(one, two) == digest(two, one)) == same


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "negated",
    [
        (slice(None), slice(None)), (slice(None), slice(1, None, 2)), (slice(0, 2), slice(1, 4, 2)),
        (slice(None), slice(3, None, 4)), (slice(0, 4), slice(7, 8)),
    ],
    ids=["all", "odd columns", "four in a rectangle", "every fourth column", "one column"],
)  # fmt: skip
@pytest.mark.parametrize("value", [0.0, 1.0, 0.75])
def test_signs_do_not_cancel(value: float, negated: tuple[slice, slice], dtype: torch.dtype) -> None:
    """The highest bit of a word is a sign: an even number of changes would vanish in a plain sum or product."""
    tensor = torch.full((8, 16), value, dtype=dtype)
    changed = tensor.clone()
    changed[negated] *= -1
    assert digest(tensor) != digest(changed)


@given(matrices())
def test_the_operations_for_a_gpu_give_the_same(tensor: Tensor) -> None:
    words = module._words(tensor)
    one, two = torch.randint(-(2**62), 2**62, (2, words.shape[1]))
    keys = (one, two)
    on_gpu, on_cpu = torch.empty(2, len(words), dtype=torch.int64)
    module._hash_on_gpu(words, keys, on_gpu)
    module._hash_on_cpu(words, keys, on_cpu)
    assert torch.equal(on_gpu, on_cpu)


def test_names_dtypes_and_shapes_count() -> None:
    ones, zeros = torch.ones(4), torch.zeros(4)
    base = digest(ones, zeros)
    assert digest(ones.clone(), zeros.clone()) == base
    others = [
        digest(zeros, ones), digest(ones.view(2, 2), zeros), digest(ones, -zeros), digest(ones.double(), zeros),
        digest(ones, zeros, torch.empty(0)), digest(ones, zeros.view(torch.int32).view(torch.float32)[:3]),
        weights_digest(Parameters(p0=ones, renamed=zeros)),
    ]  # fmt: skip
    assert len({base, *others}) == len(others) + 1
    assert digest(torch.zeros(3, 0)) != digest(torch.zeros(0, 3))
    assert digest(torch.zeros(2, dtype=torch.bfloat16)) != digest(torch.zeros(2, dtype=torch.float16))


def test_memory_layout_and_gradients_do_not_count() -> None:
    matrix = torch.arange(6.0).view(2, 3)
    strided, contiguous = Parameters(a=matrix.t()), Parameters(a=matrix.t().contiguous())
    assert weights_digest(strided.requires_grad_(False)) == weights_digest(contiguous)


def test_tied_parameters_count_once() -> None:
    model = Parameters(a=torch.ones(2), b=torch.ones(2))
    model.b = model.a
    assert weights_digest(model) == weights_digest(Parameters(a=torch.ones(2)))


def test_the_number_of_threads_does_not_count() -> None:
    model, threads = llama(), torch.get_num_threads()
    found = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            found.append(weights_digest(model))
    finally:
        torch.set_num_threads(threads)
    assert found[0] == found[1]


@dataclass
class Mesh:
    size_: int
    rank: int

    def size(self) -> int:
        return self.size_

    def get_local_rank(self) -> int:
        return self.rank


class Shard:
    """What `local_rows` reads of a sharded parameter; split as `torch.chunk` splits."""

    def __init__(self, whole: Tensor, size: int, rank: int) -> None:
        self._whole, self.device_mesh = whole, Mesh(size, rank)
        self.shape, self.dtype, self.ndim, self.device = whole.shape, whole.dtype, whole.ndim, whole.device

    def __len__(self) -> int:
        return len(self._whole)

    def to_local(self) -> Tensor:
        chunks = self._whole.chunk(self.device_mesh.size_)
        return chunks[self.device_mesh.rank] if self.device_mesh.rank < len(chunks) else self._whole[:0]


@dataclass
class OneOf:
    """One of several ranks that takes the values of the others from a list; implements `Ranks`."""

    size: int
    index: int
    values: list[bytes]

    def gather(self, value: bytes) -> list[bytes]:
        self.values[self.index] = value
        return self.values

    def all_sum(self, values: Tensor) -> Tensor:
        raise NotImplementedError

    def barrier(self) -> None:
        raise NotImplementedError


@given(st.lists(matrices(), min_size=1, max_size=3), st.integers(1, 7), st.booleans())
def test_the_number_of_ranks_does_not_count(tensors: list[Tensor], size: int, whole_too: bool) -> None:
    values = [b"\0" * 8] * size
    replicated: Any = {"head": torch.tensor([1.0, -2.0, 3.0]), "scale": torch.tensor(0.5)} if whole_too else {}
    found = ""
    for index in range(size):
        sharded: Any = {f"p{at}": Shard(tensor, size, index) for at, tensor in enumerate(tensors)}
        found = module._digest(sharded | replicated, OneOf(size, index, values))
    alone = Parameters(**{f"p{at}": tensor for at, tensor in enumerate(tensors)}, **replicated)
    assert found == weights_digest(alone)


class HostCopies(TorchDispatchMode):
    """Records the bytes that operations take from a GPU to the host."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sources = [each for each in args if isinstance(each, Tensor)]
        if isinstance(result, Tensor) and result.device.type == "cpu" and any(each.is_cuda for each in sources):
            self.nbytes.append(result.nbytes)
        return result


def test_only_one_number_leaves_a_gpu() -> None:
    shapes = [parameter.shape for parameter in llama().parameters()]
    with FakeTensorMode():
        tensors = [torch.empty(shape, device="cuda") for shape in shapes]
        tensors += [torch.empty(40, 33, device="cuda", dtype=torch.bfloat16), torch.empty((), device="cuda")]
        with HostCopies() as copies:
            total = bit_sum(tensors)  # `.item()` in it would raise: the values are not known
            assert copies.nbytes == []
            total.cpu()
    assert (total.device.type, total.shape) == ("cuda", ())
    assert copies.nbytes == [8]
