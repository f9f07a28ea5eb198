"""State that a model reads and fills, and that goes on between forward and backward.

As in real training: a step number is set for the next step, a log is read and emptied,
a generator is drawn from. A recompute has to see what its forward saw, and nothing that
it does to the state may show. Each kind scales a module's output by what it holds: so a
recompute that sees something else has other gradients, silently.

A model is trained with its blocks recomputed, and as one call that is recomputed as a
whole. What is compared is all that `clients.train` sees, and what the states hold in
the end.
"""

import copy
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from support.adversarial.holders import HOLDERS
from support.adversarial.observed import observed
from support.clients import (
    Client,
    assert_again,
    assert_moved,
    built,
    products,
    sgd,
    train,
)
from torch import Tensor, nn

import remat
from remat.testing import assert_same


# --- Kinds of state ---


class State:
    """What modules read and fill: `factor` in their calls, `go_on` between them."""

    def factor(self, module: nn.Module, out: Tensor) -> float | Tensor:
        """Return what an output is scaled by, and take note of the output."""
        raise NotImplementedError

    def go_on(self, modules: Sequence[nn.Module]) -> None:
        """Change, as what surrounds a model does between forward and backward."""
        raise NotImplementedError

    def left(self, modules: Sequence[nn.Module]) -> Any:
        """Return all that is held, to be compared."""
        return [*vars(self).values()]


class Held(State):
    """A number in a holder of the table of programs."""

    def __init__(self, name: str) -> None:
        self.read, self.write, self.dump = HOLDERS[name]()

    def factor(self, module, out):
        self.write(self.read() + 1)
        return 1 + 0.01 * self.read()

    def go_on(self, modules):
        self.write(self.read() + 5)

    def left(self, modules):
        return repr(observed(self.dump()))


class Attributes(State):
    """A number and the last output, kept on the module itself."""

    def factor(self, module, out):
        scale = 1 + 0.01 * module.__dict__.get("calls", 0)
        if module.__dict__.get("last") is not None:
            scale = scale + 0.1 * module.last.mean().tanh()
        module.calls, module.last = module.__dict__.get("calls", 0) + 1, out.detach()
        return scale

    def go_on(self, modules):
        for module in modules:
            module.calls, module.last = module.calls + 5, module.last * 2

    def left(self, modules):
        return [[m.calls, m.last] for m in modules]


class Log(State):
    """A list of numbers, which is read and emptied."""

    def __init__(self) -> None:
        self.log: list[float] = []
        self.lengths: list[int] = []

    def factor(self, module, out):
        self.log.append(out.detach().mean().item())
        return 1 + 0.01 * len(self.log)

    def go_on(self, modules):
        self.lengths.append(len(self.log))
        self.log.clear()


class Recent(State):
    """A deque of the last outputs."""

    def __init__(self) -> None:
        self.recent: deque[Tensor] = deque(maxlen=3)

    def factor(self, module, out):
        self.recent.append(out.detach().mean().tanh())
        return 1 + 0.1 * torch.stack([*self.recent]).sum()

    def go_on(self, modules):
        self.recent.appendleft(torch.ones(()))


class Noise(State):
    """A generator of its own."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(3)

    def factor(self, module, out):
        return 1 + 0.1 * torch.rand((), generator=self.generator)

    def go_on(self, modules):
        torch.rand(5, generator=self.generator)

    def left(self, modules):
        return self.generator.get_state()


_HELD = "global", "list", "dict", "namespace", "NumPy array"
KINDS: dict[str, Callable[[], State]] = {
    **{name: partial(Held, name) for name in _HELD},
    "attributes": Attributes,
    "a log": Log,
    "a deque": Recent,
    "a generator": Noise,
}


# --- Ways to reach it ---


class Scaling:
    """An object whose method is a hook."""

    def __init__(self, state: State) -> None:
        self.state = state

    def after(self, module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return out * self.state.factor(module, out)


def scaled(state: State, module: nn.Module, args: Any, out: Tensor) -> Tensor:
    return out * state.factor(module, out)


def by_method(module: nn.Module, state: State) -> None:
    module.register_forward_hook(Scaling(state).after)


def by_closure(module: nn.Module, state: State) -> None:
    module.register_forward_hook(lambda m, args, out: out * state.factor(m, out))


def by_default(module: nn.Module, state: State) -> None:
    def after(m: nn.Module, args: Any, out: Tensor, state: State = state) -> Tensor:
        return scaled(state, m, args, out)

    module.register_forward_hook(after)


def by_partial(module: nn.Module, state: State) -> None:
    module.register_forward_hook(partial(scaled, state))


def by_pre_hook(module: nn.Module, state: State) -> None:
    """The hook is before the call, and scales what is passed."""

    def before(m: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return args[0] * state.factor(m, args[0]), *args[1:]

    module.register_forward_pre_hook(before)


def by_forward(module: nn.Module, state: State) -> None:
    """A `forward` in the place of the module's own, as libraries put it there."""
    forward = module.forward

    def call(*args: Any, **kwargs: Any) -> Tensor:
        return scaled(state, module, args, forward(*args, **kwargs))

    module.forward = call


Way = Callable[[nn.Module, State], None]
HOOKS: tuple[Way, ...] = by_method, by_closure, by_default, by_partial, by_pre_hook
WAYS = {way.__name__: way for way in (*HOOKS, by_forward)}
SETTINGS: dict[str, tuple[Way, ...]] = {
    "as it is": (),
    "in forwards": (by_forward,),
    "in hooks": HOOKS,
}


class Restless:
    """Modules that reach a state of each kind, in ways that go round."""

    def __init__(
        self, modules: Sequence[nn.Module], kinds: Iterable[str], ways: Iterable[Way]
    ) -> None:
        self.modules = modules
        self.states = [KINDS[kind]() for kind in kinds]
        for state, way in zip(self.states, itertools.cycle(ways), strict=False):
            for module in modules:
                way(module, state)

    def go_on(self) -> None:
        """What happens between a forward and its backward."""
        for state in self.states:
            state.go_on(self.modules)

    def left(self) -> list[Any]:
        """Return a copy of what the states hold."""
        return copy.deepcopy([state.left(self.modules) for state in self.states])


# --- A training ---


Change = Callable[[nn.Module], nn.Module]
CHANGES: dict[str, Change] = {"blocks": remat.nn.apply, "model": remat.remat}


def places(client: Client, model: nn.Module) -> list[nn.Module]:
    """Return a module in each block that is called, and returns a tensor.

    The weights of others are read where they are, for a kernel.
    """
    layers = itertools.chain.from_iterable(client.blocks(model))
    return [*dict.fromkeys(itertools.chain.from_iterable(map(_place, layers)))]


def _place(layer: nn.Module) -> list[nn.Module]:
    leaves = [module for module in layer.modules() if not any(module.children())]
    of_kind = (
        [leaf for leaf in leaves if kind in type(leaf).__name__]
        for kind in ("Norm", "Linear", "Conv")
    )
    return next(filter(None, of_kind), [])[:1]


def trained(
    client: Client,
    change: Change,
    ways: Sequence[Way] = (),
    kinds: Iterable[str] = tuple(KINDS),
) -> tuple[nn.Module, dict[str, Any]]:
    """Train a model that is changed by a function; each state is reached in one way."""
    model = built(client)
    states = Restless(places(client, model), kinds if ways else (), ways)
    ours = change(model)
    seen = train(client, ours, optimizer=sgd, steps=2, between=states.go_on)
    return ours, {**seen, "states": states.left()}


def assert_sweeps(
    client: Client,
    ways: Sequence[Way],
    changes: Iterable[Change] = tuple(CHANGES.values()),
    **options: Any,
) -> None:
    """Changes of a model give plain's bits, and their backward runs blocks again."""
    plain, want = trained(client, lambda model: model, ways, **options)
    assert_moved(plain, want)
    layers = sum(map(len, client.blocks(plain)))
    of_plain = products(client, plain)
    for change in changes:
        ours, seen = trained(client, change, ways, **options)
        assert_same(seen, want)
        assert_again(products(client, ours), of_plain, layers)
