"""Modules whose `forward` is recomputed: what `remat(module)` returns.

Such a module is of a subclass of the module's class, of the same name, whose `forward`
is `remat` of the inherited one. `recompute_in_place` gives a module that class. A
*view* is another module of it, which runs on the module.

Invariant: a view has the module's own dictionary of attributes: parameters, buffers,
hooks and modes are the same in both.
Rejected: a module that holds the module: it adds a level to all names. To assign to
`module.forward`: a cycle, which some libraries make themselves.
"""

import contextlib
import copy
import functools
import types
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import torch
from torch import nn
from typing_extensions import override

from remat._base.code import MADE
from remat._partial.options import Options
from remat._reach.objects import members_of
from remat._transform.rematerialized import SCRIPTED, BoundMethod, Rematerialized
from remat._transform.traced import call_traced
from remat.policies import Policy


M = TypeVar("M", bound=nn.Module)


class Spec(NamedTuple):
    """How a class recomputes its `forward`."""

    is_view: bool  # its modules are views
    is_own: bool  # they have a `forward` besides that of the class
    where: str  # the line that asked for it
    options: Options
    by: str = "remat.remat"  # the public function that was called


# A base class that has no layout, which the module's class follows.
_Module: Any = nn.Module if TYPE_CHECKING else object


class RematModule(_Module):
    """A module whose `forward` is recomputed. Its other base class is the module's."""

    _remat_base: type[nn.Module]  # of each subclass: the class that it was made of
    _remat_spec: Spec
    _remat_forward: Any  # how the `forward` of a module is recomputed
    _remat_module: nn.Module  # of a view: the module

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Do nothing: the module's class may register each subclass that it gets."""

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        if not has_remat_class(self):  # a library derived a class from ours
            return super().__reduce_ex__(protocol)
        if self._remat_spec.is_view:
            return _view, (self._remat_module, self._remat_spec)
        reduced = super().__reduce_ex__(protocol)
        if isinstance(reduced, str):
            return reduced
        make, args, *state = reduced
        if args and args[0] is type(self):  # as `object` does
            make, args = _new, (self._remat_base, *args[1:])
        return _again, (make, args, self._remat_spec), *state

    @override
    def __repr__(self) -> str:
        options = self._remat_spec.options
        shown = super().__repr__()
        return shown if options.unless_followed else f"{prefix(options.policy)} {shown}"

    def __prepare_scriptable__(self) -> Any:
        """Refuse to be compiled by TorchScript."""
        raise TypeError(SCRIPTED)

    def _replicate_for_data_parallel(self) -> Any:
        """Return a module with the same attributes, which gets other parameters."""
        if not (has_remat_class(self) and self._remat_spec.is_view):
            return super()._replicate_for_data_parallel()
        replica = self._remat_module._replicate_for_data_parallel()
        return _give_class(replica, self._remat_spec._replace(is_view=False))


def prefix(policy: Policy | None) -> str:
    """Return what stands before the name of a module that is recomputed."""
    return "remat" if policy is None else f"remat(policy={policy})"


def has_remat_class(module: nn.Module) -> bool:
    """Say whether a module's class was made here; not whether it derives from one."""
    return MADE in vars(type(module))


def module_of(value: Any) -> Any:
    """Return the module that a view is of; anything else as it is."""
    is_view = isinstance(value, RematModule) and value._remat_spec.is_view
    return value._remat_module if is_view else value


def recomputed_by(fn: Any) -> tuple[Any, Rematerialized] | None:
    """Return what a rematerialized function recomputes, and that function."""
    if isinstance(fn, types.MethodType) and isinstance(fn.__self__, RematModule):
        is_ours = fn.__func__ is vars(type(fn.__self__)).get("forward")
        fn = fn.__self__ if is_ours else fn
    if isinstance(fn, RematModule):
        fn = fn._remat_forward
    if isinstance(fn, Rematerialized):
        return fn.__wrapped__, fn
    is_method = isinstance(fn, (types.MethodType, BoundMethod))
    if is_method and isinstance(fn.__func__, Rematerialized):
        return types.MethodType(fn.__func__.__wrapped__, fn.__self__), fn.__func__
    if isinstance(fn, functools.partial):
        found = recomputed_by(fn.func)
        if found is not None:
            return functools.partial(found[0], *fn.args, **fn.keywords), found[1]
    return None


# --- Modules ---


def view_of(module: M, where: str, options: Options) -> M:
    """Return a view of a module, whose `forward` is recomputed."""
    spec = Spec(True, "forward" in vars(module), where, options)
    return cast("M", _view(module, spec))


def _view(module: nn.Module, spec: Spec) -> nn.Module:
    view = object.__new__(_class_of(type(module), spec))
    # Some modules hand attributes on to others.
    object.__setattr__(view, "__dict__", vars(module))
    for slot in members_of(type(module)):
        with contextlib.suppress(AttributeError):  # it is empty
            slot.__set__(view, slot.__get__(module))
    # Last: a view of a view has this slot twice.
    object.__setattr__(view, "_remat_module", module)
    return view


def recompute_in_place(
    module: nn.Module, where: str, options: Options, by: str
) -> None:
    _give_class(module, Spec(False, "forward" in vars(module), where, options, by))


def _give_class(module: nn.Module, spec: Spec) -> nn.Module:
    object.__setattr__(module, "__class__", _class_of(type(module), spec))
    return module


def undone(module: RematModule) -> nn.Module:
    """Return a module whose `forward` is not recomputed any more."""
    if module._remat_spec.is_view:
        return module_of(module)
    object.__setattr__(module, "__class__", module._remat_base)
    return module


def _new(kind: type[nn.Module], *args: Any) -> nn.Module:
    return kind.__new__(kind, *args)


def _again(make: Any, args: tuple[Any, ...], spec: Spec) -> nn.Module:
    """Make a module again that was pickled, or that `copy` copies."""
    return _give_class(make(*args), spec)


# --- Classes ---

# By the class that they were made of.
_CLASSES: weakref.WeakKeyDictionary[type, weakref.WeakValueDictionary[Spec, type]]
_CLASSES = weakref.WeakKeyDictionary()


def _class_of(base: type[nn.Module], spec: Spec) -> type[nn.Module]:
    """Return the subclass of a class whose `forward` is recomputed."""
    classes = _CLASSES.setdefault(base, weakref.WeakValueDictionary())
    made = classes.get(spec)
    if made is None:
        made = classes[spec] = _made(base, spec)
    return made


def _made(base: type[nn.Module], spec: Spec) -> type[nn.Module]:
    names: dict[str, Any] = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        MADE: base,
        "_remat_spec": spec,
        "_remat_forward": _OwnForward(spec) if spec.is_own else _Forward(spec),
    }
    names["forward"] = _forward_of(base, names["_remat_forward"])
    if spec.is_view:
        names["__slots__"] = ("_remat_module",)
    becomes = getattr(base, "cls_to_become", None)
    if isinstance(becomes, type):  # a lazy module changes its class when it is called
        names["cls_to_become"] = _class_of(becomes, spec)
    if hasattr(base, "__deepcopy__"):
        names["__deepcopy__"] = _deepcopied
    if issubclass(base, torch.fx.GraphModule):
        names["recompile"] = _recompiled
    bases = (base,) if issubclass(base, RematModule) else (RematModule, base)
    try:
        return type(base)(base.__name__, bases, names)
    except TypeError as error:
        raise TypeError(_FINAL.format(name=base.__qualname__)) from error


def _forward_of(base: Any, forward: Any) -> Any:
    """Return the `forward` of a class: a function where that of its base is one."""
    # Dynamo looks `type(module).forward` up as if no descriptor were there. A traced
    # module's cannot be looked up in its class.
    is_function = type(getattr(base, "forward", None)) is types.FunctionType
    if type(forward) is _OwnForward or not is_function:
        return forward

    @functools.wraps(base.forward)
    def recomputed(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, forward._kind):  # a lazy one, which has a new class
            return self._remat_forward(*args, **kwargs)
        return forward.__get__(self)(*args, **kwargs)

    return recomputed


def _deepcopied(self: Any, memo: dict[int, Any]) -> Any:
    """Copy a module whose class says how."""
    spec = self._remat_spec
    if spec.is_view:
        return _view(copy.deepcopy(self._remat_module, memo), spec)
    with _as_without_us(self):
        copied = copy.deepcopy(self, memo)
    return _give_class(copied, spec)


def _recompiled(self: Any) -> Any:
    """Have a module of torch.fx change its own class, and not the one made of it."""
    if self._remat_spec.is_view:
        return self._remat_module.recompile()
    with _as_without_us(self):
        return self.recompile()


@contextmanager
def _as_without_us(module: Any) -> Iterator[None]:
    """Give a module back the class that its rematerialized class was derived from."""
    kind = type(module)
    object.__setattr__(module, "__class__", kind._remat_base)
    try:
        yield
    finally:
        object.__setattr__(module, "__class__", kind)


_FINAL = (
    "remat: no class can be derived of {name}, which is how remat recomputes a module. "
    "Apply remat to its method: remat(module.forward)."
)


# --- Their `forward` ---


class _Forward:
    """The `forward` that a module would have without remat, recomputed.

    It is looked up in each call: a library may replace that of the class.
    """

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._call: Rematerialized | None = None

    def __set_name__(self, kind: Any, name: str) -> None:
        self._kind = kind

    def __get__(self, module: nn.Module | None, owner: type | None = None) -> Any:
        if module is None:
            return self._recomputed(self._kind._remat_base.forward)
        forward = self._without_us(module)
        if torch.compiler.is_exporting():  # which names parameters by this method
            return forward
        if torch.compiler.is_compiling():
            where, options = self._spec.where, self._spec.options
            name = self._kind.__qualname__
            return functools.partial(call_traced, forward, name, where, options)
        is_method = type(forward) is types.MethodType
        if is_method and type(forward.__func__) is types.FunctionType:
            return BoundMethod(self._recomputed(forward.__func__), forward.__self__)
        return Rematerialized(forward, self._spec.where, self._spec.options)

    def _recomputed(self, fn: Any) -> Any:
        call = self._call
        if call is None or call.__wrapped__ is not fn:
            where, options = self._spec.where, self._spec.options
            call = Rematerialized(fn, where, options, self._kind.__qualname__)
            self._call = call
        return call

    def _without_us(self, module: Any) -> Any:
        if self._spec.is_view and type(module) is self._kind:
            module = module._remat_module
            if isinstance(module, torch.jit.ScriptModule):
                return module
            if self._spec.is_own:
                return module.forward
            # A `forward` that the module got since calls this one.
            return type(module).forward.__get__(module, type(module))
        if self._spec.is_own and "forward" in vars(module):
            return vars(module)["forward"]
        inherited: Any = super(self._kind, module)
        return inherited.forward


class _OwnForward(_Forward):
    """The own `forward` of a module, besides that of its class; it may be replaced."""

    def __set__(self, module: nn.Module, forward: Any) -> None:
        vars(module)["forward"] = forward

    def __delete__(self, module: nn.Module) -> None:
        del vars(module)["forward"]
