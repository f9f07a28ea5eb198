"""Programs on libraries that others wrote, as people use them: plain and with remat.

Each is some steps of training. Its parts are called as they are, or rematerialized.
Outputs, gradients, buffers and random streams are the same, bit for bit.
"""

import contextlib
import functools
import itertools
import random

import pytest
import torch
from support.adversarial.configurations import OURS
from support.adversarial.observed import observed
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from remat.testing import count_ops


pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]
STEPS = 5
PROGRAMS = {}


def program(library):
    """Add a program that needs a library."""

    def adding(run):
        PROGRAMS[run.__name__.replace("_", " ")] = library, run
        return run

    return adding


def trained(module, loss_of, *others, lr=0.05, state=lambda: None):
    """Train a module for some steps, and observe all of it."""
    parameters = [p for m in (module, *others) for p in m.parameters()]
    optimizer, seen = torch.optim.Adam(parameters, lr=lr), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        grads = [p.grad for p in parameters]
        optimizer.step()
        states = [m.state_dict() for m in (module, *others)]
        seen.append(observed((loss, grads, states, state())))
    return seen, observed(torch.get_rng_state())


def perceptron(*sizes):
    layers = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


# --- Probabilistic programs ---


@program("pyro")
def pyro_model_that_draws_inside(wrap):
    """The whole likelihood is rematerialized, with the samples in it."""
    import pyro
    from pyro import distributions as dist
    from pyro.infer import Trace_ELBO

    pyro.clear_param_store()
    net = perceptron(3, 16, 1)
    x, y = torch.randn(20, 3), torch.randn(20)
    mean = nn.Parameter(torch.zeros(()))

    def likelihood(x, noise):
        return dist.Normal(net(x).squeeze(-1), noise).log_prob(y).sum()

    likely = wrap(likelihood)

    def model():
        noise = pyro.sample("noise", dist.LogNormal(0.0, 1.0))
        pyro.factor("y", likely(x, noise))

    def guide():
        pyro.sample("noise", dist.LogNormal(mean, 0.1))

    elbo = Trace_ELBO(num_particles=2)
    holder = nn.Module()
    holder.net, holder.mean = net, mean
    return trained(holder, lambda: elbo.differentiable_loss(model, guide))


# --- Gaussian processes ---


@program("gpytorch")
def gpytorch_exact(wrap):
    import gpytorch

    x, y = torch.randn(20, 3), torch.randn(20)
    likelihood = gpytorch.likelihoods.GaussianLikelihood()

    class Model(gpytorch.models.ExactGP):
        def __init__(self):
            super().__init__(x, y, likelihood)
            self.features = perceptron(3, 8, 2)
            self.mean_module = gpytorch.means.ConstantMean()
            self.covar_module = gpytorch.kernels.ScaleKernel(
                gpytorch.kernels.RBFKernel()
            )

        def forward(self, x):
            z = extract(x)
            return gpytorch.distributions.MultivariateNormal(
                self.mean_module(z), self.covar_module(z)
            )

    model = Model()
    extract = wrap(model.features)
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    run = lambda x: -mll(model(x), y)
    return trained(model, lambda: run(x))


def variational(gpytorch):
    class Model(gpytorch.models.ApproximateGP):
        def __init__(self):
            points = torch.randn(5, 3)
            found = gpytorch.variational.CholeskyVariationalDistribution(5)
            super().__init__(
                gpytorch.variational.VariationalStrategy(
                    self, points, found, learn_inducing_locations=True
                )
            )
            self.mean_module = gpytorch.means.ConstantMean()
            self.covar_module = gpytorch.kernels.ScaleKernel(
                gpytorch.kernels.MaternKernel()
            )

        def forward(self, x):
            return gpytorch.distributions.MultivariateNormal(
                self.mean_module(x), self.covar_module(x)
            )

    return Model()


@program("gpytorch")
def gpytorch_variational(wrap):
    import gpytorch

    model, x, y = variational(gpytorch), torch.randn(20, 3), torch.randn(20)
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    mll = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=20)
    run = wrap(lambda x, y: -mll(model(x), y))
    return trained(model, lambda: run(x, y), likelihood)


@program("botorch")
def botorch_acquisition(wrap):
    from botorch.acquisition import qExpectedImprovement
    from botorch.models import SingleTaskGP
    from botorch.sampling import SobolQMCNormalSampler

    x = torch.rand(8, 2, dtype=torch.double)
    model = SingleTaskGP(x, (x.sin().sum(-1, keepdim=True)))
    model.eval()
    sampler = SobolQMCNormalSampler(torch.Size([16]), seed=3)
    run = wrap(qExpectedImprovement(model, best_f=0.3, sampler=sampler))
    points = nn.Module()
    points.x = nn.Parameter(torch.rand(4, 2, 2, dtype=torch.double))
    return trained(points, lambda: -run(points.x).sum())


# --- Attributions ---


class Convolutions(nn.Module):
    def __init__(self, wrap):
        super().__init__()
        blocks = [nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())]
        blocks += [nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU(), nn.MaxPool2d(2))]
        self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(16, 3)
        self.calls = [wrap(block) for block in blocks]

    def forward(self, x):
        for call in self.calls:
            x = call(x)
        return self.head(x.flatten(1))


def attributed(wrap, attribute):
    """Attributions of a trained model, between steps of its training."""
    model = Convolutions(wrap)
    x, labels = torch.rand(5, 3, 8, 8), torch.tensor([0, 1, 2, 0, 1])
    found = []

    def loss_of():
        found.append(attribute(model, x[:2].clone().requires_grad_()))
        return cross_entropy(model(x), labels)

    return trained(model, loss_of, state=lambda: found[-1])


@program("captum")
def captum_integrated_gradients(wrap):
    from captum.attr import IntegratedGradients

    return attributed(
        wrap, lambda m, x: IntegratedGradients(m).attribute(x, target=1, n_steps=4)
    )


@program("captum")
def captum_layer_gradients(wrap):
    from captum.attr import LayerGradCam

    return attributed(
        wrap, lambda m, x: LayerGradCam(m, m.blocks[1]).attribute(x, target=1)
    )


@program("captum")
def captum_guided_backpropagation(wrap):
    from captum.attr import GuidedBackprop

    return attributed(wrap, lambda m, x: GuidedBackprop(m).attribute(x, target=1))


@program("captum")
def captum_deep_lift(wrap):
    from captum.attr import DeepLift

    return attributed(wrap, lambda m, x: DeepLift(m).attribute(x, x * 0, target=1))


@program("captum")
def captum_in_the_loss(wrap):
    from captum.attr import Saliency

    model = perceptron(4, 8, 3)
    run, x = wrap(model), torch.rand(5, 4)

    def loss_of():
        found = Saliency(run).attribute(x.clone().requires_grad_(), target=1)
        return cross_entropy(run(x * (1 + found)), torch.tensor([0, 1, 2, 0, 1]))

    return trained(model, loss_of)


# --- Inner loops ---


@program("higher")
def higher_inner_loop(wrap):
    import higher

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = perceptron(3, 8, 8), perceptron(8, 8, 1)

        def forward(self, x):
            return self.b(wrap(self.a)(x).tanh())

    net = Net()
    x, y = torch.randn(10, 3), torch.randn(10, 1)

    def loss_of():
        inner = torch.optim.SGD(net.parameters(), lr=0.1)
        open_.close()
        m, opt = open_.enter_context(
            higher.innerloop_ctx(net, inner, copy_initial_weights=False)
        )
        for _ in range(2):
            opt.step((m(x) - y).square().mean())
        return (m(x) - y).abs().mean()

    with contextlib.ExitStack() as open_:
        return trained(net, loss_of)


# --- Codebooks ---


def quantized(wrap, quantizer, *, shape=(2, 6, 8)):
    encoder, decoder = perceptron(8, 16, 8), perceptron(8, 8)
    x = torch.randn(shape)

    def block(x):
        found, *others = quantizer(encoder(x))
        loss = others[1] if len(others) > 1 else 0
        return found, others[0], loss

    run = wrap(block)

    def loss_of():
        found, indices, extra = run(x)
        del indices
        loss = (decoder(found) - x).square().mean()
        return loss + (extra.sum() if isinstance(extra, torch.Tensor) else 0)

    return trained(encoder, loss_of, decoder, quantizer)


def codebook(**options):
    from vector_quantize_pytorch import VectorQuantize

    return VectorQuantize(dim=8, codebook_size=16, **options)


def finite():
    from vector_quantize_pytorch import FSQ

    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.fsq = FSQ(levels=[5, 3, 4], dim=8)

        def forward(self, x):
            return self.fsq(x)

    return First()


CODEBOOKS = {
    "averaged": codebook,
    "clustered": lambda: codebook(kmeans_init=True, kmeans_iters=3),
    "expiring": lambda: codebook(threshold_ema_dead_code=2),
    "learned": lambda: codebook(learnable_codebook=True, ema_update=False),
    "sampled": lambda: codebook(stochastic_sample_codes=True, sample_codebook_temp=0.5),
    "finite": finite,
}
for _name, _build in CODEBOOKS.items():
    _run = lambda wrap, build=_build: quantized(wrap, build())
    PROGRAMS[f"codebook {_name}"] = (("vector_quantize_pytorch"), _run)


# --- Transformers ---


@program("rotary_embedding_torch")
def rotary_embedding_of_all_layers(wrap):
    from rotary_embedding_torch import RotaryEmbedding

    rotary = RotaryEmbedding(dim=8, cache_max_seq_len=512)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.rotary = nn.Linear(16, 48), rotary

        def forward(self, x):
            parts = self.qkv(x).unflatten(-1, (3, 2, 8)).transpose(1, 3).unbind(2)
            q, k, v = parts
            q = self.rotary.rotate_queries_or_keys(q)
            k = self.rotary.rotate_queries_or_keys(k)
            out = scaled_dot_product_attention(q, k, v)
            return x + out.transpose(1, 2).flatten(2)

    blocks = nn.ModuleList([Block(), Block()])
    calls = [wrap(block) for block in blocks]
    lengths = itertools.cycle([4, 7, 9])

    def loss_of():
        x = torch.randn(2, next(lengths), 16)
        for call in calls:
            x = call(x)
        return x.square().mean()

    return trained(blocks, loss_of)


def decoder_of_x_transformers(**options):
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=16, depth=2, heads=2, attn_dim_head=8, **options)
    return TransformerWrapper(num_tokens=20, max_seq_len=12, attn_layers=layers)


X_TRANSFORMERS = {
    "plain": {},
    "rotary": {"rotary_pos_emb": True},
    "dropout": {"attn_dropout": 0.2, "ff_dropout": 0.2, "layer_dropout": 0.2},
    "memory": {"attn_num_mem_kv": 3},
    "relative": {"rel_pos_bias": True},
    "alibi": {"alibi_pos_bias": True, "alibi_num_heads": 1},
    "gated": {"ff_glu": True, "attn_gate_values": True, "use_rmsnorm": True},
    "sandwiched": {"sandwich_norm": True},
}


def x_transformer(wrap, options):
    model = decoder_of_x_transformers(**options)
    run, tokens = wrap(model), torch.randint(0, 20, (2, 12))
    loss_of = lambda: cross_entropy(run(tokens).flatten(0, 1), tokens.flatten())
    return trained(model, loss_of)


for _name, _options in X_TRANSFORMERS.items():
    PROGRAMS[f"x-transformers {_name}"] = (
        ("x_transformers"),
        lambda wrap, options=_options: x_transformer(wrap, options),
    )


@program("einops")
def einops_layers(wrap):
    from einops import einsum, rearrange, reduce, repeat
    from einops.layers.torch import EinMix, Rearrange

    model = nn.Sequential(
        Rearrange("b (h p) (w q) c -> b (h w) (p q c)", p=2, q=2),
        nn.Linear(12, 8),
        EinMix("b t c -> b t d", weight_shape="c d", bias_shape="d", c=8, d=6),
    )

    def block(x):
        y = model(x)
        scores = einsum(y, y, "b i d, b j d -> b i j").softmax(-1)
        y = einsum(scores, y, "b i j, b j d -> b i d")
        y = rearrange(repeat(y, "b t d -> b t d k", k=2), "b t d k -> b (t k) d")
        return reduce(y, "b t d -> b d", "mean")

    run, x = wrap(block), torch.rand(2, 4, 4, 3)
    return trained(model, lambda: run(x).square().mean())


# --- Others ---


@program("torchquad")
def torchquad_integral(wrap):
    from torchquad import Boole, MonteCarlo, Simpson

    net = perceptron(1, 8, 1)
    domain = torch.tensor([[0.0, 1.0]])

    def total(scale):
        fn = lambda x: net(x * scale).squeeze(-1)
        options = {"dim": 1, "integration_domain": domain, "backend": "torch"}
        first = Simpson().integrate(fn, N=11, **options)
        second = Boole().integrate(fn, N=9, **options)
        return first + second + MonteCarlo().integrate(fn, N=20, seed=3, **options)

    run, scale = wrap(total), nn.Parameter(torch.tensor(1.5))
    net.scale = scale
    return trained(net, lambda: run(scale).square())


@program("tensordict")
def tensordict_modules(wrap):
    from tensordict import TensorDict
    from tensordict.nn import TensorDictModule, TensorDictSequential

    first = TensorDictModule(perceptron(4, 8, 8), in_keys=["x"], out_keys=["h"])
    last = TensorDictModule(perceptron(8, 8, 2), in_keys=["h"], out_keys=["y"])
    model = TensorDictSequential(first, last)
    run, x = wrap(model), torch.rand(5, 4)

    def loss_of():
        return run(TensorDict({"x": x}, batch_size=[5]))["y"].square().mean()

    return trained(model, loss_of)


@program("tensordict")
def tensordict_parameters_of_an_ensemble(wrap):
    from tensordict import TensorDict
    from tensordict.nn import TensorDictParams

    nets = [perceptron(4, 8, 2) for _ in range(3)]
    parameters = TensorDictParams(
        TensorDict.from_modules(*nets, as_module=False).detach().clone()
    )
    net = perceptron(4, 8, 2)

    def one(params, x):
        with params.to_module(net):
            return net(x)

    run = wrap(lambda x: torch.vmap(one, (0, None))(parameters, x))
    x = torch.rand(5, 4)
    return trained(parameters, lambda: run(x).square().mean())


@program("ema_pytorch")
def moving_average_between(wrap):
    from ema_pytorch import EMA

    net = perceptron(4, 8, 2)
    average = EMA(net, beta=0.9, update_after_step=0, update_every=1)
    run, x = wrap(lambda x: (net(x) - average(x)).square().mean()), torch.rand(5, 4)

    def loss_of():
        loss = run(x)
        average.update()
        return loss

    return trained(net, loss_of, state=average.ema_model.state_dict)


@program("ema_pytorch")
def moving_average_inside(wrap):
    from ema_pytorch import EMA

    net = perceptron(4, 8, 2)
    average = EMA(net, beta=0.9, update_after_step=0, update_every=1)

    def block(x):
        average.update()
        return (net(x) - average(x)).square().mean()

    run, x = wrap(block), torch.rand(5, 4)
    return trained(net, lambda: run(x), state=average.ema_model.state_dict)


# --- Tests ---


def outcome(name, wrap):
    """What a program shows, and how many operations it ran."""
    library, run = PROGRAMS[name]
    pytest.importorskip(library)
    torch.manual_seed(5)
    random.seed(3)
    with count_ops() as ops:
        seen = run(wrap)
    streams = observed(torch.get_rng_state()), random.getstate()
    return (seen, streams), sum(ops.values())


@functools.cache
def plain(name):
    return outcome(name, lambda fn: fn)


@pytest.mark.parametrize("way", ["default", "dots", "prune"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_library_trains_as_without_remat(name, way):
    expected, fewer = plain(name)
    seen, count = outcome(name, OURS[way])
    assert seen == expected
    assert count > fewer  # it was recomputed
