"""What programs are made of: a table of them, a count of evaluations, a training loop.

Invariant: the count is where no recompute puts it back.
Rejected: a number in a closure. A recompute would undo what it counts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from support.adversarial.observed import observed
from support.tables import sections_of


Wrap = Callable[[Any], Callable[..., Any]]
Step = Callable[[Wrap], Any]


@dataclass(frozen=True)
class Program:
    """A program.

    Attributes:
        name: its theme and what is hard about it.
        run: takes what functions are wrapped by, makes fresh state, and returns what
            is to be compared.
        recomputes: whether there is something to recompute.
        is_close: whether torch has other kernels for what a level of torch.func
            differentiates, so that the last bits may differ there.
    """

    name: str
    run: Step
    recomputes: bool = True
    is_close: bool = False


PROGRAMS: dict[str, Program] = {}
ROWS = "rows.txt"
TEXTS = sections_of(Path(__file__).with_name("programs") / ROWS)
EVALUATIONS: "SimpleQueue[None]" = SimpleQueue()


def add(fn, name, *case, **attributes):
    """Add a program: it takes `wrap`, and returns what is compared, or a step."""

    def run(wrap):
        found = fn(wrap, *case)
        found = found(wrap) if callable(found) else found
        assert found is not None, "the program returns nothing to compare"
        return found

    theme = fn.__module__.rpartition(".")[2]
    name = f"{theme}/{name}".replace("_", " ")
    assert name not in PROGRAMS, f"two programs are named {name}"
    PROGRAMS[name] = Program(name, run, **attributes)


@dataclass(frozen=True)
class Text:
    """A program of one function, as text.

    Attributes:
        make: what makes the state, of which `held` is observed.
        reads: what is computed with, of the input `x`.
        before, after: what the function does before and after that.
        between: what the user does between forward and backward.
        state: what is observed in the end.
        later: whether the forwards are first, and then the backwards.
        count: how often it is run.
    """

    make: str
    reads: str
    before: str = "pass"
    after: str = "pass"
    between: str = "pass"
    state: str = "held"
    later: bool = False
    count: int = 3

    def build(self, scope: dict[str, Any]) -> Step:
        """Make the state, and return what runs the program."""
        source = f"""
def build():
    {self.make}

    def fn(x):
        {self.before}
        y = work({self.reads})
        {self.after}
        return y.tanh()

    def between():
        {self.between}

    return fn, between, lambda: {self.state}
"""
        found: dict[str, Any] = {}
        exec(compile(source, f"<{self.make}>", "exec"), scope, found)
        fn, between, state = found["build"]()
        by = reversed_loop if self.later else loop
        return by(fn, between=between, state=state, count=self.count)


def add_rows(theme: str, scope: dict[str, Any]) -> None:
    """Add the programs of a theme that are rows, whose names are those of a scope."""
    for name, make, reads, *more in TEXTS.get(theme, ()):
        options = dict(part.partition(": ")[::2] for part in more)
        later, count = "later" in options, int(options.pop("count", 3))
        options.pop("later", None)
        row = Text(make, reads, **options, later=later, count=count)
        run = lambda wrap, row=row: row.build(scope)(wrap)
        PROGRAMS[f"{theme}/{name}"] = Program(f"{theme}/{name}", run)


# --- What programs do ---


class State:
    """An object of the user's with attributes: to that a weak reference can be made."""

    def __init__(self, **attributes):
        vars(self).update(attributes)


class Of(torch.nn.Module):
    """A module of a function of it and its input, with attributes."""

    def __init__(self, forward, **attributes):
        super().__init__()
        self.fn = forward
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x):
        return self.fn(self, x)


def leaf(*shape, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape or (16,), dtype=torch.double, generator=generator)
    return x.requires_grad_()


def ran():
    """Count an evaluation."""
    EVALUATIONS.put(None)


def work(x, k=2.0):
    """A curved function of `x`, and an evaluation: its derivative depends on `k`."""
    ran()
    return (x * k).sin().exp()


def nothing(*_):
    return None


def back(out):
    """Run a backward from all tensors of `out`, with cotangents that differ."""
    outs = out if isinstance(out, (tuple, list)) else [out]
    sum((t.sin() * (i + 1)).sum() for i, t in enumerate(outs)).backward()


def loop(
    fn, *, between=nothing, after=nothing, state=nothing, count=3, args=(), shape=(16,)
):
    """A step that wraps `fn` once, and runs it forward and backward a few times.

    Args:
        fn: takes a leaf, and `args`.
        between: is called between forward and backward.
        after: is called after each backward.
        state: returns what to observe besides the output and the gradient.
        count: how often to run it.
        args: more arguments.
        shape: of the leaf.
    """

    def step(wrap):
        run, seen = wrap(fn), []
        for i in range(count):
            x = leaf(*shape, seed=i + 1)
            out = run(x, *args)
            between()
            back(out)
            after()
            seen.append(observed((out, x.grad, state())))
        return seen

    return step


def reversed_loop(fn, *, between=nothing, state=nothing, count=3):
    """A step with all forwards first, and then the backwards, the last one first."""

    def step(wrap):
        run, xs = wrap(fn), [leaf(seed=i + 1) for i in range(count)]
        outs = []
        for x in xs:
            outs.append(run(x))
            between()
        forward = observed(state())
        for out in reversed(outs):
            back(out)
        return forward, observed((outs, [x.grad for x in xs], state()))

    return step


def together(fn, *, state=nothing, count=3, args=()):
    """A step with all forwards first, and then one backward of all."""

    def step(wrap):
        run, xs = wrap(fn), [leaf(seed=i) for i in range(count)]
        outs = [run(x, *args) for x in xs]
        back(outs)
        return observed((outs, [x.grad for x in xs], state()))

    return step


def around(fn, outer, *, by=loop, **options):
    """A step in which `fn` is wrapped, and what `outer` makes of it is run.

    Args:
        fn: what is wrapped.
        outer: takes that, and returns a function of a leaf.
        by: how that is run: `loop` or `reversed_loop`.
        options: of `by`.
    """
    return lambda wrap: by(outer(wrap(fn)), **options)(lambda f: f)


def within(manager, *, times=1.0):
    """Return an `outer` of `around`: calls are in a context, on multiples of it."""

    def outer(run):
        def call(x):
            with manager():
                return run(x if times == 1 else x * times)

        return call

    return outer


def trained(
    module, *, between=nothing, state=nothing, count=3, call=None, shape=(4, 4)
):
    """A step that trains a module by SGD, wrapped once, and observes all its state."""

    def step(wrap):
        run, seen = wrap(call or module), []
        optimizer = torch.optim.SGD([*module.parameters()], lr=0.1)
        for i in range(count):
            x = leaf(*shape, seed=i + 1)
            out = run(x)
            between()
            back(out)
            grads = {n: p.grad for n, p in module.named_parameters()}
            seen.append(observed((out, x.grad, grads, module.state_dict(), state())))
            optimizer.step()
            optimizer.zero_grad()
        return seen

    return step
