"""Objects of other libraries as arguments and results, under every transform."""

import pytest
import torch
from support.objects import assert_as_plain
from support.transforms import TRANSFORMS
from torch import distributions
from torch.utils import _pytree


pytestmark = [
    pytest.mark.clients,
    pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr:UserWarning"),
]
each_transform = pytest.mark.parametrize("how", TRANSFORMS)
EDGES = torch.tensor([[0, 1, 2], [1, 2, 0]])


def geometric():
    return pytest.importorskip("torch_geometric.data", reason="needs `clients`")


def transformers():
    return pytest.importorskip("transformers", reason="needs the extra `clients`")


# --- PyTorch Geometric ---


def test_a_graph_is_no_pytree():
    assert geometric().Data not in _pytree.SUPPORTED_NODES


@each_transform
def test_graphs(how):
    data = geometric()

    def convolve(graph, w):
        y = (graph.x * w).sin().exp()
        x = y.index_add(0, graph.edge_index[0], y[graph.edge_index[1]])
        return data.Data(x=x, before=graph.x, edge_index=graph.edge_index)

    def loss_of(fn):
        def loss(w, x):
            out = fn(data.Data(x=x, edge_index=EDGES), w)
            assert out.num_nodes == 3
            assert out.edge_index is EDGES
            return (out.x * out.before).square().sum()

        return loss

    assert_as_plain(how, loss_of, convolve)


# `linearize` cannot trace how a batch of graphs is made.
@pytest.mark.parametrize("how", [how for how in TRANSFORMS if how != "linearize"])
def test_a_batch_of_graphs_that_is_changed_and_returned(how):
    data = geometric()

    def change(batch, w):
        batch.y = (batch.x * w.repeat(2)).sin().exp()
        return batch

    def loss_of(fn):
        def loss(w, x):
            batch = data.Batch.from_data_list(
                [data.Data(x=x, edge_index=EDGES), data.Data(x=x * 2, edge_index=EDGES)]
            )
            assert fn(batch, w) is batch
            return (batch.y * batch.x).square().sum()

        return loss

    assert_as_plain(how, loss_of, change)


# --- transformers ---


@each_transform
def test_outputs_of_models_and_caches(how):
    hf = transformers()
    output = hf.modeling_outputs.BaseModelOutputWithPast

    def attend(x, w, cache):
        h = (x * w).sin().exp()
        keys, values = cache.update(h[None, None, None], 2 * h[None, None, None], 0)
        states = (keys * values).sum((0, 1, 2))
        return output(
            last_hidden_state=states, past_key_values=cache, hidden_states=(x, h)
        )

    def loss_of(fn):
        def loss(w, x):
            cache = hf.DynamicCache()
            out = fn(x, w, cache)
            assert out.past_key_values is out["past_key_values"] is cache
            assert out[0] is out.last_hidden_state is out["last_hidden_state"]
            assert out.hidden_states is out["hidden_states"]
            assert out.hidden_states[0] is x
            assert out.attentions is None
            assert [*out] == ["last_hidden_state", "past_key_values", "hidden_states"]
            return (cache.layers[0].keys * out[0]).sum() + out[2][1].sum()

        return loss

    assert_as_plain(how, loss_of, attend)


# --- torch.distributions ---


def normal(x, y):
    return distributions.Normal(x, y)


def categorical(x, y):
    return distributions.Categorical(logits=x * y)


def mixture(x, y):
    return distributions.MixtureSameFamily(categorical(x, y), normal(x, y))


def independent(x, y):
    return distributions.Independent(normal(x, y), 1)


def transformed(x, y):
    moved = distributions.AffineTransform(x, y).inv
    return distributions.TransformedDistribution(
        normal(x, y), [moved, distributions.SigmoidTransform()]
    )


def multivariate(x, y):
    return distributions.MultivariateNormal(x, scale_tril=torch.diag(y))


MAKE = {
    "normal": normal,
    "mixture": mixture,
    "independent": independent,
    "transformed": transformed,
    "multivariate": multivariate,
}


@pytest.fixture(autouse=True)
def _without_checks():
    """They depend on data, which vmap refuses."""
    distributions.Distribution.set_default_validate_args(False)
    yield
    distributions.Distribution.set_default_validate_args(True)


@pytest.mark.parametrize("name", MAKE)
@each_transform
def test_distributions(how, name):
    def make(prior, w):
        y = (prior.loc * w).sin().exp()
        return MAKE[name](y, prior.scale), y

    def loss_of(fn):
        def loss(w, x):
            prior = normal(x, x.exp())
            posterior, y = fn(prior, w)
            point = y.mean() if name == "mixture" else y.tanh().square() / 2 + 0.1
            return posterior.log_prob(point).sum() + y.sum()

        return loss

    assert_as_plain(how, loss_of, make)
