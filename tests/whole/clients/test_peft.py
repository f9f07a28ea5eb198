"""Adapters of peft in a model of transformers: the base is frozen, adapters are not."""

import pytest
import torch
from support.clients import (
    STYLES,
    Client,
    assert_recomputed,
    bytes_after_forward,
    gradients,
    of_style,
    products,
    snapshot,
    train,
)
from support.decoders import language, llama
from support.zoo import plainly

from remat import remat
from remat.testing import assert_same


pytestmark = [
    pytest.mark.clients,
    # peft asks transformers by an old name.
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning"),
]
peft = pytest.importorskip("peft", reason="needs the extra `clients`")


def adapted(**options):
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], **options)
    model = peft.get_peft_model(llama(), config)
    for name, p in model.named_parameters():
        if "lora_B" in name:  # zero at first, and with it all gradients of lora_A
            torch.nn.init.normal_(p)
    return model


def layers(model):
    return [model.base_model.model.model.layers]


CLIENTS = {
    "lora": Client(adapted, layers, language),
    "lora-dropout": Client(lambda: adapted(lora_dropout=0.2), layers, language),
    "dora": Client(lambda: adapted(use_dora=True), layers, language),
}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", CLIENTS)
def test_three_steps_are_those_of_plain(name, style):
    """No input of the first layer requires grad: only its adapters do."""
    client = CLIENTS[name]
    plain, ours = (of_style(client, style, wrap) for wrap in (plainly, remat))
    want = train(client, plain)
    assert_same(train(client, ours), want)
    trained = [p for p in plain.parameters() if p.requires_grad]
    assert len(trained) < len(list(plain.parameters())) / 2
    assert all(p.grad.abs().max() > 0 for p in trained)
    assert_recomputed(client, ours)
    all_bytes, held = (bytes_after_forward(client, model) for model in (plain, ours))
    assert held < all_bytes


@pytest.mark.parametrize("style", STYLES)
def test_adapters_that_are_off_for_a_while(style):
    """What a reference model says, in the midst of a step, is that of the base."""
    client, seen = CLIENTS["lora"], []
    for wrap in plainly, remat:
        model = of_style(client, style, wrap)
        torch.manual_seed(1)
        inputs = client.inputs()
        for _ in range(2):
            out = model(**inputs)
            with torch.no_grad(), model.disable_adapter():
                reference = model(**inputs)
            (out.logits - reference.logits).square().mean().backward()
        seen.append([snapshot(out), snapshot(reference), gradients(model)])
    assert_same(seen[1], seen[0])
    _, ran = products(client, model)
    _, of_plain = products(client, of_style(client, style, plainly))
    assert ran > of_plain
