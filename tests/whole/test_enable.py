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


def test_a_policy_may_be_a_text_as_of_apply():
    client = of_transformers()
    enabled = [remat.nn.enable(built(client), policy=p) for p in POLICIES]
    first, *others = (products(client, model) for model in enabled)
    assert others == [first] * 2
    assert first[1] < products(client, remat.nn.enable(built(client), policy="full"))[1]
    with pytest.raises(
        ValueError, match=r"nn.enable, policy: 'dotz' is no policy\. Do"
    ):
        remat.nn.enable(built(client), policy="dotz")
    with pytest.raises(ValueError, match="every_n_layers=0 is not a positive number"):
        remat.nn.enable(built(client), policy="none")


def test_what_has_a_switch_and_reads_it_nowhere_is_not_listed():
    """The attentions of T5."""
    from support.decoders import CLIENTS

    model = remat.nn.enable(built(CLIENTS["t5"]))
    stacks = (model.encoder, "encoder"), (model.decoder, "decoder")
    blocks = {
        f"{at}.block.{i}" for stack, at in stacks for i in range(len(stack.block))
    }
    assert remat.nn.applied(model).keys() == blocks


POLICIES = "dots", "dots_saveable", remat.policies.dots_saveable


def test_the_option_of_transformers_that_offloads_inputs():
    """`activation_checkpointing_enable(offload=True)`, before and after ours."""
    client = of_transformers()
    for first in (True, False):
        model = built(client)
        if first:
            model.activation_checkpointing_enable(offload=True)
        model = remat.nn.enable(model)
        if not first:
            model.activation_checkpointing_enable(offload=True)
        # Here all is in host memory, which shows that it is asked for.
        with pytest.warns(UserWarning, match="offload_inputs= moves no input"):
            products(client, model)
        remat._offload.inputs._TOLD.clear()
    model = remat.nn.enable(built(client), offload_inputs="disk")
    model.activation_checkpointing_enable(offload=True)
    assert products(client, model) == products(client, remat.nn.enable(built(client)))
