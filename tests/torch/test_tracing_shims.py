"""What the shims of `tracing` expect of torch.

Invariant: a check fails where a name of it is missing or does something else.
Rejected: to have Dynamo compile something. Importing it takes seconds, so what it asks
for is looked up in its text.
"""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from support.shims import expects, replaced
from torch.fx import _symbolic_trace

from remat._torch import tracing


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
