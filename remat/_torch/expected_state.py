"""What the shims of `state` and `process` expect of torch.

Invariant: a check fails where a name of it is missing or does something else.
Rejected: to have Dynamo compile something. Importing it takes seconds, so what it asks
for is looked up in its text.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, overrides
from torch.fx import _symbolic_trace
from torch.nn.utils import parametrize
from torch.utils import _python_dispatch, _pytree, checkpoint
from typing_extensions import override

from remat._torch import process as _process, state as _state
from remat._torch.selftest import expects, leaf, same


@contextmanager
def _replaced(scope: dict[str, Any], name: str, value: Any) -> Iterator[None]:
    missing = object()
    before = scope.get(name, missing)
    scope[name] = value
    try:
        yield
    finally:
        if before is missing:
            del scope[name]
        else:
            scope[name] = before


@expects("read_settings", "write_settings")
def _settings_are_read_and_written() -> None:
    then = _process.read_settings()
    assert type(then) is tuple
    assert torch.get_default_dtype() in then
    for put, value in zip(_process._SETTERS, then, strict=True):
        put(*value) if isinstance(value, tuple) else put(value)
    assert _process.write_settings(then) is None
    assert _process.read_settings() == then


@expects("default_generators", "device_generators")
def _generators_are_found() -> None:
    more = _process.device_generators()
    assert [torch.default_generator, *more] == _process.default_generators()
    assert all(isinstance(g, torch.Generator) for g in more)


@expects("TORCH_NODES", "register_torch_node")
def _classes_of_pytrees_are_listed() -> None:
    assert {dict, list, tuple} <= _state.TORCH_NODES.keys()
    takes = inspect.signature(_pytree.register_pytree_node)
    given: list[inspect.BoundArguments] = []

    def note(*args: Any, **kwargs: Any) -> None:
        given.append(takes.bind(*args, **kwargs))

    def flatten(_: Any) -> tuple[list[Any], Any]:
        return [3], None

    # Not registered, which could not be undone.
    with _replaced(vars(_pytree), "register_pytree_node", note):
        _state.register_torch_node(_Class, "name", ["a"], flatten, _Class)
    keyed, _ = given[0].arguments["flatten_with_keys_fn"](None)
    assert keyed == [(_pytree.GetAttrKey("a"), 3)]


@expects(
    *("HigherOrderOperator", "OpOverload", "OpOverloadPacket", "is_operator"),
    *("is_view_op", "kernel_of", "overload_of"),
)
def _operators_are_told_apart() -> None:
    packet, x = torch.ops.aten.sin, torch.ones(2)
    assert type(packet) is _state.OpOverloadPacket
    assert type(packet.default) is _state.OpOverload
    assert isinstance(torch.ops.higher_order.cond, _state.HigherOrderOperator)
    assert [*map(_state.is_operator, (packet, torch.sin))] == [True, False]
    assert _state.is_view_op(packet.default) is False
    assert _state.is_view_op(torch.ops.aten.view.default) is True
    assert _state.kernel_of(packet.default) is not packet.default
    assert same(_state.kernel_of(packet.default)(x), x.sin())
    assert _state.overload_of(packet.default) is packet.default
    methods = [m for m in vars(_state.CustomOpDef).values() if callable(m)]
    assert any("_opoverload" in m.__code__.co_names for m in methods)


class _Mode(overrides.TorchFunctionMode):
    @override
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return "seen"


class _Class(Tensor):
    @classmethod
    @override
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return "seen"


@expects(
    *("function_mode_count", "function_modes", "under_function_modes", "is_unwatched")
)
def _function_modes_are_exchanged() -> None:
    x, negative = torch.ones(2), -torch.ones(2)
    assert _state.is_unwatched(x) is True
    assert _state.function_mode_count() == 0
    with _Mode() as mode:
        assert _state.function_modes() == [mode]
        assert _state.is_unwatched(x) is False
        plain = _state.under_function_modes([], torch.neg, x)
        assert torch.neg(x) == "seen"
    assert same(plain, negative)
    assert _state.under_function_modes([mode], torch.neg, x) == "seen"
    assert _state.function_mode_count() == 0


@expects("no_torch_function", "no_torch_functions", "torch_functions")
def _torch_functions_are_switched() -> None:
    x = torch.ones(2).as_subclass(_Class)
    with _state.no_torch_functions():
        assert torch.neg(x) != "seen"
        with _state.torch_functions():
            assert torch.neg(x) == "seen"
    silent = type("Silent", (Tensor,), {"__torch_function__": _state.no_torch_function})
    assert type(torch.neg(torch.ones(2).as_subclass(silent))) is Tensor


@expects("autocast_depth", "is_autocast_active")
def _autocast_is_seen() -> None:
    before = _state.autocast_depth()
    assert _state.is_autocast_active() is False
    with torch.autocast("cpu", torch.bfloat16):
        assert _state.autocast_depth() == before + 1
        assert _state.is_autocast_active() is True


@expects("must_inline")
def _traces_are_seen() -> None:
    assert _state.must_inline() is False
    with torch.inference_mode():
        assert _state.must_inline() is True
    assert torch._C._get_dispatch_mode(_state._PROXY) is None


@expects("parametrization_cache", "swap_parametrization_cache")
def _parametrizations_are_cached() -> None:
    assert _state.parametrization_cache() is None
    fresh: dict[Any, Any] = {}
    with parametrize.cached():
        before = _state.swap_parametrization_cache(({}, 0))
        assert _state.parametrization_cache() is None
        _state.swap_parametrization_cache((fresh, 1))
        assert _state.parametrization_cache() is fresh
        assert _state.swap_parametrization_cache(before) == (fresh, 1)
        assert _state.parametrization_cache() is before[0]


# By its text, as importing Dynamo takes seconds.
@expects("constant_in_traces", "eager_only", "show_to_traced_modes")
def _dynamo_asks_what_is_set() -> None:
    dynamo = Path(torch.__file__).parent / "_dynamo"
    functions = (dynamo / "variables" / "functions.py").read_text()
    assert "_dynamo_marked_constant" in functions
    function = _state.constant_in_traces(lambda: 1)
    assert vars(function) == {"_dynamo_marked_constant": True}
    assert _state.eager_only(function) is function
    assert function() == 1
    variables = (dynamo / "variables" / "torch.py").read_text()
    assert "in get_overridable_functions()" in variables
    shown: set[Callable[..., Any]] = set()
    stub = SimpleNamespace(get_overridable_functions=lambda: shown)
    with _replaced(sys.modules, "torch._dynamo.variables.torch", stub):
        _state.show_to_traced_modes([torch.sin])
    assert shown == {torch.sin}


@expects("checkpoint_depth")
def _checkpoints_are_seen() -> None:
    # Unwrapped and reentrant, as the others import Dynamo.
    call: Any = inspect.unwrap(checkpoint.checkpoint)
    depths: list[int] = []

    def note(x: Tensor) -> Tensor:
        depths.append(_state.checkpoint_depth())
        return x * 1

    call(note, leaf(), use_reentrant=True)
    if inspect.signature(call).parameters["function"].default is None:
        call(use_reentrant=True)(note)(leaf())
    assert {*depths} == {1}
    assert _state.checkpoint_depth() == 0


@expects("native_random")
def _keyed_draws_have_kernels() -> None:
    module = _state.native_random("cpu")
    names = () if module is None else ("split", "uniform_", "normal_")
    assert all(callable(getattr(module, name)) for name in names)
    # Where there are kernels, whoever imported what: torch imports no such module.
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    assert (module is not None) == has("aten::_philox_uniform_", "CPU")
    # Not "meta", whose kernels torch's compiler registers when it is imported.
    assert _state.native_random("hpu") is None


class _Empty(Tensor):
    __torch_function__ = _state.no_torch_function

    @classmethod
    @override
    def __torch_dispatch__(  # pyrefly: ignore[bad-override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise AssertionError(func)


@expects("tensor_without_data", "refuse_data_ptr")
def _tensors_are_made_without_data() -> None:
    empty = _state.tensor_without_data(_Empty, (2, 3), dtype=torch.float32)
    assert (type(empty), empty.shape) == (_Empty, (2, 3))
    _state.refuse_data_ptr(empty)
    try:
        empty.data_ptr()
    except RuntimeError:
        return
    raise AssertionError("the address of nothing was given")


@expects("call_kernel")
def _kernels_resolve_lazy_bits() -> None:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.Conjugate)
    with torch._C._ExcludeDispatchKeyGuard(keys):
        assert _is_conjugate_excluded()
        assert _state.call_kernel(_is_conjugate_excluded) is False
        assert _is_conjugate_excluded()


def _is_conjugate_excluded() -> bool:
    key = torch._C.DispatchKey.Conjugate
    return torch._C._dispatch_tls_is_dispatch_key_excluded(key)


@expects("is_lazy")
def _lazy_bits_are_seen() -> None:
    x = torch.ones(2, dtype=torch.complex64)
    zero = torch._efficientzerotensor(2)
    assert [*map(_state.is_lazy, (x, x.conj(), zero))] == [False, True, True]


@expects("as_fake")
def _fake_tensors_are_made() -> None:
    x, key = torch.ones(2), _state._FAKE

    def from_tensor(tensor: Tensor) -> Any:
        return tensor, "fake"

    mode: Any = SimpleNamespace(from_tensor=from_tensor, _mode_key=key)
    assert _state.as_fake(x) is x
    torch._C._set_dispatch_mode(mode)
    try:
        assert _state.as_fake(x) == (x, "fake")
    finally:
        torch._C._unset_dispatch_mode(key)


def _flags() -> dict[str, Any]:
    return {k: v for k, v in vars(_python_dispatch).items() if type(v) is bool}


@contextmanager
def _with_flags_down() -> Iterator[None]:
    # Modes of two threads that overlap leave one of torch's flags set for good.
    before = _flags()
    vars(_python_dispatch).update(dict.fromkeys(before, False))
    try:
        yield
    finally:
        vars(_python_dispatch).update(before)


@expects(
    *("LeanDispatchMode", "undisturbed", "unseen", "viewed", "without_dispatch_mode")
)
@_with_flags_down()
def _dispatch_modes_are_entered_and_left() -> None:
    before = _flags()
    with _python_dispatch.TorchDispatchMode():
        inside = _flags()

    class Lean(_state.LeanDispatchMode):
        @override
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.op = func
            return func(*args, **(kwargs or {}))

    x, mode = torch.ones(4), Lean()
    with mode:
        assert _flags() == inside != before
        x.sin()
        alone = functools.partial(_state.without_dispatch_mode, mode)
        for quiet in (_state.undisturbed, _state.unseen, alone):
            with quiet():  # some are at work as soon as they are made
                x.cos()
        view = _state.viewed(x, (2,), (2,), 1)
    assert mode.op is torch.ops.aten.sin.default
    assert (view.shape, view.storage_offset()) == ((2,), 1)
    assert _flags() == before


@expects("outside_dispatch_mode")
def _what_is_entered_inside_of_a_mode_is_left_with_it() -> None:
    class Noting(_state.LeanDispatchMode):
        @override
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(self)
            return func(*args, **(kwargs or {}))

    seen: list[Any] = []
    x, around, mode, inner = torch.ones(2), Noting(), Noting(), Noting()
    with around, mode, inner:
        with _state.outside_dispatch_mode(mode):
            x.sin()
        assert seen == [around]
        x.sin()
    assert seen == [around, inner, mode, around]


@expects("is_traced_symbolically")
def _a_symbolic_trace_is_noticed() -> None:
    assert not _state.is_traced_symbolically()
    with _replaced(vars(_symbolic_trace), "is_fx_symbolic_tracing", lambda: True):
        assert _state.is_traced_symbolically()
        assert _state.must_inline()


@expects("not_scriptable")
def _torchscript_is_refused() -> None:
    def fn(x: Tensor) -> Tensor:
        return x

    _state.not_scriptable(fn, "no script")
    # To compile it would warn, and import much.
    assert vars(fn)["__script_unsupported"] == "no script"
    text = Path(sys.modules["torch.jit._script"].__file__ or "").read_text("utf-8")
    assert "__script_unsupported" in text
