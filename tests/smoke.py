"""A use of each part of remat, on torch alone: what an installed package must do.

`tests/check_dist.py` runs it with an installed wheel and sdist, outside of the
repository and without extras; `tests/whole/test_repository.py` runs it here. So it
imports neither pytest nor anything of `tests/`.

Invariant: each function counts operations or bytes. The test beside it shows that those
which call `remat.remat` fail if that is the identity.
"""

from collections.abc import Callable

import torch
from torch import nn

import remat
from remat import chain, policies, random
from remat.testing import assert_same, count_ops


W = torch.linspace(-1, 1, 12).view(4, 3)
X = torch.linspace(0, 1, 6).view(3, 2)


def block(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (w @ x).sin().exp()


def loss(fn: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda w, x: fn(w, x).square().sum()


def backward() -> None:
    """`.backward()` computes a product and a sine again, and equal gradients."""
    grads = []
    for fn, products in ((block, 0), (remat.remat(block), 1)):
        w = W.clone().requires_grad_()
        out = loss(fn)(w, X)
        with count_ops() as ops:
            out.backward()
        # The gradient of the product is one more.
        assert (ops["mm"], ops["sin"]) == (1 + products, products), ops
        grads.append(w.grad)
    assert_same(*grads)


def func_grad() -> None:
    """`torch.func.grad` does so, too."""
    with count_ops() as ops:
        got = torch.func.grad(loss(remat.remat(block)))(W, X)
    assert (ops["mm"], ops["sin"]) == (3, 2), ops
    assert_same(got, torch.func.grad(loss(block))(W, X))


def policy() -> None:
    """A policy that saves products leaves none to compute again."""
    fn = remat.remat(block, policy=policies.dots_saveable)
    for _ in range(2):  # the first call is recorded, the second follows the record
        w = W.clone().requires_grad_()
        out = loss(fn)(w, X)
        with count_ops() as ops:
            out.backward()
        assert (ops["mm"], ops["sin"]) == (1, 1), ops


def keys() -> None:
    """Dropout by a key is the same in the recompute, and its numbers are fixed."""
    assert random.randint(random.key(42), (6,), 0, 10).tolist() == [9, 9, 3, 5, 7, 9]
    x = torch.ones(100, requires_grad=True)
    fn = remat.remat(lambda x: random.dropout(random.key(0), x.exp(), 0.5))
    out = fn(x)
    with count_ops() as ops:
        out.sum().backward()
    assert ops["exp"] == 1, ops
    assert_same(x.grad, out.detach())


def scan() -> None:
    """A chain of 10 steps runs as many of them again as its schedule says."""
    schedule = chain.schedules.Binomial(checkpoints=3)

    def final(x: torch.Tensor) -> torch.Tensor:
        def step(carry: torch.Tensor, _: None) -> tuple[torch.Tensor, None]:
            return carry.sin(), None

        return chain.scan(step, x, length=10, checkpoints=schedule)[0].sum()

    with count_ops() as ops:
        got = torch.func.grad(final)(torch.ones(3))
    assert (ops["sin"], ops["cos"]) == (sum(schedule.evaluations(10)), 10), ops
    x = torch.ones(3, requires_grad=True)
    y = x
    for _ in range(10):
        y = y.sin()
    y.sum().backward()
    assert_same(got, x.grad)


def explain() -> None:
    """`explain` says what is saved and what is recomputed, without rich."""
    report = remat.explain(block, W, X, policy=policies.dots_saveable)
    fates = {op.name: op.fate for op in report.ops}
    assert fates == {"mm": "saved", "sin": "recomputed", "exp": "recomputed"}, fates
    assert "policy saves it" in str(report)
    assert {r.origin for r in remat.saved_residuals(remat.remat(block), W, X)} == {
        "from the argument w",
        "from the argument x",
    }


def modules() -> None:
    """`remat.nn.apply` recomputes the blocks of a model in place."""
    grads = []
    for is_applied in (False, True):
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(2)]
        model = nn.Sequential(*blocks)
        if is_applied:
            remat.nn.apply(model, lambda name, module: name in {"0", "1"})
        out = model(torch.ones(2, 3)).square().sum()
        with count_ops() as ops:
            out.backward()
        assert ops["addmm"] == 2 * is_applied, ops
        grads.append([p.grad for p in model.parameters()])
    assert_same(*grads)


CHECKS = (backward, func_grad, policy, keys, scan, explain, modules)


if __name__ == "__main__":
    for _check in CHECKS:
        _check()
    print(f"remat {remat.__version__} with torch {torch.__version__}: passed")
