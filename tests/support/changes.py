"""A model of modules, objects, containers, buffers and numbers; and changes of it."""

import types
from operator import setitem

import torch
from torch import nn

from remat._reach import roots as _roots


def is_remembered(model: nn.Module) -> bool:
    """Whether what a walk found in the model is used by the next call."""
    return id(model) in _roots._LAYOUTS


class Wrapped(nn.Module):
    """Calls a module through `wrap`; its parameters keep their names."""

    def __init__(self, module, wrap):
        super().__init__()
        self.module, self.wrap = module, wrap

    def forward(self, *args, **kwargs):
        return self.wrap(self.module)(*args, **kwargs)


class Part:
    """An object without tensors."""

    def __init__(self):
        self.scale, self.sizes = 2, [1, 2]
        self.options = {"a": {"b": [3]}}

    def number(self):
        return self.scale + sum(self.sizes) + self.options["a"]["b"][0]


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.full((4,), 2.0))
        self.sizes, self.factor = [1, 2], 1.0

    def forward(self, x):
        return self.linear(x) * self.scale * self.factor


class Block(nn.Module):
    """Ends with an exponential, which saves its result: all of it is recomputed."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.drop = Inner(), Inner(), nn.Dropout(0.5)
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.part, self.parts = Part(), [Part(), Part()]
        self.named, self.pair, self.factor = {"x": Part()}, (1, 2), 1000
        self.weight, self.other = nn.Parameter(torch.ones(4)), None
        self.register_buffer("shift", torch.ones(4))

    def number(self):
        parts = [self.part, *self.parts, self.named["x"]]
        found = sum(part.number() for part in parts)
        return found + self.factor / 1000 + sum(self.pair)

    def forward(self, x):
        h = self.drop(self.second(self.first(x).sin()))
        h = self.inner(h if self.other is None else h * self.other)
        h = h * self.weight + self.shift
        h = h * (0.1 * self.number() + len(self.parts) + len(self.named))
        return (h * (1 if self.training else 2)).sin().exp()


class Slotted(Inner):
    __slots__ = ("slot",)

    def __init__(self):
        super().__init__()
        self.slot = torch.ones(3, requires_grad=True)


class Asked(Inner):
    def __getattribute__(self, name):
        return super().__getattribute__(name)


def twos():
    return torch.full((4,), 2.0).double()


def module_of(cls):
    return cls().double()


def replace_weight_by_tensor(m):
    linear = m.first.linear
    del linear.weight
    linear.weight = torch.ones(4, 4, dtype=torch.double, requires_grad=True) * 1


def exchange(m):
    m.first, m.second = m.second, m.first


def add_module_and_hook(m):
    m.first.add_module("extra", nn.Linear(4, 4).double())
    m.first.register_forward_hook(lambda m, args, out: m.extra(out))


def add_weight_and_hook(m):
    w = nn.Parameter(twos())
    m.register_parameter("w", w)
    m.first.register_forward_hook(lambda m, args, out: out * w)


def add_tensor_to_list_and_hook(m):
    m.first.sizes.append(m.second.linear.weight)
    m.first.register_forward_hook(lambda m, args, out: out @ m.sizes[-1])


def reorder_parameters(m):
    parameters = m.second.linear._parameters
    parameters["weight"] = parameters.pop("weight")


def assign_forward_that_uses_a_tensor(m):
    factor = m.second.linear.bias
    m.first.forward = lambda x: x.sin() * factor


# What is found again as it was, though it is changed before the backward.
CHANGES = {
    "submodule replaced": lambda m: setitem(m.inner, 1, nn.Sigmoid()),
    "submodule replaced by a linear": lambda m: setattr(
        m, "first", nn.Linear(4, 4).double()
    ),
    "submodule removed": lambda m: m.inner.pop(1),
    "submodule added": lambda m: m.inner.append(nn.Sigmoid()),
    "submodules exchanged": exchange,
    "submodule shared": lambda m: setattr(m, "first", m.second),
    "submodule added, with a hook": add_module_and_hook,
    "weight replaced": lambda m: setattr(m, "weight", nn.Parameter(twos())),
    "inner weight replaced": lambda m: setattr(
        m.first.linear, "weight", nn.Parameter(torch.ones(4, 4).double())
    ),
    "weight replaced by a tensor": replace_weight_by_tensor,
    "bias removed": lambda m: m.first.linear.register_parameter("bias", None),
    "weights tied": lambda m: setattr(m.first.linear, "weight", m.second.linear.weight),
    "weights in another order": reorder_parameters,
    "weight added, with a hook": add_weight_and_hook,
    "buffer replaced": lambda m: setattr(m, "shift", twos()),
    "buffer registered again": lambda m: m.second.register_buffer("scale", twos()),
    "attribute added": lambda m: (
        setattr(m.part, "extra", 1),
        setattr(m, "factor", 3000),
    ),
    "attribute set to a tensor": lambda m: setattr(
        m, "other", m.second.linear.weight[0]
    ),
    "entry of a dict added": lambda m: setitem(m.named, "y", m.named["x"]),
    "entry of a list added": lambda m: m.parts.append(Part()),
    "tensor added to a list": add_tensor_to_list_and_hook,
    "nested list": lambda m: setitem(m.parts[1].options["a"]["b"], 0, 7),
    "nested dict": lambda m: setattr(m.named["x"], "options", {"a": {"b": [9]}}),
    "list of an object": lambda m: m.part.sizes.append(5),
    "number": lambda m: setattr(m, "factor", m.factor + 1000),
    "number of a submodule": lambda m: setattr(m.second, "factor", 0.5),
    "tuple": lambda m: setattr(m, "pair", (3, 4)),
    "training": lambda m: m.train(not m.training),
    "training of a submodule": lambda m: m.drop.eval(),
    "hook": lambda m: m.first.register_forward_hook(lambda m, args, out: out * 3),
    "hook of a hooked layer": lambda m: m.inner[0].register_forward_hook(
        lambda m, args, out: out * 2
    ),
    "hook before": lambda m: m.register_forward_pre_hook(
        lambda m, args: (args[0].cos(),)
    ),
    "forward replaced": lambda m: setattr(m.inner, "forward", lambda x: x.sin()),
    "forward replaced by one with a tensor": assign_forward_that_uses_a_tensor,
}
# What makes of the model a tree that is odd.
ODD = {
    "an object that holds the model": lambda m: setattr(
        m.first, "owner", types.SimpleNamespace(module=m)
    ),
    "a list that holds the model": lambda m: setattr(m.first, "sizes", [m]),
    "a list that holds a submodule": lambda m: setattr(m.first, "sizes", [m.second]),
    "slots": lambda m: setattr(m, "first", module_of(Slotted)),
    "getattribute": lambda m: setattr(m, "first", module_of(Asked)),
}
# What changes the values of parameters, or of what a gradient can be asked.
OF_VALUES = {
    "weight frozen": lambda m: m.first.linear.weight.requires_grad_(False),
    "other dtype": lambda m: m.float(),
}
