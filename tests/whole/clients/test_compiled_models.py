"""Models of transformers, timm and torchvision in compiled code: as compiled plain.

Each is compiled whole and by region: every layer by itself, as deep models often are.
Products are counted by the profiler: under a mode that counts, Dynamo compiles nothing.
"""

import importlib

import pytest
import torch
from support.clients import (
    PRODUCTS,
    assert_moved,
    of_style,
    residual_stages,
    train,
    vision,
)
from support.decoders import without_cache
from support.traced import compiling, ran
from support.zoo import plainly

from remat import remat
from remat.testing import assert_same


pytestmark = [
    pytest.mark.clients,
    # Dynamo and inductor warn of their own deprecations, and of slow numerics.
    pytest.mark.filterwarnings("default"),
]


def package(name):
    """A package that needs a torchvision that loads beside this torch."""
    try:
        importlib.import_module("torchvision")
        return importlib.import_module(name)
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"{name} does not load: {error}")


def timm_vit():
    return package("timm").create_model("test_vit", num_classes=5, img_size=64)


def torchvision_resnet():
    return package("torchvision").models.resnet18(num_classes=5)


MODELS = {
    "transformers Llama": without_cache("llama"),
    "transformers GPT-2": without_cache("gpt2"),
    "transformers BERT": without_cache("bert"),
    "transformers ViT": without_cache("vit"),
    "timm ViT": vision(timm_vit, lambda model: [model.blocks]),
    "torchvision ResNet": vision(torchvision_resnet, residual_stages),
}


def whole(model, client, backend):
    """Compile the model in place."""
    model.compile(backend=backend)


def by_region(model, client, backend):
    """Compile each layer by itself."""
    for layer in (layer for block in client.blocks(model) for layer in block):
        layer.forward = torch.compile(layer.forward, backend=backend)


def compiled_run(client, wrap, compile_it, backend):
    """Three steps of a compiled model, and the products of one more: both ways."""
    with compiling():
        model = of_style(client, "forward", wrap)
        compile_it(model, client, backend)
        seen = train(client, model)
        assert_moved(model, seen)
        torch.manual_seed(5)
        inputs = client.inputs()
        loss, forward = ran(lambda: client.loss(model(**inputs)))
        _, backward = ran(loss.backward)
    return seen, *(sum(ops[k] for k in PRODUCTS) for ops in (forward, backward))


@pytest.mark.parametrize("compile_it", [whole, by_region])
@pytest.mark.parametrize("name", MODELS)
def test_a_compiled_model_trains_as_plain(name, compile_it):
    """Bit for bit, as the kernels are those of eager code."""
    client = MODELS[name]
    want, forward, backward = compiled_run(client, plainly, compile_it, "aot_eager")
    got, once, twice = compiled_run(client, remat, compile_it, "aot_eager")
    assert_same(got, want)
    layers = sum(len(block) for block in client.blocks(client.build()))
    again = twice - backward
    assert once == forward
    assert layers <= again <= forward, f"{again} products run again"
