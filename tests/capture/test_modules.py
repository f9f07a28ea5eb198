"""Modules: trained, frozen, tied, hooked, parametrized, called functionally."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, hessian, jacrev, stack_module_state, vmap
from torch.nn.utils import parametrizations

from remat import remat
from remat.testing import assert_same, count_ops, live_bytes


class Sin(nn.Module):
    def forward(self, x):
        return x.sin()


def mlp():
    return nn.Sequential(nn.Linear(4, 8), Sin(), nn.Linear(8, 4))


class Remat(nn.Module):
    """Calls a module through remat; its parameters keep their names."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return remat(self.module)(*args, **kwargs)


def grads(module):
    return {name: p.grad for name, p in module.named_parameters()}


# --- Training --------------------------------------------------------------------


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
        lambda ps: torch.optim.AdamW(ps, lr=0.01),
    ],
    ids=["SGD", "AdamW"],
)
def test_training_ends_in_the_same_parameters(optimizer):
    def train(wrap):
        torch.manual_seed(1)
        blocks = nn.ModuleList([mlp() for _ in range(3)])
        steps = optimizer(blocks.parameters())
        for _ in range(5):
            x = torch.randn(16, 4)
            h = x
            for block in blocks:
                h = h + wrap(block)(h)
            (h - x.roll(1, 1)).pow(2).mean().backward()
            steps.step()
            steps.zero_grad()
        return blocks.state_dict()

    with count_ops() as ops:
        want = train(lambda block: block)
    with count_ops() as more:
        got = train(remat)
    assert_same(got, want)
    assert (ops["sin"], more["sin"]) == (3 * 5, 2 * 3 * 5)


def test_gradients_accumulate_over_calls():
    plain = mlp()
    module = copy.deepcopy(plain)
    xs = torch.randn(3, 2, 4)
    for x in xs:
        plain(x).sum().backward()
    with count_ops() as ops:
        for x in xs:
            remat(module)(x).sum().backward()
    assert_same(grads(module), grads(plain))
    assert ops["sin"] == 2 * 3


def check(module, *args, wrap=remat, sines=2, **kwargs):
    """Assert that one step of the module, and of `wrap(module)`, gives the same."""
    twin = copy.deepcopy(module)
    want = module(*args, **kwargs)
    want.pow(2).sum().backward()
    given = [a.grad for a in args]
    for a in args:
        a.grad = None
    with count_ops() as ops:
        got = wrap(twin)(*args, **kwargs)
        got.pow(2).sum().backward()
    assert_same(got, want)
    assert_same([grads(twin), [a.grad for a in args]], [grads(module), given])
    assert ops["sin"] == sines
    return grads(twin)


def test_only_parameters_need_grad():
    got = check(mlp(), torch.randn(2, 4))
    assert all(g.abs().max() > 0 for g in got.values())


def test_only_the_input_needs_grad():
    module = mlp().requires_grad_(False)
    x = torch.randn(2, 4, requires_grad=True)
    assert set(check(module, x).values()) == {None}
    assert x.grad.abs().min() > 0


def test_some_parameters_are_frozen():
    module = mlp()
    module[0].requires_grad_(False)
    got = check(module, torch.randn(2, 4))
    assert [name for name, g in got.items() if g is None] == ["0.weight", "0.bias"]


def test_an_unused_parameter_gets_no_gradient():
    module = mlp()
    module[1].register_parameter("unused", nn.Parameter(torch.ones(3)))
    assert check(module, torch.randn(2, 4))["1.unused"] is None


def test_nothing_needs_grad():
    module = mlp().requires_grad_(False)
    with count_ops() as ops:
        y = remat(module)(torch.randn(2, 4))
    assert not y.requires_grad
    assert ops["sin"] == 1
    with count_ops() as ops:
        remat(module.requires_grad_())(torch.randn(2, 4)).sum().backward()
    assert ops["sin"] == 2


def test_only_inputs_stay_alive_after_the_forward():
    module, x = nn.Sequential(*[Sin() for _ in range(8)]), torch.randn(1024)
    x.requires_grad_()
    assert live_bytes(lambda: module(x)) == 8 * 4096
    assert live_bytes(lambda: remat(module)(x)) == 4096


# --- Tied weights ----------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(self.a(x).sin())


def test_weights_tied_inside_are_one_input():
    got = check(Tied(), torch.randn(2, 4))
    assert list(got) == ["a.weight", "a.bias", "b.bias"]


def test_weights_tied_across_calls_get_the_sum():
    plain = Tied()
    tied = copy.deepcopy(plain)
    x = torch.randn(2, 4)

    def loss(call, module):
        return call(module.b)(call(Sin())(call(module)(x))).pow(2).sum()

    loss(lambda m: m, plain).backward()
    with count_ops() as ops:
        loss(remat, tied).backward()
    assert_same(grads(tied), grads(plain))
    assert ops["sin"] == 2 + 1, "what is a call of its own needs its input alone"


# --- functional_call -------------------------------------------------------------


def tripled(module):
    return {
        name: (3 * p.detach()).requires_grad_() for name, p in module.named_parameters()
    }


def test_functional_call_outside_with_the_backward_outside():
    plain = mlp()
    module = Remat(copy.deepcopy(plain))
    x = torch.randn(2, 4)
    theirs, ours = tripled(plain), tripled(module)
    functional_call(plain, theirs, (x,)).pow(2).sum().backward()
    with count_ops() as ops:
        functional_call(module, ours, (x,)).pow(2).sum().backward()
    for name, p in theirs.items():
        assert_same(ours["module." + name].grad, p.grad)
    assert set(grads(module).values()) == {None}
    assert ops["sin"] == 2


def test_functional_call_inside():
    module = mlp()
    x = torch.randn(2, 4)

    def fn(params, x):
        return functional_call(module, params, (x,)).pow(2).sum()

    theirs, ours = tripled(module), tripled(module)
    fn(theirs, x).backward()
    with count_ops() as ops:
        remat(fn)(ours, x).backward()
    assert_same(
        {k: p.grad for k, p in ours.items()}, {k: p.grad for k, p in theirs.items()}
    )
    assert ops["sin"] == 2


IN_DIMS = ({"0.weight": None, "0.bias": None, "2.weight": None, "2.bias": 0},)


def batched(f):
    return lambda p: vmap(grad(f), IN_DIMS)(
        p | {"2.bias": torch.stack([p["2.bias"]] * 3)}
    )


def second(f):
    return grad(lambda p: sum(g.sin().sum() for g in grad(f)(p).values()))


@pytest.mark.parametrize(
    ("transform", "reassociated"),
    [
        (grad, False),
        (jacrev, False),
        (batched, False),
        # A second derivative uses each weight in the call and in its derivative.
        (second, True),
    ],
    ids=["grad", "jacrev", "vmap(grad)", "grad(grad)"],
)
def test_functional_call_under_transforms(transform, reassociated):
    plain = mlp()
    module = Remat(plain)
    x = torch.randn(2, 4)
    params = {k: p.detach() for k, p in plain.named_parameters()}

    def loss(params):
        return functional_call(plain, params, (x,)).pow(2).sum()

    def remat_loss(params):
        named = {"module." + k: p for k, p in params.items()}
        return functional_call(module, named, (x,)).pow(2).sum()

    with count_ops() as fewer:
        want = transform(loss)(params)
    with count_ops() as ops:
        got = transform(remat_loss)(params)
    assert_same(got, want, reassociated=reassociated)
    assert ops["sin"] > fewer["sin"]


def test_hessian_of_a_module():
    plain = nn.Sequential(nn.Linear(2, 2), Sin()).double()
    x = torch.randn(3, 2, dtype=torch.double)
    params = {k: p.detach() for k, p in plain.named_parameters()}

    def loss(call, params):
        return functional_call(call, params, (x,)).pow(3).sum()

    want = hessian(lambda p: loss(plain, p))(params)
    with count_ops() as ops:
        got = hessian(
            lambda p: loss(Remat(plain), {f"module.{k}": v for k, v in p.items()})
        )(params)
    assert ops["sin"] > 2
    # Weights and their tangents have several uses.
    assert_same(got, want, reassociated=True)


def test_an_ensemble_of_modules():
    models = [mlp() for _ in range(3)]
    params, _ = stack_module_state(models)
    params = {k: p.detach() for k, p in params.items()}
    base, x = mlp(), torch.randn(2, 4)

    def loss(call):
        return lambda p: functional_call(call, p, (x,)).pow(2).sum()

    def wrapped(p):
        return loss(Remat(base))({f"module.{k}": v for k, v in p.items()})

    want = vmap(grad(loss(base)))(params)
    with count_ops() as ops:
        got = vmap(grad(wrapped))(params)
    assert_same(got, want)
    assert ops["sin"] == 2


# --- What modules do in forward --------------------------------------------------


class Remembers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = mlp()
        self.calls, self.norms, self.shape = 0, [], None

    def forward(self, x):
        self.calls += 1
        self.shape = x.shape
        y = self.layer(x)
        self.activation = y.detach()
        return y


def test_attributes_assigned_in_forward_are_assigned_once():
    plain = Remembers()
    module = copy.deepcopy(plain)
    x = torch.randn(2, 4)
    for _ in range(2):
        y = plain(x)
        y.sum().backward()
    with count_ops() as ops:
        for _ in range(2):
            remat(module)(x).sum().backward()
    assert (module.calls, module.shape) == (2, (2, 4))
    assert_same(module.activation, y.detach())
    assert_same(grads(module), grads(plain))
    assert ops["sin"] == 2 * 2


class KeepsIntermediate(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.last = torch.zeros(4)

    def forward(self, x):
        self.last = self.weight.exp()
        return (x * self.last).sin().sin()


def test_an_attribute_may_hold_an_intermediate_of_the_last_call():
    plain = KeepsIntermediate()
    module = copy.deepcopy(plain)
    x = torch.randn(2, 4)
    with count_ops() as ops:
        for _ in range(3):
            plain(x).sum().backward()
            remat(module)(x).sum().backward()
    assert_same(grads(module), grads(plain))
    assert_same(module.last.detach(), plain.last.detach())
    assert ops["sin"] == 3 * (2 + 2 + 1)


def test_submodules_are_those_of_the_module_again_after_a_call():
    module = mlp()
    before = [*module.modules(), *module.parameters(), *module._modules.values()]
    with count_ops() as ops:
        remat(module)(torch.randn(2, 4)).sum().backward()
    after = [*module.modules(), *module.parameters(), *module._modules.values()]
    assert all(a is b for a, b in zip(before, after, strict=True))
    assert ops["sin"] == 2


def test_forward_hooks_run_in_the_forward_and_in_the_recomputation():
    module = mlp()
    calls = []
    module[0].register_forward_pre_hook(lambda m, args: calls.append("pre"))
    module[1].register_forward_hook(lambda m, args, y: calls.append("post") or y * 2)
    check(module, torch.randn(2, 4))
    assert calls == ["pre", "post"] * 3


def test_backward_hooks_run_once():
    def hooked(module, calls):
        def note(m, given, computed):
            calls.append((type(m), given, computed))

        for m in module:
            m.register_full_backward_hook(note)
        return module

    plain_calls, calls = [], []
    plain = mlp()
    module = hooked(copy.deepcopy(plain), calls)
    hooked(plain, plain_calls)
    x, y = (t.requires_grad_() for t in torch.randn(2, 4).repeat(2, 1, 1))
    plain(x).sum().backward()
    with count_ops() as ops:
        remat(module)(y).sum().backward()
    assert_same(calls, plain_calls)
    assert len(calls) == 3
    assert ops["sin"] == 2


def test_gradient_hooks_of_parameters_run_once():
    module, calls = mlp(), []
    for p in module.parameters():
        p.register_hook(lambda g: calls.append("grad"))
        p.register_post_accumulate_grad_hook(lambda p: calls.append("accumulated"))
    with count_ops() as ops:
        remat(module)(torch.randn(2, 4)).sum().backward()
    assert sorted(calls) == ["accumulated"] * 4 + ["grad"] * 4
    assert ops["sin"] == 2


def test_a_gradient_hook_changes_the_gradient_once():
    plain = mlp()
    module = copy.deepcopy(plain)
    for m in (plain, module):
        m[0].weight.register_hook(lambda g: 2 * g)
    x = torch.randn(2, 4)
    plain(x).sum().backward()
    with count_ops() as ops:
        remat(module)(x).sum().backward()
    assert_same(grads(module), grads(plain))
    assert ops["sin"] == 2


# --- Modules of torch ------------------------------------------------------------


def check_layer(layer, *args, op):
    """Assert equality of a layer that runs `op`, and that it runs once more.

    It is none of the last operations, whose results no backward reads.
    """
    twin = copy.deepcopy(layer)
    results, counts = [], []
    for call, module in ((layer, layer), (remat(twin), twin)):
        torch.manual_seed(3)
        with count_ops() as ops:
            y = call(*args)
            y = y if isinstance(y, tuple) else (y,)
            forward = ops[op]
            torch.autograd.backward([t.pow(2).sum() for t in y if t.numel()])
        counts.append((forward, ops[op]))
        results.append((y, grads(module)))
    assert_same(results[1], results[0])
    (once, plain), (again, total) = counts
    assert once == again > 0
    assert total == plain + once


class Lstm(nn.LSTM):
    def forward(self, x):
        y, (h, c) = super().forward(x)
        return y, h, c


def attention(**options):
    class Attention(nn.MultiheadAttention):
        def forward(self, x):
            return super().forward(x, x, x, **options)[0]

    return Attention


def linear_then(layer):
    return lambda: nn.Sequential(nn.Linear(4, 4), layer)


def transformer_layer():
    return nn.TransformerEncoderLayer(4, 2, 8, 0.5, batch_first=True)


# How to make a layer, the shape of its input, and an op that it runs.
LAYERS = {
    "LSTM": (lambda: Lstm(4, 5, 2, dropout=0.5), (3, 2, 4), "mkldnn_rnn_layer"),
    "GRU": (lambda: nn.Sequential(nn.GRU(4, 5), First()), (3, 2, 4), "addmm"),
    "attention": (lambda: attention()(4, 2, dropout=0.5), (2, 3, 4), "_softmax"),
    "attention, fused": (
        lambda: attention(need_weights=False)(4, 2),
        (2, 3, 4),
        "_scaled_dot_product_flash_attention_for_cpu",
    ),
    "transformer layer": (transformer_layer, (2, 3, 4), "native_layer_norm"),
    "weight norm": (
        lambda: parametrizations.weight_norm(nn.Linear(4, 4)),
        (2, 4),
        "_weight_norm_interface",
    ),
    "orthogonal": (
        lambda: parametrizations.orthogonal(nn.Linear(4, 4)),
        (2, 4),
        "sub",
    ),
    "dropout": (linear_then(nn.Dropout(0.5)), (8, 4), "addmm"),
    "dropout in place": (linear_then(nn.Dropout(0.5, True)), (8, 4), "addmm"),
    "alpha dropout": (linear_then(nn.AlphaDropout(0.5)), (8, 4), "addmm"),
    "convolution": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.Dropout2d(0.5)),
        (2, 2, 6, 6),
        "convolution",
    ),
    "group norm": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 1), nn.GroupNorm(2, 4)),
        (2, 2, 3, 3),
        "convolution",
    ),
}


class First(nn.Module):
    def forward(self, pair):
        return pair[0]


@pytest.mark.parametrize(("make", "shape", "op"), LAYERS.values(), ids=LAYERS.keys())
def test_layers_of_torch(make, shape, op):
    check_layer(make(), torch.randn(*shape, requires_grad=True), op=op)


def test_embedding():
    index = torch.tensor([[1, 2], [2, 0]])
    layer = nn.Sequential(nn.Embedding(3, 4), nn.Linear(4, 4))
    check_layer(layer, index, op="embedding")


def test_checkpointed_blocks_in_a_row_share_nothing():
    blocks = nn.ModuleList([mlp() for _ in range(4)])
    plain = nn.Sequential(*blocks)
    x = torch.randn(2, 4)
    want = torch.autograd.grad(plain(x).sum(), [*blocks.parameters()])
    with count_ops() as ops:
        h = x
        for block in blocks:
            h = remat(block)(h)
        got = torch.autograd.grad(h.sum(), [*blocks.parameters()])
    assert_same(got, want)
    assert ops["sin"] == 2 * 4
