"""What the shims of `graphs` and `nodes` expect of torch."""

import functools
import inspect
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from support.shims import expects, leaf, replaced, same
from torch import fx, nn
from torch._functorch import autograd_function, predispatch
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.nn.utils import parametrize
from torch.utils import _pytree, checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.module_tracker import ModuleTracker

from remat._torch import graphs, levels, nodes, noted, operators, process


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


@expects("forget_saved_by_traced")
def test_traced_functions_save_in_a_variable():
    fwd = fx.symbolic_trace(lambda x: (x.sin(), (x.cos(),)))
    bwd = fx.symbolic_trace(lambda ct, cos: ct * cos)
    options = {"non_differentiable_idx": [], "saved_for_backward_idx": [0]}
    apply = autograd_function.autograd_function_apply
    node = apply(fwd, bwd, leaf(), **options).grad_fn
    backward = node._forward_cls.backward
    names = backward.__code__.co_freevars
    held = dict(zip(names, backward.__closure__, strict=True))["saved_values"]
    assert len(held.cell_contents) == 1
    graphs.forget_saved_by_traced(node)
    assert held.cell_contents is None
    graphs.forget_saved_by_traced(leaf().sin().grad_fn)


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


@expects("modules_of_node")
def test_nodes_tell_the_modules_that_they_are_called_in():
    graph, stack = fx.Graph(), {"key": ("L['self'].inner", nn.Linear)}
    x = graph.placeholder("x")
    node = graph.call_function(torch.sin, (x,))
    node.meta["nn_module_stack"] = stack
    assert nodes.modules_of_node(x) is None
    assert nodes.modules_of_node(node) == [("L['self'].inner", nn.Linear)]
    assert nodes.modules_of_node() == []


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
    with replaced(sys.modules, "torch._functorch.compile_utils", stub):
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


# --- Surroundings ---


@expects("read_settings", "write_settings")
def test_settings_are_read_and_written():
    then = process.read_settings()
    assert type(then) is tuple
    assert torch.get_default_dtype() in then
    for put, value in zip(process._SETTERS, then, strict=True):
        put(*value) if isinstance(value, tuple) else put(value)
    assert process.write_settings(then) is None
    assert process.read_settings() == then


@expects("has_hooks_on_all_modules", "hooks_of_trackers", "remove_hooks_since")
def test_hooks_of_trackers_are_removed():
    assert process.has_hooks_on_all_modules() is False
    assert not process.hooks_of_trackers()
    with ModuleTracker() as tracker:
        assert process.has_hooks_on_all_modules() is True
        nn.Linear(1, 1)(leaf().sum(0, keepdim=True))
        before = len(tracker._hooks)
        then = process.hooks_of_trackers()
        nn.Linear(1, 1)(leaf().sum(0, keepdim=True))
        assert len(tracker._hooks) == 2 * before > 0
        process.remove_hooks_since(then)
        assert len(tracker._hooks) == before


@expects("MODULE_HOOKS")
def test_dicts_of_hooks_on_all_modules_are_found():
    known = process.MODULE_HOOKS
    before = [len(hooks) for hooks in known.dicts]
    handles = [
        register(lambda *_: None)
        for register in (
            known.module.register_module_forward_hook,
            known.module.register_module_forward_pre_hook,
            known.module.register_module_full_backward_hook,
            known.module.register_module_full_backward_pre_hook,
        )
    ]
    after = [len(hooks) for hooks in known.dicts]
    for handle in handles:
        handle.remove()
    assert sum(after) - sum(before) == 4
    assert [len(vars(known.module)[name]) for name in known.names] == before


def _modules_hooks():
    names = vars(nn.modules.module)
    return [name for name in names if name.startswith("_global_forward_")]


@expects("hook_all_modules", "unhook_all_modules")
def test_hooks_of_all_modules_have_one_key():
    called = []
    before = (lambda *_: called.append("before")), (lambda *_: called.append("after"))
    try:
        for _ in range(2):
            process.hook_all_modules(*before)
            assert [*nn.modules.module._global_forward_pre_hooks] == [process._KEY]
            assert process.has_hooks_on_all_modules() is False
            nn.ReLU()(leaf())
            process.unhook_all_modules()
        nn.ReLU()(leaf())
        assert called == ["before", "after"] * 2
    finally:  # without the second function they would stay
        for name in _modules_hooks():
            vars(nn.modules.module)[name].pop(process._KEY, None)


@expects("answer_calls")
def test_calls_of_modules_and_functions_are_answered():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

    seen, relu = [], nn.ReLU()
    kinds = nn.Module, torch.autograd.Function
    before = kinds[0].__call__, vars(kinds[1])["apply"]

    def answer(plain, called, args, kwargs):
        seen.append(called)
        return plain(called, *args, **kwargs)

    try:
        process.answer_calls(answer, answer)
        assert relu(torch.ones(2)).sum() == 2
        assert Double.apply(torch.ones(2)).sum() == 4
        assert seen == [relu, Double]
        torch._dynamo.reset()
        compiled = torch.compile(relu, backend="eager", fullgraph=True)
        assert compiled(torch.ones(2)).sum() == 2
    finally:
        kinds[0].__call__, kinds[1].apply = before


@expects("device_generators")
def test_generators_are_found():
    assert all(isinstance(g, torch.Generator) for g in process.device_generators())


@expects("autocast_depth", "is_autocast_active")
def test_autocast_is_seen():
    before = process.autocast_depth()
    assert process.is_autocast_active() is False
    with torch.autocast("cpu", torch.bfloat16):
        assert process.autocast_depth() == before + 1
        assert process.is_autocast_active() is True


@expects("new_cast")
def test_a_cast_is_there_until_the_cache_is_emptied():
    with torch.autocast("cpu", torch.bfloat16):
        cast = process.new_cast()
        with torch.autocast("cpu", enabled=False):
            assert cast() is not None
        assert cast() is not None
    assert cast() is None


@expects("parametrization_cache", "swap_parametrization_cache")
def test_parametrizations_are_cached():
    assert process.parametrization_cache() is None
    fresh: dict[Any, Any] = {}
    with parametrize.cached():
        before = process.swap_parametrization_cache(({}, 0))
        assert process.parametrization_cache() is None
        process.swap_parametrization_cache((fresh, 1))
        assert process.parametrization_cache() is fresh
        assert process.swap_parametrization_cache(before) == (fresh, 1)
        assert process.parametrization_cache() is before[0]


@expects("is_of_checkpoint")
def test_hooks_of_checkpoint_are_known():
    frame = checkpoint._checkpoint_hook.__init__
    assert not process.is_of_checkpoint(leaf)
    # The hooks are functions within that.
    assert process.is_of_checkpoint(frame)


@expects("checkpoint_depth")
def test_checkpoints_are_seen():
    # Unwrapped and reentrant, as the others import Dynamo.
    call = inspect.unwrap(checkpoint.checkpoint)
    depths: list[int] = []

    def note(x):
        depths.append(process.checkpoint_depth())
        return x * 1

    call(note, leaf(), use_reentrant=True)
    if inspect.signature(call).parameters["function"].default is None:
        call(use_reentrant=True)(note)(leaf())
    assert {*depths} == {1}
    assert process.checkpoint_depth() == 0


def _of_list(operators: list[Any]):
    cells = {"policy_fn_or_list": types.CellType(operators)}
    code = process._CODE_OF_LIST
    closure = tuple(cells[name] for name in code.co_freevars)
    return types.FunctionType(code, {}, closure=closure)


@expects("checkpoint_settings")
def test_settings_of_checkpoints_are_read():
    before = process.checkpoint_settings()
    with checkpoint.set_checkpoint_early_stop(False):
        assert process.checkpoint_settings() == (False, before[1])
        with checkpoint.set_checkpoint_debug_enabled(True):
            assert process.checkpoint_settings() == (False, True)
    assert process.checkpoint_settings() == before


@expects("selective_policy")
def test_selective_contexts_tell_their_policy():
    # Not made by torch's function: their class imports Dynamo.
    kind = checkpoint._CachingTorchDispatchMode
    assert "policy_fn" in inspect.signature(kind).parameters
    context = object.__new__(kind)
    context.policy_fn = leaf
    assert process.selective_policy(context) is leaf
    operators: list[Any] = []
    context.policy_fn = _of_list(operators)
    assert process.selective_policy(context) is operators
    assert process.selective_policy(None) is None


class _Node:
    pass


def _unflatten(*_):
    return _Node()


@expects("TORCH_NODES", "register_torch_node")
def test_classes_of_pytrees_are_listed():
    assert {dict, list, tuple} <= operators.TORCH_NODES.keys()
    takes = inspect.signature(_pytree.register_pytree_node)
    given: list[inspect.BoundArguments] = []

    def note(*args, **kwargs):
        given.append(takes.bind(*args, **kwargs))

    def flatten(_):
        return [3], None

    # Not registered, which could not be undone.
    with replaced(vars(_pytree), "register_pytree_node", note):
        register = operators.register_torch_node
        register(_Node, flatten, _unflatten, name="name", children=["a"])
        register(_Node, flatten, _unflatten)
    assert len(given) == 2
    keyed, _ = given[0].arguments["flatten_with_keys_fn"](None)
    assert keyed == [(_pytree.GetAttrKey("a"), 3)]


@expects("Renorm", "Renorms", "later_renorms", "renorms_taken_back")
def test_scaled_rows_are_noted():
    weight, notes = torch.tensor([[3.0], [0.5]]), noted.Noted()
    notes.start()
    try:
        torch.nn.functional.embedding(torch.tensor([0, 1]), weight, max_norm=1.0)
    finally:
        notes.end()
    (note,) = notes.renorms
    assert (note.rows.tolist(), note.before.tolist()) == ([0], [[3.0]])
    assert weight[0] < 3.0
    later = noted.later_renorms(note.storage)
    torch.nn.functional.embedding(torch.tensor([1]), weight, max_norm=0.1)
    with noted.renorms_taken_back():
        torch.nn.functional.embedding(torch.tensor([1]), weight, max_norm=0.01)
    assert [note.rows.tolist() for note in later.changes] == [[1]]


@expects("Noted", "seed")
def test_seeds_are_taken_again():
    state = torch.get_rng_state()
    try:
        forward = noted.Noted()
        first = _draw_with(forward)
        assert forward.seeds == [first[0]]
        assert _draw_with(noted.Noted(forward.seeds)) == first
    finally:
        torch.set_rng_state(state)


def _draw_with(notes: noted.Noted):
    notes.start()
    try:
        return noted.seed(), torch.rand(2).tolist()
    finally:
        notes.end()


@expects("twister_memory", "twister_state")
def test_memory_tells_what_was_drawn():
    generator = torch.Generator().manual_seed(0)
    memory = process.twister_memory(generator)
    before = memory.raw
    assert memory.raw == before
    first = torch.randn(3, generator=generator)
    assert memory.raw != before
    generator.set_state(process.twister_state(before))
    assert torch.equal(torch.randn(3, generator=generator), first)
