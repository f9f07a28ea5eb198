"""`remat.nn.enable` in one model each of transformers, diffusers and peft.

tests/whole/clients has many more.
"""

import pytest
from support.clients import Client, assert_changed_trains_as_plain, built, products
from support.decoders import (
    CLIENTS as TRANSFORMERS,
    adapted,
    llama,
    of_adapted,
    without_cache,
)
from support.diffusion import CLIENTS as DIFFUSERS

import remat


# peft asks transformers by an old name.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_check.*:FutureWarning")
pytest.importorskip("peft", reason="needs the extra `clients`")


CLIENTS = {
    "transformers": TRANSFORMERS["bert"],
    "diffusers": DIFFUSERS["dit"],
    "peft": Client(
        lambda: adapted(llama(), "q_proj", "v_proj"),
        of_adapted,
        without_cache("llama").inputs,
        is_adapted=True,
    ),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", CLIENTS)
def test_three_steps_are_those_of_plain(name):
    client = CLIENTS[name]
    assert_changed_trains_as_plain(client, remat.nn.enable)
    removed = remat.nn.remove(remat.nn.enable(built(client)))
    assert products(client, removed) == products(client, built(client))
