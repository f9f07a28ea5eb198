"""Each way in which a record could be wrong: what is computed is right all the same.

Tables of functions, by what is dangerous in them. The runner calls each on the first
call and on later ones, and compares it with the function as it is, bit for bit.
"""

import copy
import ctypes
import io
import pickle

import numpy as np
import pytest
import torch
from support.pruning import (
    Cases,
    cases_of,
    dead_end,
    each_case,
    each_policy,
    each_policy_and_way,
    given_up,
    nothing_or_everything,
)
from torch import Tensor


pytestmark = given_up  # some read in another way each time, so that no record fits


# --- In place, and aliases ---


class InPlace(Cases, pruned=True):
    def in_place_on_a_view(x):
        h = x.sin()
        h[:, 0].mul_(3)
        return dead_end(h.exp())

    def assigned_slice(x, w):
        h = x.sin()
        h[:, 0] = w[0]
        h[1] = 2.0
        return dead_end(h * w)

    def assigned_by_mask(x):
        h = x * 2
        h[h > 0] = 0.5
        return dead_end(h * h)

    def relu_in_place(x, w):
        return dead_end(torch.relu_(x @ w) @ w)

    def in_place_after_saved_elsewhere(x):
        h = x.sin()
        y = h.detach().clone()
        h.add_(1)
        y.mul_(h.detach())
        return dead_end((h * y).exp())

    def out_argument(x):
        into = torch.empty(4, 4, dtype=x.dtype)
        torch.sin(x.detach(), out=into)
        return dead_end((x * into).exp())

    def out_argument_overwritten(x):
        into = torch.ones(4, 4, dtype=x.dtype)
        torch.mul(into, x.detach(), out=into)
        torch.add(into, 1, out=into)
        return dead_end(x * into)

    def chunks_in_place(x, w):
        h = x @ w
        for k, part in enumerate(h.detach().chunk(2)):
            part.mul_(k + 1)
        return dead_end(h.exp() * w)

    def split_views(x, w):
        a, b = (x @ w).split(2)
        return dead_end((a * b.sin()).exp())

    def unsafe_chunks_in_place(x, w):
        a, b = (x @ w).unsafe_chunk(2)
        a.mul_(2)
        b.tanh_()
        return dead_end((a * b).exp())

    def strided(x):
        h = x.sin()
        diagonal = h.as_strided((4,), (5,))
        return dead_end(diagonal.exp() * h.as_strided((2, 4), (1, 2), 3).sum())

    def strided_in_place(x):
        h = x.sin() * 1
        h.as_strided((4,), (5,)).mul_(3)
        return dead_end(h.exp())

    def detached_alias(x):
        h = x.sin()
        alias = h.detach()
        alias.mul_(2)
        return dead_end((h * 3).exp())

    def views_of_dead_values(x):
        h = x.sin() * 2
        u, v = h.t(), h.view(2, 8)[:, ::2]
        return (v.reshape(4, 2).t() + u[:2]) * 3 + x.tanh()[:2]

    def in_place_on_dead_values(x):
        h = x.sin() * 2
        h.add_(1)
        h.t()[0].mul_(2)
        h.view(-1)[3:9] += 5
        h[1] = 0.0
        return h + x.tanh()

    def expanded_in_place(x):
        h = x.sin().sum(0)
        table = h.expand(4, 4).clone()
        table.fill_diagonal_(0.5)
        return dead_end(table.exp() * x)

    def swapped_by_copies(x, w):
        a, b = x.sin(), w.cos()
        saved = a.detach().clone()
        a.copy_(b)
        b.detach().copy_(saved)
        return dead_end(a.exp() + b * 2)

    def scattered(x, w):
        index = torch.tensor([[0, 1, 2, 3], [3, 2, 1, 0]])
        h = torch.zeros(4, 4, dtype=x.dtype).scatter_add_(0, index, x[:2].sin())
        h.index_add_(1, torch.tensor([1, 2]), w[:, :2])
        return dead_end(h.exp())

    def split_in_a_hundred(x):
        parts = torch.split(x.flatten().repeat(25)[:400].sin(), 4)
        assert len(parts) == 100
        return dead_end(sum(p.exp().sum() for p in parts[3::7]) + parts[0] * 2)


class InPlaceUnknown(Cases):
    """Whose nodes, if it has any, do not tell what they saved."""

    def set_to_another(x):
        h = x.detach().sin()
        other = torch.empty(0, dtype=x.dtype)
        other.set_(h)
        h.add_(1)
        return dead_end((x * other).exp())

    def resized(x):
        into = torch.zeros(2, dtype=x.dtype)
        into.resize_(4, 4).copy_(x.detach())
        return dead_end((x * into).exp())

    def foreach_in_place(x, w):
        parts = [*torch.split(x.sin(), 1), *torch.split((w * 2).exp(), 1)]
        parts = torch._foreach_mul(parts, 2)
        torch._foreach_add_(parts, 1)
        return dead_end(torch.cat([*parts]).exp())


@pytest.mark.one_in(2)
@each_policy_and_way
@each_case(InPlace, InPlaceUnknown)
def test_an_operation_in_place_or_an_alias(case, policy, way):
    case.check(policy, way)


# --- Memory past operations ---


def kernel(source: int, target: int, count: int) -> None:
    """A raw kernel: doubles what is at one address, and writes it to another."""
    if not (source and target):
        raise RuntimeError("a null pointer")
    read = (ctypes.c_double * count).from_address(source)
    write = (ctypes.c_double * count).from_address(target)
    for k in range(count):
        write[k] = 2 * read[k]


class DataAlias(Cases, pruned=True):
    """Under torch.func torch refuses these, or gives no address."""

    def data_alias(x):
        h = x.sin() * 1
        h.data.mul_(2)
        return dead_end((h * x).exp())


class Raw(Cases):
    def set_to_a_storage(x):
        h = x.detach().sin()
        other = torch.empty(0, dtype=x.dtype)
        other.set_(h.untyped_storage(), 0, (4, 4))
        other.mul_(2)
        return dead_end((x * h).exp())

    def data_exchanged(x):
        h, other = x.detach().sin(), torch.zeros(4, 4, dtype=x.dtype)
        other.data = h
        other.add_(1)
        return dead_end((x * h).exp())

    def raw_kernel(x):
        h, y = x.detach().sin(), torch.empty(4, 4, dtype=x.dtype)
        kernel(h.data_ptr(), y.data_ptr(), h.numel())
        return (x * y).exp()

    def raw_kernel_in_place(x):
        y = x.detach().sin()
        kernel(y.data_ptr(), y.data_ptr(), y.numel())
        return (x * y).exp()

    def raw_kernel_past_the_method(x):
        h, y = x.detach().sin(), torch.empty(4, 4, dtype=x.dtype)
        kernel(Tensor.data_ptr(h), Tensor.data_ptr(y), h.numel())
        return (x * y).exp()

    def numpy_accumulates(x):
        y = torch.zeros(4, 4, dtype=x.dtype)
        y.numpy()[:] += 5
        return (x.sin() * y).exp()


@each_policy
@each_case(DataAlias, Raw)
def test_memory_is_read_and_written_past_operations(case, policy):
    case.check(policy)


# --- Values that Python reads ---


def read(take):
    """A function of which Python reads a value that no operation does."""
    return lambda x: (x * take(x.detach().sin())).exp()


def dumped(h):
    file = io.BytesIO()
    torch.save(h, file)
    file.seek(0)
    return torch.load(file)


def swallowed(h):
    try:
        return float(h.numpy().sum())
    except Exception:  # noqa: BLE001  what a library might do
        return 0.5


READ = {
    "item": lambda h: h.sum().item(),
    "float": lambda h: float(h[0, 0]),
    "int": lambda h: int(h.sum() * 10),
    "bool": lambda h: 2.0 if h.sum() > 0 else 3.0,
    "index": lambda h: [1.0, 2.0, 3.0][(h[0, 0].abs() * 1e-9).long()],
    "format": lambda h: float(f"{h[0, 0]:.3f}"),
    "tolist": lambda h: h.tolist()[1][1],
    "tolist of the class": lambda h: Tensor.tolist(h)[1][1],
    "numpy": lambda h: float(h.numpy().sum()),
    "numpy of the class": lambda h: float(Tensor.numpy(h).sum()),
    "numpy and back": lambda h: torch.from_numpy(h.numpy()),
    "numpy, kept": lambda h: torch.from_numpy(h.numpy().copy()) * 2,
    "asarray": lambda h: float(np.asarray(h).sum()),
    "ufunc": lambda h: float(np.sum(h.numpy())),
    "nonzero": lambda h: float(h.nonzero().shape[0]) + h[0, 0],
    "unique": lambda h: float(len((h * 2).long().unique())),
    "masked_select": lambda h: float(len(h[h > 0])),
    "argmax": lambda h: float(h.argmax()) + 0.5,
    "equal": lambda h: 2.0 if torch.equal(h, h * 1) else 3.0,
    "allclose": lambda h: 2.0 if torch.allclose(h, h + 1e-12) else 3.0,
    "len": lambda h: float(len(h[h.sum(1) > 0])) + 1,
    "rows": lambda h: sum(float(row.sum()) for row in h),
    "max": lambda h: max(h[0, 0], h[1, 1]),
    "sorted": lambda h: sorted(h[0])[1],
    "contains": lambda h: 2.0 if h[0, 0] in h else 3.0,
    "repr": lambda h: float(len(repr(h))),
    "dlpack": lambda h: torch.from_dlpack(h),
    "dlpack capsule": lambda h: torch.utils.dlpack.from_dlpack(
        torch.utils.dlpack.to_dlpack(h)
    ),
    "dlpack to numpy": lambda h: float(np.from_dlpack(h).sum()),
    "storage": lambda h: sum(h[0].clone().untyped_storage().tolist()) / 1e3,
    "storage address": lambda h: (
        ctypes.c_double.from_address(h.untyped_storage().data_ptr()).value
    ),
    "share_memory_": lambda h: h.share_memory_()[0, 0],
    "pickle": lambda h: pickle.loads(pickle.dumps(h)),
    "save": dumped,
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "clone": lambda h: h.clone(),
    "data": lambda h: h.data,
    "as_tensor": lambda h: torch.as_tensor(h),
    "array interface": lambda h: torch.from_numpy(np.array(h.numpy())),
    "bytes": lambda h: torch.frombuffer(bytearray(h.numpy().tobytes()), dtype=h.dtype)[
        0
    ],
    "an exception is swallowed": swallowed,
}
FICKLE = "storage", "deepcopy"  # are given up, which takes some calls


@pytest.mark.one_in(2)
@nothing_or_everything
@each_case(
    cases_of({name: read(READ[name]) for name in READ if name not in FICKLE}),
    cases_of({name: read(READ[name]) for name in FICKLE}, calls=20),
)
def test_python_reads_a_value(case, policy):
    case.check(policy)
