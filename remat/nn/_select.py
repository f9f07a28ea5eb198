"""Which modules of a model are meant, and with which policy; its repeated blocks.

Of the texts of a config file, "full", "none", "every_2", "budget:24GB" and names of
policies say what becomes of modules; others are names of modules or of classes.

Invariant: all that a config says is checked before a module changes, and an error names
the key. No block is in another.
Rejected: to ask libraries which of their classes are blocks: each says it differently,
and a user's own model says nothing. Single layers as blocks: to recompute a linear
layer saves nothing, as it stores its input in any case.
"""

import fnmatch
import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple, TypeAlias

from torch import nn
from torch.nn.parameter import is_lazy

from remat._base.sizes import bytes_in
from remat._transform.api import has_forward
from remat.nn._applied import shown_name
from remat.policies import Decision, Policy, as_policy, within


Picked: TypeAlias = list[tuple[str, nn.Module, Any]]  # names, modules, policies


def chosen(model: nn.Module, select: Any, policy: Any) -> Picked:
    """Return the modules that are selected, by name, and the policy of each."""
    every, policy = meaning(policy, "apply, policy")
    mode = _mode(model, select)
    if mode is not None:
        which, under = mode
        found = blocks(model)
        if not found:
            raise ValueError(_NO_BLOCKS.format(model=type(model).__name__))
        if under is not None and policy is not None:
            raise ValueError(_TWO_POLICIES)
        policy = policy if under is None else under
        step = which if every == 1 else every  # 0 for none
        kept = [*found.items()][::step] if step else []
        return [(name, module, policy) for name, module in kept]
    selectors = as_selectors(select)
    if not selectors:
        raise ValueError(_NO_SELECTORS.format(select=select))
    policies = [(every, policy)] * len(selectors)
    if isinstance(select, Mapping):
        if policy is not None:
            raise ValueError(_TWO_POLICIES)
        policies = [_checked(value, key) for key, value in select.items()]
    counts: Counter[int] = Counter()
    picked: Picked = []
    for name, module, k in selected(model, selectors):
        every, policy = policies[k]
        if every and counts[k] % every == 0:
            picked.append((name, module, policy))
        counts[k] += 1
    return picked


# --- Texts ---


_WHICH = re.compile(r"full|none|every_([1-9]\d*)")
_BUDGET = re.compile(r"budget\s*:(.*)")


def budget_in(select: Any) -> str | None:
    """Return the "24GB" of a text such as "budget:24GB"; None for anything else."""
    found = _BUDGET.fullmatch(select.strip()) if isinstance(select, str) else None
    if found is None:
        return None
    bytes_in(found[1], f"remat.nn.apply({select!r})")  # or an error
    return found[1].strip()  # messages speak in its unit


def _mode(model: nn.Module, select: Any) -> tuple[int, Any] | None:
    """Return what becomes of the repeated blocks; None if modules are selected."""
    if select is None:
        return 1, None
    if not isinstance(select, str):
        return None
    if _WHICH.fullmatch(select):
        return meaning(select, "apply, select")
    named = {name for name, _ in model.named_modules()}
    policy = None if select in named else _constant(select)
    return None if policy is None else (1, policy)


def _checked(value: Any, key: Any) -> tuple[int, Any]:
    """Return how many modules of a key are recomputed, and under which policy."""
    shown = repr(getattr(key, "__name__", key))
    if isinstance(value, str):
        return meaning(value, f"apply, {shown}")
    try:
        return 1, None if value is None else as_policy(value)
    except (TypeError, ValueError) as error:
        raise type(error)(f"remat.nn.apply, {shown}: {error}") from None


def meaning(policy: Any, key: str) -> tuple[int, Any]:
    """Return every how many modules are recomputed, 0 for none, and the policy."""
    if not isinstance(policy, str):
        return 1, policy
    text = policy.strip()
    if which := _WHICH.fullmatch(text):
        return int(which[1] or text == "full"), None
    if budget := _BUDGET.fullmatch(text):
        return 1, within(bytes_in(budget[1], f"remat.nn.{key}"))
    found = _constant(text)
    if found is None:
        advice = _advice(text, _WORDS)
        raise ValueError(_NO_POLICY.format(key=key, text=text, advice=advice))
    return 1, found


def _advice(text: str, known: Iterable[str]) -> str:
    words = [word for word in _WORDS if text.startswith(f"{word}_")]
    near = words or get_close_matches(text, known, 1)
    return "".join(f"Do you mean {each!r}? " for each in near[:1])


def _constant(text: str) -> Policy | None:
    try:
        return as_policy({None: text})
    except TypeError:
        return None


_WORDS = (
    *("full", "none", "every_2", "dots", "dots_with_no_batch_dims"),
    *("save", "recompute", "offload"),
)
_NO_POLICY = (
    "remat.nn.{key}: {text!r} is no policy. {advice}Write 'full', 'none', "
    "'every_2', 'budget:1GB', 'dots', 'save', 'offload', 'disk', or the name of a "
    "constant of remat.policies; in Python also a policy."
)
_NO_BLOCKS = (
    "remat.nn.apply: this {model} has no list of blocks: no ModuleList, ModuleDict or "
    "Sequential has two items of a class that has submodules. Say which modules you "
    "mean: pass a class, a name such as 'layers.*', or a function of a module."
)
_NO_SELECTORS = (
    "remat.nn.apply: {select!r} selects nothing. Pass selectors, or None for the "
    "repeated blocks of the model."
)
_TWO_POLICIES = (
    "remat.nn.apply: `select` gives each module a policy, so leave out `policy`."
)


# --- Modules: by class, by name, or by a function ---


# A class or its name, a module or its name, which may have wildcards, or a function of
# a module, or of its name and itself.
Selector: TypeAlias = type[nn.Module] | nn.Module | str | Callable[..., bool]


def selected(
    model: nn.Module, selectors: Iterable[Selector]
) -> list[tuple[str, nn.Module, int]]:
    """Return modules with a `forward`, by name, and the first selector of each."""
    selectors = [*selectors]
    tests = [_test_of(selector) for selector in selectors]
    found: list[tuple[str, nn.Module, int]] = []
    useful: set[int] = set()
    left_out: dict[int, tuple[str, nn.Module]] = {}
    for name, module in model.named_modules():
        hits = [k for k, test in enumerate(tests) if test(name, module)]
        if hits and has_forward(module):
            useful.update(hits)
            found.append((name, module, hits[0]))
        else:
            left_out = dict.fromkeys(hits, (name, module)) | left_out
    for k, selector in enumerate(selectors):
        if k not in useful and k in left_out:
            name, module = left_out[k]
            inside = f"{name}.*" if name else "*"
            known = {"shown": shown_name(name), "kind": type(module).__name__}
            raise ValueError(_NO_FORWARD.format(inside=inside, **known))
        if k not in useful:
            raise ValueError(_nothing(model, selector))
    return found


def _test_of(selector: Any) -> Callable[[str, nn.Module], bool]:
    if isinstance(selector, type) and issubclass(selector, nn.Module):
        return lambda name, module: isinstance(module, selector)
    if isinstance(selector, str):
        pattern = _pattern(selector)
        return lambda name, module: (
            pattern.fullmatch(name) is not None or selector in _class_names(module)
        )
    if isinstance(selector, nn.Module):
        return lambda name, module: module is selector
    if isinstance(selector, (Policy, Decision)):
        raise TypeError(_POLICY.format(policy=selector))
    if callable(selector) and not isinstance(selector, type):
        return (
            (lambda _, module: selector(module)) if _takes_one(selector) else selector
        )
    raise TypeError(_NO_SELECTOR.format(selector=selector))


def _class_names(module: nn.Module) -> set[str]:
    return {kind.__name__ for kind in type(module).__mro__ if kind is not object}


def _takes_one(selector: Callable[..., Any]) -> bool:
    """Say whether a function takes a module, and not also its name."""
    try:
        inspect.signature(selector).bind("name", "module")
    except ValueError:  # a builtin that has no signature
        return False
    except TypeError:
        return True
    return False


def _pattern(text: str) -> re.Pattern[str]:
    """Return a pattern of names, in which `*` stands for one part of a name."""
    parts = (
        _PARTS[part]
        if part in _PARTS
        else fnmatch.translate(part).removesuffix(r"\Z").replace(".*", "[^.]*")
        for part in text.split(".")
    )
    return re.compile(r"\.".join(parts))


# The name of the model itself is empty, and has no part.
_PARTS = {"*": "[^.]+", "**": r"[^.]+(?:\.[^.]+)*"}


def as_selectors(select: Any) -> Sequence[Selector]:
    """Return one selector or several as a sequence."""
    several = isinstance(select, (Mapping, list, tuple, set, frozenset))
    return [*select] if several else [select]


def refuse_no_name(taker: str, select: Any) -> None:
    """Refuse a text without a name, which would be that of the model itself."""
    for each in as_selectors(select):
        if isinstance(each, str) and not each.strip():
            raise ValueError(_NO_NAME.format(taker=taker, text=each))


def _nothing(model: nn.Module, selector: Any) -> str:
    names = [name for name, _ in model.named_modules() if name]
    more = ", ..." if len(names) > 8 else "."
    has = f"Its modules are: {', '.join(names[:8])}{more}"
    has = has if names else "It has no modules inside."
    shown = getattr(selector, "__name__", repr(selector))
    if isinstance(selector, nn.Module):
        shown = f"a {type(selector).__name__} that is not in it"
    if isinstance(selector, str):
        known = {*names, *_WORDS}.union(*map(_class_names, model.modules()))
        has = _advice(selector, known) + has
    return _NOTHING.format(shown=shown, model=type(model).__name__, has=has)


_NO_SELECTOR = (
    "remat.nn.apply: {selector!r} is not a selector. Pass a class of modules, a name "
    "such as 'layers.*', a module, a function of a module (or of its name and the "
    "module), or a list of these."
)
_NO_NAME = (
    "{taker}: {text!r} is no name of a module. Leave it out for the repeated blocks of "
    "the model, or pass the model itself as select= to have it recomputed as a whole."
)
_POLICY = (
    "remat.nn.apply: pass a policy by name: remat.nn.apply(model, policy={policy})"
)
_NO_FORWARD = (
    "remat: {shown} is a {kind}, which has no `forward`, so nothing would be "
    "recomputed. Select the modules in it: {inside!r}."
)
_NOTHING = (
    "remat.nn.apply: {shown} selects no module of this {model}. {has} "
    "In a name `*` stands for one part and `**` for several."
)


# --- The repeated blocks of a model ---


def blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the repeated blocks of a model: what `remat.nn.apply` recomputes.

    A block is an item of an `nn.ModuleList`, `nn.ModuleDict` or `nn.Sequential` that
    consists of several layers, if the class of one such item of the list occurs twice:
    in a list, or in lists that are not inside of items of other classes. A layer is a
    module that has a parameter of two or more dimensions. If no item consists of
    several layers, those that consist of one layer and an activation, say, count too.

    A *stage* is no block, but the items of its lists are. It is an item that is an
    `nn.Sequential` of blocks, or that has lists of blocks and at most one submodule
    with layers besides.

    Args:
        model: the model. It is not changed.

    Returns:
        The blocks by their names in `model.named_modules()`.

    Example:
        >>> from remat.nn import blocks
        >>> def layer():
        ...     return nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        >>> model = nn.ModuleDict({"body": nn.ModuleList([layer(), layer()])})
        >>> [*blocks(model)]
        ['body.0', 'body.1']
    """
    found: dict[str, nn.Module] = {}
    for fewest in 2, 1:
        rule = _BlockRule(fewest, frozenset())
        rule = _BlockRule(fewest, frozenset(_kinds(model, rule)))
        for name, module in _blocks_in(model, "", rule):
            if all(module is not other for other in found.values()):
                found[name] = module
        if found:
            break
    return found


_LISTS = nn.ModuleList, nn.ModuleDict, nn.Sequential
# A class, by its name: libraries derive one for each module, of the same name.
_ClassName = tuple[str, str]


class _BlockRule(NamedTuple):
    """What is a block."""

    fewest: int  # the layers that it has at least
    kinds: frozenset[_ClassName]  # the classes that occur twice


def _kinds(model: nn.Module, rule: _BlockRule) -> Iterator[_ClassName]:
    """Return the classes of all blocks."""
    for module in model.modules():
        yield from _repeated(_in_list(module, rule).values())
    yield from _repeated(_outermost_items(model, rule))


def _repeated(modules: Iterable[nn.Module]) -> Iterator[_ClassName]:
    """Return the classes that occur twice, but Sequential: that says nothing."""
    counts = Counter(_kind(m) for m in modules if type(m) is not nn.Sequential)
    return (kind for kind, count in counts.items() if count > 1)


def _outermost_items(module: nn.Module, rule: _BlockRule) -> Iterator[nn.Module]:
    """Return the items of lists that are in no other item."""
    for _, child in _items(module):
        is_item = isinstance(module, _LISTS) and type(child) is not nn.Sequential
        if is_item and _is_compound(child, rule):
            yield child
        else:
            yield from _outermost_items(child, rule)


def _blocks_in(
    module: nn.Module, name: str, rule: _BlockRule
) -> Iterator[tuple[str, nn.Module]]:
    blocks = _in_list(module, rule)
    for key, child in _items(module):
        path = f"{name}.{key}" if name else key
        if key in blocks and not _is_stage(child, rule):
            yield path, child
        else:
            yield from _blocks_in(child, path, rule)


def _in_list(module: nn.Module, rule: _BlockRule) -> dict[str, nn.Module]:
    """Return the items of a list that are blocks, or stages."""
    if not isinstance(module, _LISTS):
        return {}
    items = {key: item for key, item in _items(module) if _is_compound(item, rule)}
    counts = Counter(map(_kind, items.values()))
    is_repeated = any(count > 1 or kind in rule.kinds for kind, count in counts.items())
    return items if is_repeated else {}


def _items(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Return the children of a module; those of a list in a list are its own."""
    for key, child in module._modules.items():
        if child is None:
            continue
        if type(module) is type(child) is nn.ModuleList:
            yield from ((f"{key}.{inner}", item) for inner, item in _items(child))
        else:
            yield key, child


def _is_compound(module: nn.Module, rule: _BlockRule) -> bool:
    if not has_forward(module):
        return False
    # An adapter around a layer is a layer.
    inside = getattr(module, "base_layer", module)
    return any(inside.children()) and _layers(inside) >= rule.fewest


def _is_stage(module: nn.Module, rule: _BlockRule) -> bool:
    if _in_list(module, rule):
        return True
    lists = [child for child in module.children() if _in_list(child, rule)]
    others = [m for m in module.children() if m not in lists and _layers(m)]
    return bool(lists) and len(others) <= 1


def _layers(module: nn.Module) -> int:
    """Count the modules that have a parameter of two or more dimensions."""
    return sum(
        any(is_lazy(p) or p.ndim > 1 for p in m.parameters(recurse=False))
        for m in module.modules()
    )


def _kind(module: nn.Module) -> _ClassName:
    kind = type(module)
    return kind.__module__, kind.__qualname__


def with_blocks(
    model: nn.Module, blocks: Sequence[tuple[str, Policy | None]]
) -> tuple[nn.Module, dict[str, Policy | None]]:
    """Return the module that has the blocks, and their policies by its names."""
    policies = dict(blocks)
    while "" not in policies:
        for module in model.modules():
            if policies.keys() <= {name for name, _ in module.named_modules()}:
                return module, policies
        policies = {k.partition(".")[2]: p for k, p in policies.items()}
    return model, dict(blocks)
