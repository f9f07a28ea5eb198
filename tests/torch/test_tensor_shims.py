"""What the shims of `operators`, `tensors`, and of collectives, expect of torch."""

import copy
import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.shims import expects, replaced, same
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.fx import _symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx

from remat._torch import graphs, operators, shards, tensors, tracing


CPU = torch.device("cpu")


@expects(
    *("HigherOrderOperator", "OpOverload", "OpOverloadPacket", "is_operator"),
    *("is_composite", "is_view_op", "kernel_of", "overload_of"),
)
def test_operators_are_told_apart():
    packet, x = torch.ops.aten.sin, torch.ones(2)
    assert type(packet) is operators.OpOverloadPacket
    assert type(packet.default) is operators.OpOverload
    assert isinstance(torch.ops.higher_order.cond, operators.HigherOrderOperator)
    assert [*map(operators.is_operator, (packet, torch.sin))] == [True, False]
    assert operators.is_composite(torch.ops.aten.matmul.default) is True
    assert operators.is_composite(packet.default) is False
    assert operators.is_view_op(packet.default) is False
    assert operators.is_view_op(torch.ops.aten.view.default) is True
    assert operators.kernel_of(packet.default) is not packet.default
    assert same(operators.kernel_of(packet.default)(x), x.sin())
    assert operators.overload_of(packet.default) is packet.default
    methods = [m for m in vars(operators.CustomOpDef).values() if callable(m)]
    assert any("_opoverload" in m.__code__.co_names for m in methods)


@expects("native_random")
def test_keyed_draws_have_kernels():
    module = operators.native_random("cpu")
    names = () if module is None else ("split", "uniform_", "normal_")
    assert all(callable(getattr(module, name)) for name in names)
    # Where there are kernels, whoever imported what: torch imports no such module.
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    assert (module is not None) == has("aten::_philox_uniform_", "CPU")
    # Not "meta", whose kernels torch's compiler registers when it is imported.
    assert operators.native_random("hpu") is None


class _Empty(Tensor):
    __torch_function__ = tensors.no_torch_function

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(func)


@expects("tensor_without_data", "refuse_data_ptr")
def test_tensors_are_made_without_data():
    empty = tensors.tensor_without_data(_Empty, (2, 3), dtype=torch.float32)
    assert (type(empty), empty.shape) == (_Empty, (2, 3))
    tensors.refuse_data_ptr(empty)
    try:
        empty.data_ptr()
    except RuntimeError:
        return
    raise AssertionError("the address of nothing was given")


@expects("has_no_memory")
def test_what_has_no_memory_is_a_plain_tensor_that_nothing_reads():
    empty = tensors.tensor_without_data(_Empty, (2, 3), dtype=torch.float32)
    tensors.refuse_data_ptr(empty)
    empty.__class__ = Tensor
    assert (type(empty), vars(empty)) == (Tensor, {})
    assert [*map(tensors.has_no_memory, (empty, torch.ones(2)))] == [True, False]
    for read in (torch.sin, Tensor.numpy, Tensor.data_ptr, Tensor.tolist, repr):
        with pytest.raises(RuntimeError, match=r"subclass|data pointer"):
            read(empty)


@expects("is_lazy")
def test_lazy_bits_are_seen():
    x = torch.ones(2, dtype=torch.complex64)
    zero = torch._efficientzerotensor(2)
    assert [*map(tensors.is_lazy, (x, x.conj(), zero))] == [False, True, True]


@expects("as_fake")
def test_fake_tensors_are_made():
    x, key = torch.ones(2), tensors._FAKE

    def from_tensor(tensor):
        return tensor, "fake"

    mode = SimpleNamespace(from_tensor=from_tensor, _mode_key=key)
    assert tensors.as_fake(x) is x
    torch._C._set_dispatch_mode(mode)
    try:
        assert tensors.as_fake(x) == (x, "fake")
    finally:
        torch._C._unset_dispatch_mode(key)


@expects("NO_VALUES")
def test_fakes_have_no_values():
    with tensors.fake_mode():
        for read in (Tensor.item, Tensor.nonzero):
            try:
                read(torch.ones(()))
            except tensors.NO_VALUES:
                continue
            raise AssertionError("a value was given")


@expects("empty_in")
def test_a_fake_is_like_a_tensor():
    x = torch.ones(2, 3).t()
    made = tensors.empty_in(tensors.fake_mode(), x)
    assert tensors.is_fake(made)
    assert (made.shape, made.stride(), made.dtype) == (x.shape, x.stride(), x.dtype)


@expects("copied_as_fake", "fake_mode", "is_fake")
def test_copies_are_fake():
    mode, cpu = tensors.fake_mode(), torch.device("cpu")
    w = nn.Parameter(torch.ones(2, 3))
    meta = nn.Parameter(torch.ones(2, 3, device="meta"), requires_grad=False)
    found = tensors.copied_as_fake([w, w, w.detach()[0], meta], mode, cpu)
    assert found[0] is found[1]
    _is_copy(found[0], w)
    _is_copy(found[3], meta)
    assert found[2].untyped_storage()._cdata == found[0].untyped_storage()._cdata
    again = tensors.copied_as_fake(found[0], tensors.fake_mode(), cpu)
    _is_copy(again, found[0])
    with mode:
        made = found[0] @ torch.ones(3, 1) + w[:, :1]
    assert tensors.is_fake(made)
    assert made.untyped_storage().nbytes() == 8


PROGRAMS = {
    "new": lambda x: x.exp() + 1,
    "product": lambda x: x @ x.t(),
    "view": lambda x: x[1:].transpose(0, 1).unsqueeze(0),
    "views": lambda x: x.split(1),
    "in place": lambda x: x.clone().relu_(),
    "several": lambda x: torch.native_layer_norm(x, (3,), None, None, 1e-5),
    "listed": lambda x: torch.cat([x, x * 2], 1),
    "cast": lambda x: x.to(torch.float16),
    "gradient": lambda x: torch.autograd.grad(x.sin().sum(), x),
    "conjugated": lambda x: torch.complex(x, x).conj() * 2,
}


LEFT = {"in place": 1, "conjugated": 2}  # operations that torch does not know, either


@pytest.mark.parametrize("name", PROGRAMS)
def test_operations_that_are_known_return_what_torch_makes(name):
    mode, plain = tensors.fake_mode(), FakeTensorMode(allow_non_fake_inputs=True)
    for x in _unlike():
        dispatched = []
        for _ in range(4):
            with plain:
                expected = PROGRAMS[name](plain.from_tensor(x).requires_grad_())
            dispatched.append(0)
            mode.dispatch = _counted(mode, dispatched)
            with mode:
                fake = mode.from_tensor(x).requires_grad_()
                made = PROGRAMS[name](fake)
            del mode.dispatch
            assert [*map(_seen, _each(made))] == [*map(_seen, _each(expected))]
            is_view = name in ("view", "views")
            number = tensors.storage_id(fake)
            assert (tensors.storage_id(_each(made)[0]) == number) is is_view
            with pytest.raises(RuntimeError, match="data pointer"):
                _each(made)[0].data_ptr()
        assert dispatched[3] <= LEFT.get(name, 0) < dispatched[0]


def _unlike():
    x = torch.ones(2, 3)
    return x, torch.ones(3, 2).t(), x.double(), torch.ones(4, 6)[::2, ::2]


def _counted(mode, counts):
    def dispatch(*args):
        counts[-1] += 1
        return type(mode).dispatch(mode, *args)

    return dispatch


def _each(made):
    return made if isinstance(made, (tuple, list)) else (made,)


def _seen(made):
    what = made.shape, made.stride(), made.storage_offset(), made.dtype, made.device
    nbytes = made.untyped_storage().nbytes()
    return (*what, nbytes, made.is_conj(), made.requires_grad, made.is_leaf)


@expects("AddressAnswers")
def test_fakes_refuse_their_address():
    mode, cpu = tensors.fake_mode(), torch.device("cpu")
    fake = tensors.copied_as_fake(nn.Parameter(torch.ones(2, 3)), mode, cpu)
    with tensors.AddressAnswers():
        for name in ("data_ptr", "const_data_ptr"):
            try:
                getattr(fake, name)()
            except RuntimeError:
                continue
            raise AssertionError("an address was given")
        _is_copy(copy.deepcopy(fake), fake)
        assert torch.ones(1).const_data_ptr()


@expects("foreach_of_fakes")
def test_optimizers_take_fakes_for_tensors():
    module = vars(sys.modules[torch.optim.Optimizer.__module__])
    choose, mode = module["_default_to_fused_or_foreach"], tensors.fake_mode()
    there = torch.empty(2, device="meta")
    fake = tensors.copied_as_fake(there, mode, torch.device("cuda"))
    with tensors.foreach_of_fakes():
        assert choose([fake], False) == (False, True)
    assert choose([fake], False) == (False, False)


@expects("scales_put_back")
def test_scalers_lose_scales_that_were_made():
    scaler, before = torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu")
    before.scale(torch.ones(()))
    with tensors.scales_put_back():
        assert scaler.scale(torch.ones(())) == before.scale(torch.ones(()))
        assert scaler._scale is not None
    assert scaler._scale is None
    assert scaler._growth_tracker is None
    assert before._scale is not None
    scaler.scale(torch.ones(()))
    assert scaler._scale is not None


def test_integers_keep_their_values():
    mode, cpu = tensors.fake_mode(), torch.device("cpu")
    ids = torch.arange(6)
    copy = tensors.copied_as_fake(ids[2:], mode, cpu)
    with mode:
        copy.add_(1)
        assert (copy == ids[2:]).all()  # the user's stands for the copy here
        assert not tensors.is_fake(copy + 1)
        assert tensors.is_fake(copy * torch.ones(4))
        large = ids[:1].expand(tensors._KNOWN + 1)
        assert tensors.is_fake(large + 1)
    assert ids.tolist() == [0, 1, 2, 3, 4, 5]


@expects("without_log_of_fakes")
def test_fake_kernels_log_no_errors():
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before = log.disabled
    with tensors.without_log_of_fakes():
        assert log.disabled
    assert log.disabled is before


def _is_copy(copy, tensor):
    assert tensors.is_fake(copy)
    assert not tensors.is_fake(torch.ones(2))
    assert isinstance(copy, nn.Parameter)
    assert copy.requires_grad == tensor.requires_grad
    assert (copy.device.type, copy.shape) == ("cpu", tensor.shape)


@expects("finished", "wait_for")
def test_a_work_can_be_done():
    assert graphs.finished(None) is None
    if not torch.distributed.is_available():
        return
    work = torch._C._distributed_c10d.FakeWork().boxed()
    done = graphs.finished(work)
    assert done is not work
    assert torch._C._distributed_c10d.Work.unbox(done).wait()
    x = torch.ones(2)
    assert graphs.wait_for(x) is None
    assert torch.ops._c10d_functional.wait_tensor(x) is x


@expects("CollectivesInGraph")
def test_what_nobody_reads_is_dropped():
    if not torch.distributed.is_available():
        return
    ops = torch.ops._c10d_functional

    def step(x):
        collectives = graphs.CollectivesInGraph()
        read, unread = (ops.wait_tensor(ops.all_reduce(x, "sum", "0")) for _ in "ab")
        unread.sin()
        collectives.drop_unread([read])
        return read

    graph = make_fx(step, tracing_mode="fake")(torch.ones(2)).graph
    names = [n.target for n in graph.nodes if n.op == "call_function"]
    assert names == [ops.all_reduce.default, ops.wait_tensor.default]


@expects("AddedNodes")
def test_what_was_computed_from_what_is_told():
    told = []

    def step(x):
        before = x.exp()
        nodes = graphs.AddedNodes()
        y = x.sin()
        nodes.end()
        told.append([nodes.lead_to([t]) for t in (y.cos() + x, before.cos(), x)])
        return y

    make_fx(step)(torch.ones(2))
    assert told == [[True, False, False]]


# --- Tracing ---


@expects("has_proxies", "makes_graph", "must_inline")
def test_traces_are_seen():
    assert tracing.must_inline() is False
    assert tracing.makes_graph() is False
    assert tracing.has_proxies() is False
    with torch.inference_mode():
        assert tracing.must_inline() is True
    assert torch._C._get_dispatch_mode(tracing._PROXY) is None


@expects("is_traced_symbolically")
def test_a_symbolic_trace_is_noticed():
    assert not tracing.is_traced_symbolically()
    with replaced(vars(_symbolic_trace), "is_fx_symbolic_tracing", lambda: True):
        assert tracing.is_traced_symbolically()
        assert tracing.must_inline()


# By its text, as importing Dynamo takes seconds.
@expects("constant_in_traces", "eager_only", "show_to_traced_modes")
def test_dynamo_asks_what_is_set():
    dynamo = Path(torch.__file__).parent / "_dynamo"
    functions = (dynamo / "variables" / "functions.py").read_text()
    assert "_dynamo_marked_constant" in functions
    function = tracing.constant_in_traces(lambda: 1)
    assert vars(function) == {"_dynamo_marked_constant": True}
    assert tracing.eager_only(function) is function
    assert function() == 1
    variables = (dynamo / "variables" / "torch.py").read_text()
    assert "in get_overridable_functions()" in variables
    shown: set[Any] = set()
    stub = SimpleNamespace(get_overridable_functions=lambda: shown)
    with replaced(sys.modules, "torch._dynamo.variables.torch", stub):
        tracing.show_to_traced_modes([torch.sin])
    assert shown == {torch.sin}


@expects("uncompiled")
def test_dynamo_asks_what_to_leave_alone():
    function = tracing.uncompiled(lambda: 1, "why")
    names = "_torchdynamo_disable", "_torchdynamo_disable_msg"
    assert vars(function) == dict(zip(names, (True, "why"), strict=True))
    dynamo = Path(torch.__file__).parent / "_dynamo"
    functions = (dynamo / "variables" / "functions.py").read_text()
    assert all(f'"{name}"' in functions for name in names)


@expects("is_in_compiled_code")
def test_the_code_around_compiled_code_is_known():
    folder = Path(torch.__file__).parent
    runtime = folder.parent.joinpath(*tracing._RUNTIME.split(".")).with_suffix(".py")
    assert "ctx.save_for_backward(" in runtime.read_text()
    assert (folder / "_inductor" / "output_code.py").exists()
    assert not tracing.is_in_compiled_code()
    ask = "found = tracing.is_in_compiled_code()"
    for module, is_compiled in ("torch._inductor.made", True), ("made", False):
        scope = {"tracing": tracing, "__name__": module}
        with replaced(sys.modules, tracing._RUNTIME, sys):
            exec(ask, scope)
        assert scope["found"] is is_compiled


@expects("is_compiled")
def test_compiled_functions_are_told():
    names = "_torchdynamo_orig_callable", "_torchdynamo_disable"
    said = [tracing.is_compiled(dict.fromkeys(names[:n])) for n in range(3)]
    assert said == [False, True, False]
    text = (Path(torch.__file__).parent / "_dynamo" / "eval_frame.py").read_text()
    assert all(f".{name} = " in text for name in names)


@expects("not_scriptable")
def test_torchscript_is_refused():
    def fn(x):
        return x

    tracing.not_scriptable(fn, "no script")
    # To compile it would warn, and import much.
    assert vars(fn)["__script_unsupported"] == "no script"
    text = Path(sys.modules["torch.jit._script"].__file__ or "").read_text("utf-8")
    assert "__script_unsupported" in text


@expects("are_sizes_equal", "is_symbolic", "size_hint")
def test_sizes_that_vary_have_hints():
    size = torch.SymInt(SimpleNamespace(hint=5))  # pyrefly: ignore
    assert tracing.is_symbolic(size) is True
    assert tracing.is_symbolic(5) is False
    assert tracing.size_hint(size) == tracing.size_hint(5) == 5
    assert tracing.are_sizes_equal((2, 3), (2, 3)) is True
    assert tracing.are_sizes_equal((2, 3), (2, 4)) is False
    assert tracing.are_sizes_equal((2, 3), (2,)) is False


@expects("copied_without_sending", "holds_gradients", "in_buckets", "replicas_in")
def test_replicas_are_copied_without_what_sends():
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, bias=False))
        replica = nn.parallel.DistributedDataParallel(module)
        model = nn.Sequential(replica)
        assert shards.replicas_in([model, replica]) == [replica]
        found = shards.in_buckets(replica)
        assert [*map(id, found)] == [*map(id, module.parameters())]
        assert shards.holds_gradients(replica) is False
        copied = shards.copied_without_sending(model, [replica])[0]
        assert copied.reducer is None
        x = torch.ones(2, 3)
        assert same(copied(x), replica(x))
        copied(x).sum().backward()  # nobody else is asked
        grads = [p.grad for p in copied.parameters()]
        assert all(isinstance(g, Tensor) for g in grads)
        assert all(p.grad is None for p in module.parameters())
    finally:
        torch.distributed.destroy_process_group()


@expects("copies_of_shards", "shards_in", "is_flat", "fake_mode_here")
def test_shards_are_copied_and_share_no_state():
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
        fsdp.fully_shard([model[0], model[2]], mesh=mesh)  # its hooks are closures
        fsdp.fully_shard(model, mesh=mesh)
        found = shards.shards_in([model])
        assert found == [model, model[0], model[2]]
        assert shards.is_flat(model) is False
        mode = tensors.fake_mode()
        copied = tensors.copied_as_fake(model, mode, CPU, (), found)
        assert type(copied) is type(model)
        with mode:
            assert tensors.fake_mode_here() is mode
            copied(torch.ones(2, 3)).sum().backward()
        assert tensors.fake_mode_here() is None
        assert all(p.grad is not None for p in copied.parameters())
        assert all(p.grad is None for p in model.parameters())
        assert model._get_fsdp_state()._is_root is None  # it did not run
    finally:
        torch.distributed.destroy_process_group()


@expects("is_sending", "is_wrapper", "sent_to_nobody")
def test_what_is_sent_is_known_by_its_operation():
    c10d = torch.ops.c10d
    assert shards.is_sending(c10d.allreduce_.default) is True
    assert shards.is_sending(torch.ops.aten.add.Tensor) is False
    x = torch.ones(2)
    result, work = shards.sent_to_nobody(c10d._allgather_base_.default, (x, x))
    assert result is x
    assert torch._C._distributed_c10d.Work.unbox(work).wait()
    assert shards.sent_to_nobody(c10d.monitored_barrier_.default, (x,)) is None
    assert shards.is_wrapper(DTensor) is True
    assert shards.is_wrapper(Tensor) is False


@expects("telling_of_resized")
def test_storages_that_python_resizes_are_told_of():
    told, x = [], torch.ones(4)
    with shards.telling_of_resized(lambda storage: told.append(storage.nbytes())):
        x.untyped_storage().resize_(0)
        x.untyped_storage().resize_(16)
    x.untyped_storage().resize_(0)
    assert told == [0, 16]


@expects("DEVICE_OF", "fake_device")
def test_fakes_say_where_they_are_without_an_operation():
    there, mode = torch.empty(2, device="meta"), tensors.fake_mode()
    fake = tensors.copied_as_fake(there, mode, torch.device("cuda"))
    assert tensors.fake_device(fake) == tensors.DEVICE_OF(fake) == fake.device
    assert fake.device.type == "cuda"


@expects("EMPTY", "EMPTY_LEAF")
def test_empty_tensors_have_no_elements():
    both = tensors.EMPTY, tensors.EMPTY_LEAF
    assert [(t.numel(), t.requires_grad) for t in both] == [(0, False), (0, True)]
