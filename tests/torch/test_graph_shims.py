"""What the shims of `graphs` and `nodes` expect of torch.

Invariant: a check fails where a name of it is missing or does something else.
Rejected: to have Dynamo or inductor compile something, or to make fake tensors, which
imports Dynamo. That takes a second, so what is asked of them is looked up in their
text.
"""

import functools
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from support.shims import expects, replaced, same
from torch import fx, nn
from torch._functorch import predispatch
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.utils._python_dispatch import TorchDispatchMode

from remat._torch import graphs, levels, nodes


def _text(*path):
    return Path(torch.__file__).parent.joinpath(*path).read_text("utf-8")


@expects("OF_THIS_PROCESS", "as_node", "let_dynamo_see_nodes")
def test_nodes_run_what_lowers_them():
    text = _text("_higher_order_ops", "wrap.py")
    assert "return wrapper_fn(inner_fn)(*args, **kwargs)" in text
    assert nodes.as_node.name() == "remat"
    # `cacheable()` imports the compiler.
    assert (nodes.as_node._cacheable, nodes._uncached._cacheable) == (True, False)
    assert isinstance(nodes.OF_THIS_PROCESS, str)
    name = "torch._dynamo.variables.higher_order_ops"
    table: dict[str, Any] = {}
    base = type("Base", (), {"_call_function": lambda *_: "traced"})
    stub = SimpleNamespace(
        _hop_name_to_variable_class=table,
        DynamoBypassingWrapperHigherOrderVariable=base,
    )
    with replaced(sys.modules, name, stub):
        nodes.let_dynamo_see_nodes()
    assert issubclass(table["remat"], base)
    text = _text("_dynamo", "variables", "higher_order_ops.py")
    assert "_hop_name_to_variable_class.get(value.__name__)" in text
    assert "class DynamoBypassingWrapperHigherOrderVariable" in text
    text = _text("_dynamo", "variables", "torch_function.py")
    assert "if cls.stack_value_singleton not in tx.output.side_effects" in text
    assert "return m.scope == scope_id" in _text("_dynamo", "variables", "base.py")


@expects("is_below_tracer")
def test_tracers_are_seen():
    assert not graphs.is_below_tracer()
    keys = torch._C._TorchDispatchModeKey
    assert (graphs._FUNCTIONAL, graphs._FAKE) == (keys.FUNCTIONAL, keys.FAKE)


@expects("UnknownLevelError", "faking", "inputs_of_body", "is_body", "run_body")
def test_bodies_are_run():
    graph = fx.Graph()
    graph.placeholder("x").meta["example_value"] = "fake"
    body = nn.Module()
    body.graph, body.meta = graph, dict[str, Any]()
    assert nodes.is_body(object.__new__(fx.GraphModule))
    assert not nodes.is_body(body)
    assert nodes.inputs_of_body(body) == ["fake"]
    with nodes.faking([torch.ones(2)]) as copies:
        assert copies is None  # nothing is fake
    # To run a real one imports locks of processes.
    with replaced(vars(nodes), "_BodyRun", _Run):
        assert nodes.run_body(body, 1, 2) == (body, 1, 2)
    # The names of what opens levels, and of what is told their numbers.
    functorch = torch._C._functorch
    hooks = torch._C._autograd
    assert nodes._name(functorch._wrap_for_grad) in nodes._RUNS
    assert nodes._name(predispatch._add_batch_dim) in nodes._RUNS
    assert nodes._name(hooks._saved_tensors_hooks_disable) in nodes._RUNS
    assert issubclass(nodes.UnknownLevelError, RuntimeError)
    known = vars(functorch).keys() | vars(predispatch).keys() | vars(hooks).keys()
    assert nodes._RUNS.keys() - known == {"invoke_subgraph", "register_hook"}


class _Run:
    def __init__(self, body):
        self._body = body

    def run(self, *args):
        return self._body, *args

    def close_all(self):
        """Nothing is open."""


@expects("FunctionalValue")
def test_values_in_graphs_are_told_apart():
    x = torch.ones(2)
    value = graphs.FunctionalValue(x)
    assert not value.has_changed()
    x.add_(1)
    assert not value.has_changed()  # it is in no graph
    functional = _text("_subclasses", "functional_tensor.py")
    assert "torch._sync(" in functional
    assert "torch._from_functional_tensor(" in functional


@expects("bottoms", "unlevelled")
def test_levels_are_left():
    ones = torch.ones(2)
    with levels.grad_level() as level:
        x = levels.leaf_at(level, ones, requires_grad=True)
        (below,) = graphs.bottoms([x])
        with graphs.unlevelled():
            sine = ones.sin()
        assert levels.base_tensor(sine) is sine
        assert levels.base_tensor(ones.sin()) is not sine
    assert same(below, ones)
    assert not below.requires_grad


@expects("counted_levels", "is_under_jvp")
def test_levels_of_forward_mode_are_counted():
    assert not graphs.is_under_jvp()
    transforms, dual = graphs._transforms, graphs._dual
    before = transforms.JVP_NESTING, dual._current_level
    assert before == (0, -1)
    functorch = torch._C._functorch
    functorch._jvp_increment_nesting()
    try:
        assert graphs.is_under_jvp()
        with graphs.counted_levels():
            assert (transforms.JVP_NESTING, dual._current_level) == (1, 0)
    finally:
        functorch._jvp_decrement_nesting()
    assert before == (transforms.JVP_NESTING, dual._current_level)


@expects("draw_again", "draw_and_keep_state", "let_graphs_draw")
def test_draws_are_repeated():
    rand, x = torch.ops.aten.rand_like.default, torch.ones(4)
    before = torch.get_rng_state()
    try:
        state, first = graphs.draw_and_keep_state(rand, x)
        second = graphs.draw_again(state, rand, x)
    finally:
        torch.set_rng_state(before)
    assert same(first, second)
    # What graphs lack is made up for at the first draw.
    rand_ops: list[Any] = []
    stub = SimpleNamespace(rand_ops=rand_ops)
    table = graphs.draw_and_keep_state.python_key_table
    with (
        replaced(sys.modules, "torch._functorch.compile_utils", stub),
    ):
        graphs.let_graphs_draw()
        assert rand_ops == [graphs.draw_and_keep_state]
        assert table[ProxyTorchDispatchMode] is graphs._draw_of_proxies
    assert "get_aten_target(n) in rand_ops" in _text("_functorch", "compile_utils.py")


@expects("TracedMode")
def test_modes_see_what_is_traced():
    assert graphs.TracedMode.ignore_compile_internals()
    assert hasattr(TorchDispatchMode, "supports_higher_order_operators")
    modes = _text("utils", "_python_dispatch.py")
    assert "def ignore_compile_internals(cls)" in modes


@expects("lower_to_alias")
def test_inductor_is_told_of_aliases():
    operator = torch.ops.aten.alias.default
    table: dict[Any, Any] = {}

    def register(op, **_):
        return functools.partial(table.setdefault, op)

    stub = SimpleNamespace(lowerings=table, register_lowering=register)
    modules: dict[str, Any] = dict.fromkeys(_OF_INDUCTOR, SimpleNamespace())
    modules["torch._inductor.lowering"] = stub
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        graphs.lower_to_alias(operator, operator)
    finally:
        for name, module in before.items():
            del sys.modules[name]
            if module is not None:
                sys.modules[name] = module
    assert set(table) == {operator}
    text = _text("_inductor", "lowering.py")
    assert "def register_lowering" in text
    assert "def create(cls, kernel: _OpOverloads, *args" in _text("_inductor", "ir.py")


_OF_INDUCTOR = [
    f"torch._inductor.{name}"
    for name in ("compile_fx", "ir", "lowering", "virtualized")
]
