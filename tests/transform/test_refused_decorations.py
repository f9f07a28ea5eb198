"""What `remat` refuses when it is applied. Others are in `whole/mistakes.txt`."""

import pytest
import torch
from support.zoo import ops_of
from torch import nn

from remat import remat
from remat.testing import assert_same, count_ops


def wave(x, *, scale=2.0):
    return (x * scale).sin().exp()


class Layer(nn.Module):
    def forward(self, x):
        return x.sin()


class Blocks(nn.ModuleList):
    def forward(self, x):
        for block in self:
            x = block(x)
        return x


class Called(nn.Module):
    """Has no `forward`, and so none of the hooks of a module."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def __call__(self, x):
        return self.layer(x).sin().sum()


class Waves:
    def __call__(self, x):
        return x.sin()


async def waits(x):
    return x.sin()


async def generates_and_waits(x):
    yield x.sin()


def body_runs_later(fn):
    name = fn.__name__
    return f"`{name}` is a .* function. Its body runs after the call has ended"


def needless(name):
    return f"'{name}'. `{name}` is not needed: "


CHOICE = "use 'auto', True or False"
OTHERS = ("static_argnums", "prevent_cse", "use_reentrant", "context_fn", "early_stop")

# What is decorated, the options, the error and its message.
REFUSED = {
    "prune None": (wave, {"prune": None}, ValueError, f"prune=None: {CHOICE}"),
    "rng": (wave, {"rng": "ignore"}, ValueError, "rng='ignore': use 'replay' or 'err"),
    "rng False": (wave, {"rng": False}, ValueError, "rng=False: use 'replay' or 'err"),
    **{name: (wave, {name: True}, TypeError, needless(name)) for name in OTHERS},
    "number": (3, {}, TypeError, "got an object of type int, which is not callable"),
    "name": ("sin", {}, TypeError, "of type str, which is not callable. Pass a func"),
    "list": ([torch.exp], {}, TypeError, "of type list, which is not callable"),
    "own call": (Called(), {}, TypeError, r"a Called.*: remat\(module\.__call__\)"),
    "class": (Waves, {}, TypeError, "Waves is a class. Apply remat to an object of"),
    **{
        fn.__name__: (fn, {"prune": True}, TypeError, body_runs_later(fn))
        for fn in (waits, generates_and_waits)
    },
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("form", ["direct", "factory"])
def test_a_wrong_decoration_is_refused_at_once(form, case):
    fn, options, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        remat(fn, **options) if form == "direct" else remat(**options)(fn)


def test_a_container_with_a_forward_of_its_own_is_recomputed():
    with_own = nn.ModuleList([Layer(), Layer()])
    with_own.forward = lambda x: with_own[1](with_own[0](x))
    x = torch.ones(2, requires_grad=True)
    for module in Blocks([Layer(), Layer()]), with_own:
        with count_ops() as ops:
            remat(module)(x).sum().backward()
        assert ops["sin"] == 3  # the last one is not read


def test_the_own_call_of_a_module_is_recomputed():
    module, plain = Called(), Called()
    plain.load_state_dict(module.state_dict())
    ops = ops_of(lambda: remat(module.__call__)(torch.ones(3, 2)).backward())
    plain(torch.ones(3, 2)).backward()
    assert (ops["addmm"], ops["sin"]) == (2, 1)
    assert module.layer.weight.grad.any()
    assert_same(*([p.grad for p in of.parameters()] for of in (module, plain)))
