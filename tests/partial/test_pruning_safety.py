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
    W,
    X,
    assert_exact,
    cases_of,
    dead_end,
    each_case,
    each_policy,
    each_policy_and_way,
    given_up,
    nothing_or_everything,
    strikes,
    total,
    written,
)
from support.tables import rows
from support.zoo import leaves_of, make, ops_of, scalar
from torch import Tensor

from remat import remat
from remat.testing import assert_same, count_ops


pytestmark = given_up  # some read in another way each time, so that no record fits


# --- In place, and aliases ---


IN_PLACE = """
a slice assigned: h = x.sin(); h[:, 0] = w[0]; h[1] = 2.0; dead_end(h * w)
a mask assigned: h = x * 2; h[h > 0] = 0.5; dead_end(h * h)
relu_: dead_end(torch.relu_(x @ w) @ w)
after it was saved elsewhere: h = x.sin(); y = h.detach().clone(); h.add_(1)
    y.mul_(h.detach()); dead_end((h * y).exp())
out=: into = torch.empty(4, 4, dtype=x.dtype); torch.sin(x.detach(), out=into)
    dead_end((x * into).exp())
out= of what it reads: into = torch.ones(4, 4, dtype=x.dtype)
    torch.mul(into, x.detach(), out=into); torch.add(into, 1, out=into)
    dead_end(x * into)
chunks: h = x @ w; [part.mul_(k) for k, part in enumerate(h.detach().chunk(2), 1)]
    dead_end(h.exp() * w)
parts: a, b = (x @ w).split(2); dead_end((a * b.sin()).exp())
unsafe chunks: a, b = (x @ w).unsafe_chunk(2); a.mul_(2); b.tanh_()
    dead_end((a * b).exp())
strided: h = x.sin(); diagonal = h.as_strided((4,), (5,))
    dead_end(diagonal.exp() * h.as_strided((2, 4), (1, 2), 3).sum())
strided, changed: h = x.sin() * 1; h.as_strided((4,), (5,)).mul_(3); dead_end(h.exp())
a detached alias: h = x.sin(); h.detach().mul_(2); dead_end((h * 3).exp())
views of dead values: h = x.sin() * 2; u, v = h.t(), h.view(2, 8)[:, ::2]
    (v.reshape(4, 2).t() + u[:2]) * 3 + x.tanh()[:2]
dead values: h = x.sin() * 2; h.add_(1); h.t()[0].mul_(2); h.view(-1)[3:9] += 5
    h[1] = 0.0; h + x.tanh()
swapped: a, b = x.sin(), w.cos(); saved = a.detach().clone(); a.copy_(b)
    b.detach().copy_(saved); dead_end(a.exp() + b * 2)
scattered: index = torch.tensor([[0, 1, 2, 3], [3, 2, 1, 0]])
    h = torch.zeros(4, 4, dtype=x.dtype).scatter_add_(0, index, x[:2].sin())
    h.index_add_(1, torch.tensor([1, 2]), w[:, :2]); dead_end(h.exp())
a hundred parts: parts = torch.split(x.flatten().repeat(25)[:400].sin(), 4)
    dead_end(sum(p.exp().sum() for p in parts[3::7]) + parts[0] * 2)
"""
# Whose nodes, if it has any, do not tell what they saved.
IN_PLACE_UNKNOWN = """
set_: h = x.detach().sin(); other = torch.empty(0, dtype=x.dtype); other.set_(h)
    h.add_(1); dead_end((x * other).exp())
resize_: into = torch.zeros(2, dtype=x.dtype)
    into.resize_(4, 4).copy_(x.detach()); dead_end((x * into).exp())
foreach: parts = [*torch.split(x.sin(), 1), *torch.split((w * 2).exp(), 1)]
    parts = torch._foreach_mul(parts, 2); torch._foreach_add_(parts, 1)
    dead_end(torch.cat([*parts]).exp())
"""


@pytest.mark.one_in(2)
@each_policy_and_way
@each_case(
    written(IN_PLACE, globals(), pruned=True), written(IN_PLACE_UNKNOWN, globals())
)
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


# Under torch.func torch refuses these, or gives no address.
DATA = """
data: h = x.sin() * 1; h.data.mul_(2); dead_end((h * x).exp())
"""
RAW = """
a storage: h = x.detach().sin(); other = torch.empty(0, dtype=x.dtype)
    other.set_(h.untyped_storage(), 0, (4, 4)); other.mul_(2); dead_end((x * h).exp())
data exchanged: h, other = x.detach().sin(), torch.zeros(4, 4, dtype=x.dtype)
    other.data = h; other.add_(1); dead_end((x * h).exp())
a kernel: h, y = x.detach().sin(), torch.empty(4, 4, dtype=x.dtype)
    kernel(h.data_ptr(), y.data_ptr(), h.numel()); (x * y).exp()
a kernel in place: y = x.detach().sin()
    kernel(y.data_ptr(), y.data_ptr(), y.numel()); (x * y).exp()
past the method: h, y = x.detach().sin(), torch.empty(4, 4, dtype=x.dtype)
    kernel(Tensor.data_ptr(h), Tensor.data_ptr(y), h.numel()); (x * y).exp()
NumPy: y = torch.zeros(4, 4, dtype=x.dtype); y.numpy()[:] += 5; (x.sin() * y).exp()
"""


@each_policy
@each_case(written(DATA, globals(), pruned=True), written(RAW, globals()))
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


# --- Tensors that are no strided floating-point numbers, and all kinds of results ---


KINDS = """
views of complex: z = torch.view_as_complex(x.view(4, 2, 2) * 1); z.mul_(2j)
    dead_end(torch.view_as_real(z.exp()))
integers: index = (x.detach() * 10).long(); order = index.flatten().argsort()
    y = dead_end(x.flatten()[order].exp() * torch.arange(16)); (y, order, index > 0)
no dimensions: h = x.sum().sin() * 2; (dead_end(x * h), dead_end(h.exp()))
low precision: h = x.to(torch.bfloat16)
    dead_end((h.float() @ h.half().float()).exp().double() * x)
sorts: values, order = x.sin().sort(1); best, where = values.topk(2)
    (dead_end(values.exp() + order) * best.sum(), where, x.max(0))
"""
KINDS_PERHAPS_NOT_PRUNED = """
sparse: s = torch.eye(4, dtype=x.dtype).to_sparse()
    dead_end((torch.sparse.mm(s, x.sin()) * x).exp())
sparse input: dead_end(torch.sparse.sum((x * 2).to_sparse(), 1).to_dense().exp() * x)
csr: s = torch.eye(4, dtype=x.dtype).to_sparse_csr()
    dead_end(((s @ x.sin()) * x).exp())
lazily conjugated: z = torch.complex(x, x.sin()); h = z.conj() * z.exp() + (z @ z.mH)
    dead_end(h.real.exp() + h.imag + h.abs())
lazily negated: z = torch.complex(x, x.cos()).conj()
    dead_end((z.imag * x).exp() + z.imag)
quantized: q = torch.quantize_per_tensor(x.detach().float(), 0.1, 0, torch.qint8)
    dead_end((x * q.dequantize()).exp())
empty: nothing = x[:0].sin() * 2
    (dead_end(torch.cat([nothing, x]).exp()), nothing.sum(), nothing)
"""


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@each_policy
@each_case(
    written(KINDS, globals(), pruned=True), written(KINDS_PERHAPS_NOT_PRUNED, globals())
)
def test_tensors_are_no_strided_numbers(case, policy):
    case.check(policy)


@each_policy
def test_an_input_is_sparse(policy):
    fn = lambda s, x: dead_end((torch.sparse.mm(s, x) * x).exp())
    ours = remat(fn, policy=policy, prune=True)

    def gradients(fn, call):
        s = make(4, 4, seed=call).relu().to_sparse().requires_grad_(call % 2 == 0)
        (x,) = leaves_of(X)
        wanted = (s, x) if s.requires_grad else (x,)
        return [g.to_dense() for g in torch.autograd.grad(fn(s, x).sum(), wanted)]

    for call in range(5):
        assert_same(gradients(ours, call), gradients(fn, call))


@each_policy
def test_an_input_is_complex(policy):
    fn = lambda z: dead_end((z.conj() * z.exp()).abs() + z.imag)

    def gradient(fn, z):
        leaf = z.detach().clone().requires_grad_()
        view = leaf.conj() if z.is_conj() else leaf
        return torch.autograd.grad(scalar(fn(view)), leaf)

    z = torch.complex(X, W)
    for at in (z, z.conj(), z.mH):
        ours = remat(fn, policy=policy, prune=True)
        for _ in range(4):
            assert_same(gradient(ours, at), gradient(fn, at))


def results(x, w):
    h = x.sin() * w
    return {
        "input": x,
        "view": w.t(),
        "views": h.split(2),
        "none": None,
        "list": [h.exp().sin(), [dead_end(h)]],
        "integers": (h.argmax(), 3, "text"),
        "detached": h.detach(),
        "empty": h[:0],
        "again": h,
        "constant": torch.ones(2),
    }


@each_policy_and_way
def test_results_are_of_every_kind(policy, way):
    assert_exact(results, X, W, policy=policy, way=way)


def several(x, w):
    """Results that need different inputs and values."""
    a = torch.tanh(x @ w)
    return a.exp(), dead_end(a), x * 2, w.sin().sin(), (x + w) @ W


SUBSETS = [(0,), (1,), (2,), (3,), (4,), (0, 3), (1, 2), (2, 4), (0, 1, 2, 3, 4)]
ORDERS = {
    "as listed": SUBSETS,
    "reversed": SUBSETS[::-1],
    "rotated": SUBSETS[4:] + SUBSETS[:4],
}


@pytest.mark.one_in(3)
@rows("subsets", ORDERS)
@each_policy
def test_results_are_used_in_different_combinations(policy, subsets):
    ours = remat(several, policy=policy, prune=True)

    def gradients(fn, used):
        x, w = leaves_of(X, W)
        outs = fn(x, w)
        loss = sum(outs[j].sin().sum() for j in used)
        return torch.autograd.grad(loss, (x, w), allow_unused=True)

    for used in subsets * 3:
        with count_ops() as ops:
            got = gradients(ours, used)
        assert_same(got, gradients(several, used))
    full = ops_of(lambda: gradients(remat(several, prune=False), subsets[-1]))
    assert total(ops) < total(full)
    assert strikes() == [0]


@each_policy
def test_two_backwards_run_over_one_call(policy):
    ours = remat(several, policy=policy, prune=True)

    def gradients(fn):
        x, w = leaves_of(X, W)
        how = {"retain_graph": True, "allow_unused": True}
        losses = [out.sin().sum() for out in fn(x, w)]
        return [
            torch.autograd.grad(losses[j], (x, w), **how) for j in (0, 1, 2, 3, 4, 0)
        ]

    for _ in range(4):
        assert_same(gradients(ours), gradients(several))
