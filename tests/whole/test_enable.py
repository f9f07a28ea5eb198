"""`remat.nn.enable` in one model each of transformers, diffusers and peft.

tests/whole/clients has many more.
"""

import pytest
from support.clients import Client, assert_changed_trains_as_plain, built, products

import remat


# peft asks transformers by an old name.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_check.*:FutureWarning")


# --- The models. Every worker imports this file, and one of them these packages. ---


def of_transformers():
    from support.decoders import CLIENTS

    return CLIENTS["bert"]


def of_diffusers():
    from support.diffusion import CLIENTS

    return CLIENTS["dit"]


def of_peft():
    from support.decoders import adapted, llama, of_adapted, without_cache

    return Client(
        lambda: adapted(llama(), "q_proj", "v_proj"),
        of_adapted,
        without_cache("llama").inputs,
        is_adapted=True,
    )


@pytest.mark.one_in(3)
@pytest.mark.parametrize("client", [of_transformers, of_diffusers, of_peft])
def test_three_steps_are_those_of_plain(client):
    client = client()
    assert_changed_trains_as_plain(client, remat.nn.enable)
    removed = remat.nn.remove(remat.nn.enable(built(client)))
    assert products(client, removed) == products(client, built(client))
