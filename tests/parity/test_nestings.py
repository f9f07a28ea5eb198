"""Every nesting of up to three transforms, and what they are applied to.

A transform here takes a function of one tensor, and returns such a function. So each
can be put around each other one. A backward of base autograd is always the outermost.

A subject is a function of a tensor, with parameters. It is made with remat, or plainly.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from support.tables import rows
from support.zoo import assert_not_vanishing, make
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap

from remat import chain, checkpoint_name, policies, random, remat
from remat._partial.decide import CACHES
from remat.testing import count_ops


SIZE, STEPS = 3, 3
X = make(SIZE, seed=41)


# --- The transforms ---


def scalar(fn):
    return lambda x: fn(x).square().sum()


def weights(y):
    """A cotangent that is not the same for all elements."""
    return torch.linspace(0.5, 1.5, y.numel(), dtype=y.dtype).view(y.shape)


def pull(fn):
    def run(x):
        y, pulled = vjp(fn, x)
        return pulled(weights(y))[0]

    return run


def push(fn):
    # The tangent depends on the input, so a level around differentiates it, too.
    return lambda x: jvp(fn, (x,), (x.cos(),))[1]


def in_dual_level(fn):
    def run(x):
        with forward_ad.dual_level():
            y = fn(forward_ad.make_dual(x, x.cos()))
            return forward_ad.unpack_dual(y).tangent

    return run


TRANSFORMS = {
    "grad": lambda fn: grad(scalar(fn)),
    "vjp": pull,
    "jvp": push,
    "jacrev": jacrev,
    "jacfwd": jacfwd,
    "hessian": lambda fn: hessian(scalar(fn)),
    "vmap": lambda fn: lambda x: vmap(fn)(torch.stack([x, 2 * x])),
    "linearize": lambda fn: lambda x: linearize(fn, x)[1](x.cos()),
    "forward_ad": in_dual_level,
}
# Whether a backward of base autograd is of the input, and of the parameters.
BACKWARDS = {
    "backward": (True, True),
    "backward of the input": (True, False),
    "backward of parameters": (False, True),
}
# A hessian is forward over reverse. A `vmap` is no derivative.
ORDERS = {**dict.fromkeys((*TRANSFORMS, *BACKWARDS), 1), "hessian": 2, "vmap": 0}
REVERSE = {"grad", "vjp", "jacrev", "hessian", *BACKWARDS}
# By definition they give what `jvp` gives.
AS_JVP = {"linearize": "jvp", "forward_ad": "jvp"}


def nestings(depth: int, order: int) -> Iterator[tuple[str, ...]]:
    """Every nesting up to a depth and an order, the outermost transform first.

    Of three, `linearize` is the outermost one: within another transform plain torch
    raises, or is wrong. Nestings of two show that. It is also a hundred times slower.
    """
    for count in range(1, depth + 1):
        inner = [TRANSFORMS] * (count - 1)
        for names in itertools.product([*TRANSFORMS, *BACKWARDS], *inner):
            is_slow = count > 2 and "linearize" in names[1:]
            if sum(map(ORDERS.__getitem__, names)) <= order and not is_slow:
                yield names


# --- The subjects ---


class Gate(nn.Module):
    """A block without parameters."""

    def forward(self, x):
        return checkpoint_name(x * 0.7, "inner").tanh() * x


class Layer(nn.Module):
    """A block with parameters."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE).double()

    def forward(self, x):
        return checkpoint_name(self.linear(x), "inner").tanh()


class Normed(nn.Module):
    """A block with a norm, whose buffers are read in `eval`."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE).double()
        self.norm = nn.BatchNorm1d(SIZE).double()
        self.norm.running_mean.copy_(make(SIZE, seed=42))
        self.norm.running_var.copy_(make(SIZE, seed=43).exp())
        self.eval()

    def forward(self, x):
        h = checkpoint_name(self.linear(x[None]), "inner")
        return self.norm(h)[0].tanh()


class Subject(NamedTuple):
    """A function of a tensor, and the parameters that it reads."""

    fn: Callable[[Tensor], Tensor]
    parameters: Sequence[Tensor]


# Options of remat; None is plain code.
Options = dict[str, Any] | None


def wrapped(fn: Any, options: Options) -> Any:
    return fn if options is None else remat(fn, **options)


def frozen_first(options: Options) -> Subject:
    layer = Layer()
    first, second = wrapped(Gate(), options), wrapped(layer, options)
    return Subject(lambda x: second(first(x)), [*layer.parameters()])


def frozen_second(options: Options) -> Subject:
    layer = Layer()
    first, second = wrapped(layer, options), wrapped(Gate(), options)
    return Subject(lambda x: second(first(x)), [*layer.parameters()])


def in_a_chain(options: Options) -> Subject:
    w = make(SIZE, SIZE, seed=44).requires_grad_()

    def step(i, h):
        return checkpoint_name(w @ h + 0.1 * i, "inner").tanh()

    def loop(x):
        h = x
        for i in range(STEPS):
            h = step(i, h)
        return h

    if options is None:
        return Subject(loop, [w])
    options = {**options}
    policy = options.pop("policy", None)

    def ours(x):
        return chain.fori_loop(0, STEPS, step, x, policy=policy)

    # A chain has no option for pruning: a call around it has.
    return Subject(remat(ours, **options) if options else ours, [w])


def normed(options: Options) -> Subject:
    module = Normed()
    return Subject(wrapped(module, options), [*module.parameters()])


def dropped(options: Options) -> Subject:
    w = make(SIZE, SIZE, seed=45).requires_grad_()

    def fn(key, x):
        first, second = random.split(key)
        h = random.dropout(first, checkpoint_name(w @ x, "inner").tanh(), 0.3)
        return random.dropout(second, h * x, 0.2) + h

    ours, key = wrapped(fn, options), random.key(3)
    return Subject(lambda x: ours(key, x), [w])


SUBJECTS = {
    "frozen first": frozen_first,
    "frozen second": frozen_second,
    "chain": in_a_chain,
    "eval": normed,
    "dropout": dropped,
}
OPTIONS = {
    "no policy": {},
    "dots": {"policy": policies.dots_saveable},
    "names": {"policy": policies.save_only_these_names("inner")},
    "prune": {"prune": True},
}


def subject(name: str, names: Sequence[str], options: Options) -> Subject:
    """Make a subject for a nesting, always with the same parameters.

    `linearize` gets parameters that are frozen: with others torch cannot trace every
    function. A backward of base around it has none that are.
    """
    torch.manual_seed(0)
    made = SUBJECTS[name](options)
    for p in made.parameters:
        p.requires_grad_("linearize" not in names or names[0] in BACKWARDS)
    return made


def gradients(fn: Any, parameters: Sequence[Tensor], how: str) -> Any:
    """What base autograd gives."""
    of_input, of_parameters = BACKWARDS[how]
    x = X.clone().requires_grad_(of_input)
    of = [x] * of_input + [*parameters] * of_parameters
    return torch.autograd.grad(fn(x).square().sum(), of, allow_unused=True)


def result_of(names: Sequence[str], made: Subject) -> Any:
    """Apply a nesting to a subject.

    Forward mode alone stores nothing, and recomputes nothing. So a backward of the
    subject follows it.
    """
    outermost, fn = names[0], made.fn
    for name in reversed(names):
        fn = TRANSFORMS[name](fn) if name in TRANSFORMS else fn
    if outermost in BACKWARDS:
        return gradients(fn, made.parameters, outermost)
    value = fn(X).detach()
    if REVERSE.isdisjoint(names):
        return value, gradients(made.fn, (), "backward of the input")
    return value


# --- The comparison ---


class Attempt(NamedTuple):
    """What a nesting gave or raised, and how many values of `tanh` it computed.

    No derivative runs that.
    """

    result: Any
    evaluations: int
    error: Exception | None


def attempt(names: Sequence[str], made: Subject) -> Attempt:
    """Apply a nesting, which may raise."""
    with count_ops() as ops:
        try:
            return Attempt(result_of(names, made), ops["tanh"], None)
        except Exception as error:  # noqa: BLE001 - any error of torch, of any class
            return Attempt(None, 0, error)


def is_close(actual: Any, expected: Any) -> bool:
    """Say whether two results agree to rounding."""
    try:
        assert_equal(actual, expected)
    except AssertionError:
        return False
    return True


def assert_equal(actual: Any, expected: Any) -> None:
    """Assert that two results agree to rounding: sums are in another order."""
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)


# --- The tests ---


# torch.func.linearize's own.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Attempted to insert a get_attr Node:UserWarning"
)


def subjects_of(names):
    """All; but two where torch traces three transforms, which takes a second each."""
    is_slow = len(names) > 2 and "linearize" in names
    return ("frozen first", "chain") if is_slow else SUBJECTS


CASES = {
    f"{' of '.join(names)}, {name}": (names, name)
    for names in nestings(depth=3, order=3)
    for name in subjects_of(names)
}
NUMBERS = {case: number for number, case in enumerate(CASES.values())}
# What can be put around a dual level and in it.
AROUND = {"grad", "vjp", "jacrev", *BACKWARDS, "forward_ad"}


def is_fast(names, name):
    """Pairs of one subject that plain torch takes, and of the others each one alone."""
    if len(names) == 1:
        return name == "frozen first" or names[0] not in AS_JVP
    if len(names) > 2 or name != "frozen first" or "linearize" in names:
        return False
    if "hessian" in names and "grad" not in names:  # of order three: a second each
        return False
    is_one_dual_level = AROUND.issuperset(names) and len({*names}) > 1
    return "forward_ad" not in names or is_one_dual_level


FAST = [case for case, (names, name) in CASES.items() if is_fast(names, name)][::2]


def options_for(names, name):
    """All for up to two transforms; for three none, and another one for each case.

    A nesting of three has each of them with some subject. Under `linearize` nothing is
    saved, and it is slow: there it is as for three.
    """
    if len(names) < 3 and "linearize" not in names:
        return OPTIONS
    none, *others = OPTIONS
    another = others[NUMBERS[names, name] % len(others)]
    return {how: OPTIONS[how] for how in (none, another)}


def tried(names, name, options):
    """What calls give: with a record of what ran, later ones differ from the first."""
    CACHES.clear()
    made = subject(name, names, options)
    calls = 2 if options and "linearize" not in names else 1
    return [attempt(names, made) for _ in range(calls)]


@pytest.mark.one_in(2)
@rows("names, name", CASES, fast=FAST)
def test_a_nesting_gives_what_plain_code_gives(names, name):
    plain = attempt(names, subject(name, names, None))
    right = plain
    if not AS_JVP.keys().isdisjoint(names):
        names_right = [AS_JVP.get(n, n) for n in names]
        right = attempt(names_right, subject(name, names, None))
    is_right = plain.error is None and is_close(plain.result, right.result)
    allowed = [a.result for a in (plain, right) if a.error is None]
    for how, options in options_for(names, name).items():
        for ours in tried(names, name, options):
            if is_right:
                if ours.error is not None:
                    raise ours.error
                assert_equal(ours.result, plain.result)
                assert ours.evaluations > plain.evaluations, how
            elif ours.error is None and allowed:
                assert any(is_close(ours.result, result) for result in allowed), how
    if plain.error is not None:
        pytest.skip(f"plain torch raises: {str(plain.error).splitlines()[0]}")
    assert right.error is None
    if not is_right:
        pytest.skip("plain torch is wrong")
    assert_not_vanishing(plain.result)
