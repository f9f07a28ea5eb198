"""Writes that torch does not count, as through `.data`, in the first calls.

Small buffers and vectors are copied, so such writes are right. Of what is not copied
the first bytes are compared, in the first calls of an object or a function. If the
recompute changes them again, that is refused.
"""

import gc
from collections.abc import Callable

import pytest
import torch
from support.tables import crossed
from torch import Tensor, nn
from torch.func import functional_call, grad

from remat import MutationError, policies, remat
from remat._transform import changes
from remat.testing import count_ops


WRITES: dict[str, Callable[[Tensor], object]] = {
    "data.lerp_": lambda t: t.data.lerp_(torch.ones_like(t), 0.25),
    "data.copy_": lambda t: t.data.copy_(t * 0.5),
    "data +=": lambda t: t.data.add_(1),
    "numpy": lambda t: t.detach().numpy().__imul__(0.5),
}
ROWS = {"small": 16, "large": 4000}  # of eight
KINDS = "buffer", "frozen", "parameter"


def is_copied(kind: str, size: str, wrap: str) -> bool:
    """Say whether a call copies the table. Where it can, one Function copies late."""
    return kind == "buffer" and (size == "small" or wrap == "higher_order")


WRAPPED: dict[str, Callable[[nn.Module], Callable[[Tensor], Tensor]]] = {
    "default": remat,
    "prune": lambda m: remat(m, prune=True),
    "dots": lambda m: remat(m, policy=policies.dots_saveable),
    "higher_order": lambda m: remat(m, higher_order=True),
}


class Table(nn.Module):
    """Reads a table, and writes to it."""

    def __init__(self, kind: str, rows: int, write: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.write: Callable[[Tensor], object] | None = write
        table = torch.linspace(-1, 1, 8 * rows).view(rows, 8)
        if kind == "buffer":
            self.register_buffer("table", table)
        else:
            self.table = nn.Parameter(table, requires_grad=kind == "parameter")

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        if self.write is not None:
            self.write(self.table)
        return (h.square() * self.table.mean()).sum() + (self.table[1] * h).sum()


def twins(
    kind: str, size: str, write: Callable[[Tensor], object]
) -> tuple[Table, Table]:
    """Return two modules that are alike."""
    plain, ours = (Table(kind, ROWS[size], write) for _ in range(2))
    ours.load_state_dict(plain.state_dict())
    return plain, ours


def given() -> Tensor:
    return torch.linspace(-1, 1, 16).view(2, 8).requires_grad_()


def assert_recomputed_alike(plain: Table, ours: Table, wrap: str) -> None:
    """Assert equal gradients and tables, and that a backward ran more than plain's."""
    a, b = given(), given()
    with count_ops() as once:
        plain(a).backward()
    with count_ops() as ops:
        WRAPPED[wrap](ours)(b).backward()
    assert ops.total() > once.total()
    assert a.grad is not None
    assert b.grad is not None
    assert torch.equal(a.grad, b.grad)
    assert torch.equal(plain.table, ours.table)


def test_the_assertion_fails_without_a_recompute() -> None:
    plain, ours = twins("frozen", "small", AGAIN["clamped"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(WRAPPED, "none", lambda m: m)
        with pytest.raises(AssertionError, match="total"):
            assert_recomputed_alike(plain, ours, "none")


@crossed("write, wrap, kind, size", WRITES, WRAPPED, KINDS, ROWS, each=2)
def test_a_write_is_undone_or_refused(
    kind: str, size: str, write: str, wrap: str
) -> None:
    plain, ours = twins(kind, size, WRITES[write])
    if not is_copied(kind, size, wrap):
        with pytest.raises(MutationError, match=r"table`.*does not count"):
            WRAPPED[wrap](ours)(given()).backward()
        return
    assert_recomputed_alike(plain, ours, wrap)


@pytest.mark.parametrize("kind", ["frozen", "parameter"])
def test_a_write_below_a_level_is_refused(kind: str) -> None:
    module = Table(kind, 16, WRITES["data.lerp_"])
    params = dict(module.named_parameters())

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return remat(lambda x: functional_call(module, params, (x,)))(x)

    with pytest.raises(MutationError, match="does not count"):
        grad(loss)(params, given().detach())


AGAIN: dict[str, Callable[[Tensor], object]] = {
    "clamped": lambda t: t.data.clamp_(-0.5, 0.5),
    "zeroed": lambda t: t.data.zero_(),
    "numpy": lambda t: t.detach().numpy().__setitem__(slice(0, 1), 3),
}


@crossed("write, wrap, kind, size", AGAIN, WRAPPED, KINDS, ROWS, each=2)
def test_a_write_that_is_the_same_again_is_right(
    kind: str, size: str, write: str, wrap: str
) -> None:
    plain, ours = twins(kind, size, AGAIN[write])
    calls: list[int] = []
    ours.linear.register_forward_hook(lambda *_: calls.append(1))
    assert_recomputed_alike(plain, ours, wrap)
    assert len(calls) == 1  # what the recompute appends is taken back


class ActNorm(nn.Module):
    """Sets its scale from the first batch, as in Glow."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.is_set = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_set:
            self.scale.data.copy_(1 / x.detach().std(0))
            self.is_set = True
        return (x * self.scale).tanh().sum()


@pytest.mark.parametrize("wrap", WRAPPED)
def test_a_parameter_that_the_first_batch_sets_is_right(wrap: str) -> None:
    plain, ours = ActNorm(), ActNorm()
    for _ in range(2):
        a, b = given(), given()
        plain(a).backward()
        with count_ops() as ops:
            WRAPPED[wrap](ours)(b).backward()
        assert ops["tanh"] == 1 + 1
        assert a.grad is not None
        assert b.grad is not None
        assert torch.equal(a.grad, b.grad)
        assert torch.equal(plain.scale, ours.scale)
        assert ours.is_set


def test_three_calls_of_a_module_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[int] = []
    before = changes.FirstBytes.__init__

    def init(self: changes.FirstBytes, tensors: list[Tensor], key: int) -> None:
        noted.append(len(tensors))
        before(self, tensors, key)

    monkeypatch.setattr(changes.FirstBytes, "__init__", init)
    module = Table("frozen", 16, WRITES["data.lerp_"])
    module.write = None
    for _ in range(5):
        remat(module)(given()).backward()
    assert noted == [4] * 3
    other = Table("frozen", 16, WRITES["data.lerp_"])
    other.write = None
    remat(other)(given()).backward()
    assert noted == [4] * 4


def test_what_is_remembered_goes_with_the_module() -> None:
    module = Table("frozen", 16, WRITES["data.lerp_"])
    module.write = None
    gc.collect()
    count = len(changes._COUNTED)
    remat(module)(given()).backward()
    assert len(changes._COUNTED) == count + 1
    del module
    gc.collect()
    assert len(changes._COUNTED) == count
