"""`remat.nn.enable` in one model each of transformers, diffusers and peft.

tests/whole/clients has many more.
"""

import pytest
from support.clients import Client, assert_changed_trains_as_plain, built, products
from support.decoders import CLIENTS as TRANSFORMERS, llama, without_cache
from support.diffusion import CLIENTS as DIFFUSERS

import remat


# peft asks transformers by an old name.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_check.*:FutureWarning")
peft = pytest.importorskip("peft", reason="needs the extra `clients`")


def adapted():
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False
    )
    return peft.get_peft_model(llama(), config)


CLIENTS = {
    "transformers": TRANSFORMERS["bert"],
    "diffusers": DIFFUSERS["dit"],
    "peft": Client(
        adapted,
        lambda model: [model.base_model.model.model.layers],
        without_cache("llama").inputs,
        is_adapted=True,
    ),
}


@pytest.mark.parametrize("name", CLIENTS)
def test_three_steps_are_those_of_plain(name):
    client = CLIENTS[name]
    assert_changed_trains_as_plain(client, remat.nn.enable)
    removed = remat.nn.remove(remat.nn.enable(built(client)))
    assert products(client, removed) == products(client, built(client))
