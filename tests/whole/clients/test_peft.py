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
from support.decoders import adapted, language, llama, of_adapted
from support.zoo import plainly

from remat import remat
from remat.testing import assert_same


pytestmark = [
    pytest.mark.clients,
    # peft asks transformers by an old name.
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning"),
]
pytest.importorskip("peft", reason="needs the extra `clients`")


def client(**options):
    def build():
        return adapted(llama(), "q_proj", "v_proj", **options)

    return Client(build, of_adapted, language)


CLIENTS = {
    "lora": client(),
    "lora-dropout": client(lora_dropout=0.2),
    "dora": client(use_dora=True),
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
