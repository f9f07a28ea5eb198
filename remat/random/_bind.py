"""`bind`: torch's own randomness, drawn from a key.

A mode replaces each function of torch that draws with a keyed version. Of composites,
such as `multi_head_attention_forward`, it sees only the outer call: it runs their body
again with the mode on. Below it, a guard refuses what still draws from a global stream.

Invariant: what a body draws is a function of the key, and no global stream moves.
Rejected: seeding a generator from the key and using it in place of the global one. A
generator does not work under vmap, and its numbers differ from device to device.
"""

import functools
from collections.abc import Callable, Iterable
from types import FunctionType, SimpleNamespace
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, overrides
from torch.nn import functional, init
from torch.overrides import TorchFunctionMode
from torch.utils.data import get_worker_info
from typing_extensions import override

from remat._ambient.draws import Guard, is_tagged_random
from remat._base.code import known_code
from remat._base.context import is_recomputing
from remat._base.errors import RandomnessError
from remat._base.source import user_line
from remat._torch.levels import is_shared_by_examples
from remat._torch.modes import without_dispatch_mode
from remat._torch.operators import OpOverload, OpOverloadPacket
from remat._torch.process import checkpoint_depth
from remat._torch.tensors import as_fake
from remat._torch.tracing import constant_in_traces, eager_only, show_to_traced_modes
from remat.random._key import Key, KeyLike, data_of, fold_in
from remat.random._rerouted import RULES
from remat.random._reuse import in_block


# --- Draws that are keyed, or refused by name -------------------------------------


def _recurrent(plain: Any) -> Any:
    def rule(draw: Any, *args: Any) -> Any:
        del draw  # no key would do
        # A packed sequence is two arguments: data and batch sizes.
        at = 6 if isinstance(args[3], (list, tuple)) else 5
        layers, p, train = args[at - 1 : at + 2]
        if train and p > 0 and layers > 1:
            _refuse(f"the dropout between layers of {plain.__name__}")
        # With dropout some kernels draw a state even if nothing drops.
        return plain(*args[:at], 0.0, *args[at + 1 :])

    return rule


def _refuse(name: str) -> NoReturn:
    where = "a compiled function" if torch.compiler.is_compiling() else user_line()
    raise RandomnessError(_REFUSED.format(op=name, where=where))


_RECURRENT = torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu
_RULES = RULES | {plain: _recurrent(plain) for plain in _RECURRENT}


# --- Composites -------------------------------------------------------------------


def _never(*_: object) -> bool:
    return False


_NAMES = "has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"
_UNASKED: dict[str, Any] = dict.fromkeys(_NAMES, _never)


def _scope(func: Any) -> dict[str, Any]:
    """Return the globals that `func` names, with their current values."""
    # Without `__name__`: with it, Dynamo would use the globals of the named module.
    loaded = known_code(func).names.loaded
    scope = _those(("__builtins__", *loaded), func.__globals__) | _UNASKED
    names = func.__code__.co_names
    if "overrides" in names:
        quiet = SimpleNamespace(**_those(names, vars(overrides)) | _UNASKED)
        of_torch = _those(names, vars(torch)) | {"overrides": quiet}
        scope["torch"] = SimpleNamespace(**of_torch)
    return scope


def _those(names: Iterable[str], scope: dict[str, Any]) -> dict[str, Any]:
    return {name: scope[name] for name in names if name in scope}


# Delete this once torch lets a function be called without its check for modes.
def _unasking(func: Any) -> Any:
    """Return a function that runs `func`'s own code, whichever modes are active."""
    args = func.__name__, func.__defaults__, func.__closure__
    return FunctionType(func.__code__, _scope(func), *args)


# Functions that draw by calling functions that have a rule. (The last two check for a
# mode only in Dynamo. Dynamo does not trace them and leaves the frame as it is.)
_COMPOSITES: dict[Any, Any] = {
    f: _unasking(f)
    for f in (
        functional.dropout1d,
        functional.dropout2d,
        functional.dropout3d,
        functional.gumbel_softmax,
        functional.multi_head_attention_forward,
        init.kaiming_uniform_,
        init.normal_,
        init.uniform_,
        torch.pca_lowrank,
        torch.svd_lowrank,
    )
}


# --- The mode ---------------------------------------------------------------------


class KeyedMode(TorchFunctionMode):
    """Draws from a key where torch would draw from a global stream."""

    def __init__(self, key: Key, guard: Guard | None) -> None:
        super().__init__()
        self.key = key
        self.guard = guard  # refuses other draws; rules run without it
        self.count = 0  # of the draws so far: draw i uses `fold_in(key, i)`
        self.depth = _checkpoints()  # of those of torch around the block
        # The worker of a DataLoader that entered the block.
        self.worker = None if torch.compiler.is_compiling() else get_worker_info()

    def draw(self) -> Key:
        """Return the key of the next draw."""
        if _checkpoints() > self.depth:
            raise RandomnessError(_CHECKPOINTED.format(where=user_line()))
        key = self.key if torch.compiler.is_compiling() else self._key_here()
        i = self.count
        self.count += 1
        return fold_in(key, i)

    def _key_here(self) -> Key:
        """Return the key of the block, as this process and mode must use it."""
        if is_shared_by_examples(self.key.data):
            raise RandomnessError(_SHARED.format(where=user_line()))
        data = as_fake(self.key.data)
        key = self.key if data is self.key.data else Key(data)
        worker = get_worker_info()
        if worker is None or worker is self.worker:
            return key
        # Workers that are forked in the block all continue from the same count.
        return fold_in(key, worker.seed)

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        kwargs = dict(kwargs or {})
        body = _COMPOSITES.get(func)
        if body is not None:
            if not torch.compiler.is_compiling():
                # Its module may have been patched since.
                body.__globals__.update(_scope(func))
            with self:
                return body(*args, **kwargs)
        rule = _RULES.get(func)
        if rule is None or _has_generator(args, kwargs):
            if torch.compiler.is_compiling():
                func = _traceable(func, args, kwargs)
            return func(*args, **kwargs)
        kwargs.pop("generator", None)
        if self.guard is None:
            return rule(self.draw, *args, **kwargs)
        with without_dispatch_mode(self.guard):
            return rule(self.draw, *args, **kwargs)


class _BindGuard(Guard):
    """Refuses draws outside a recompute. In a recompute remat restores the streams."""

    @override
    def is_off(self) -> bool:
        return is_recomputing()


# --- What Dynamo traces, without a guard ------------------------------------------


# Functions that draw and have no rule. Outside of traces the guard refuses them.
_POOLS = [f"fractional_max_pool{d}d{i}" for d in (2, 3) for i in ("", "_with_indices")]
_UNKEYED = {
    **dict.fromkeys(_POOLS, functional),
    **dict.fromkeys(("cauchy_", "geometric_", "log_normal_"), Tensor),
    **dict.fromkeys(("rrelu", "rrelu_", "binomial", "native_dropout"), torch),
    **dict.fromkeys(("poisson", "_sample_dirichlet", "_standard_gamma"), torch),
}


@constant_in_traces
def _show_draws() -> bool:
    """Make Dynamo pass these functions to modes. It would put them into the graph."""
    unkeyed = [getattr(owner, name) for name, owner in _UNKEYED.items()]
    show_to_traced_modes([*_RULES, *_COMPOSITES, *unkeyed, functional.rrelu])
    return True


@constant_in_traces
def _is_unkeyed(func: Any) -> bool:
    """Say whether a function without a rule draws, judging by its name and tags."""
    if isinstance(func, OpOverloadPacket):
        return any(_is_unkeyed(getattr(func, name)) for name in func.overloads())
    if not isinstance(func, OpOverload):
        return getattr(func, "__name__", "") in _UNKEYED
    if is_tagged_random(func):
        return True
    return func.namespace == "aten" and func.overloadpacket.__name__ in _KEYED_NAMES


_KEYED_NAMES = {f.__name__ for f in [*_RULES, *_COMPOSITES]}


def _traceable(func: Any, args: Any, kwargs: Any) -> Any:
    """Return what Dynamo should trace for a function that has no rule."""
    if _is_unkeyed(func) and not _has_generator(args, kwargs):
        _refuse(getattr(func, "__name__", "an operation"))
    # Attention calls this method. Delete this once Dynamo traces it with a mode on.
    return torch.unflatten if func is Tensor.unflatten else func


def _checkpoints() -> int:
    return 0 if torch.compiler.is_compiling() else checkpoint_depth()


def _has_generator(args: Any, kwargs: Any) -> bool:
    # Tensors first: `torch.Generator` has an `__instancecheck__` of its own, and Dynamo
    # cannot trace that for a tensor.
    given = *args, kwargs.get("generator")
    return any(
        not isinstance(x, Tensor) and isinstance(x, torch.Generator) for x in given
    )


_CHECKPOINTED = (
    "remat: torch.utils.checkpoint runs a draw of a key bound outside of it: {where}\n"
    "Its recompute would draw other numbers. Use remat.remat instead of\n"
    "torch.utils.checkpoint, or call bind inside the checkpointed function."
)
_REFUSED = (
    "remat: {op} drew from a global stream inside remat.random.bind, which has no\n"
    "keyed version of it: {where}\n"
    "Draw with remat.random and a key of your own, or pass a generator."
)


_SHARED = (
    "remat: randomness='different' of torch.func.vmap asks for other numbers for each\n"
    "example, but all examples share the key of remat.random.bind: {where}\n"
    "Map over split(key, n) and call bind inside the mapped function, or use\n"
    "randomness='same'."
)
_LATER = (
    "remat: bind cannot decorate {name}, a generator or coroutine function: its body\n"
    "runs after the call. Decorate a function that it calls, or one that runs it to\n"
    "the end."
)


# --- The block --------------------------------------------------------------------


_F = TypeVar("_F", bound=Callable[..., Any])


class _BindBlock:
    """What `bind` returns: a reusable context manager that is also a decorator."""

    def __init__(self, key: Key) -> None:
        self._key = key
        self._open: list[tuple[Guard | None, KeyedMode]] = []

    @eager_only  # after a graph break it runs as a frame of its own; inlined, it traces
    def __enter__(self) -> None:
        # Dynamo traces no dispatch mode.
        guard = None if torch.compiler.is_compiling() else _BindGuard(_REFUSED)
        if guard is not None:
            guard.__enter__()
        bound = KeyedMode(self._key, guard)
        bound.__enter__()
        self._open.append((guard, bound))

    def __exit__(self, *error: Any) -> None:
        guard, bound = self._open.pop()
        bound.__exit__(*error)
        if guard is not None:
            guard.__exit__(*error)

    def __call__(self, fn: _F) -> _F:
        block = functools.partial(_BindBlock, self._key)
        return in_block(block, fn, _LATER, "__name__")


def bind(key: KeyLike) -> _BindBlock:
    """Make torch's own randomness in a block, or a function, a function of a key.

    The i-th call that draws, counted from 0, uses ``fold_in(key, i)`` and the samplers
    of this package: ``F.dropout(x, p)`` is ``dropout(fold_in(key, i), x, p)`` and
    ``torch.rand(3)`` is ``uniform(fold_in(key, i), 3)``. A call that draws nothing,
    such as dropout in evaluation mode, runs torch's own code and is not counted. A call
    that is passed a generator draws from that generator. The global streams of torch do
    not move, unless the body seeds them.

    These functions are keyed: ``torch.rand``, ``randn``, ``randint`` (and ``_like``),
    ``randperm``, ``bernoulli``, ``normal`` and ``multinomial``; the in-place
    ``bernoulli_``, ``exponential_``, ``normal_``, ``random_`` and ``uniform_``; and
    what is built from them, such as ``torch.nn.init``, ``gumbel_softmax`` and most of
    ``torch.distributions``. In ``torch.nn`` every dropout is keyed, and attention (with
    dropout it runs as its formula). Numbers are real. Every other draw is refused, by
    name: dropout between recurrent layers, fractional pooling, ``rrelu``, ``cauchy_``,
    ``geometric_``, ``log_normal_``, samplers of the Poisson, binomial, gamma and
    Dirichlet distributions, a scripted function, an operator that draws inside.
    Gradients are those of torch: a draw is a constant.

    Each entry, or call of a decorated function, counts from 0 again. What ``bind``
    returns may be entered any number of times. In nested blocks the inner one applies.
    A block belongs to one thread. To map over keys with ``torch.func.vmap``, call
    ``bind`` inside the mapped function: each example then draws its own numbers, with
    any ``randomness``.

    A recompute by :func:`remat.remat` draws the same numbers again. One by
    ``torch.utils.checkpoint`` would not: a draw inside a checkpoint is refused, unless
    the block is inside it too. ``torch.compile`` traces a block by the same rules, into
    one graph. docs/randomness.md tells of threads, and workers of a ``DataLoader``.

    Args:
        key: one key, or its data. It may be batched by vmap.

    Returns:
        A context manager, which also decorates functions that run when they are called.

    Raises:
        RandomnessError: in the block, when an operation that is not keyed draws, when a
            checkpoint of torch draws, or when examples that should differ share a key.
            The message names the operation and the line. The global stream is unmoved.
        ValueError: ``key`` is an array of keys.
        TypeError: the decorated function is a generator or coroutine function.

    Example:
        >>> from torch import nn
        >>> from remat.random import key
        >>> model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
        >>> x = torch.ones(2, 3)
        >>> with bind(key(42)):
        ...     y = model(x)
        >>> torch.equal(y, bind(key(42))(model)(x))
        True
    """
    data = data_of(key)
    if data.ndim != 1:
        raise ValueError(
            f"remat: bind takes one key, got keys of shape {list(data.shape[:-1])}. To "
            "use one key for each example, call bind inside the function that "
            "torch.func.vmap maps over the keys."
        )
    if torch.compiler.is_compiling():
        _show_draws()
    return _BindBlock(Key(data))
