"""Many architectures under state that goes on between forward and backward.

Each is trained as it is; with states that its blocks read and fill in forwards that
were put there; and with states of its hooks. What is cheap is in `make clients`, all of
it in `make full`.
"""

import pytest
from support.restless import KINDS, SETTINGS, WAYS, assert_sweeps, trained
from support.swept import ACTIVATIONS, CLIENTS, of_activation
from support.tables import crossed


pytestmark = pytest.mark.clients
NUMBERS = {name: k for k, name in enumerate(CLIENTS)}


@crossed("name, setting", CLIENTS, SETTINGS)
def test_two_steps_are_those_of_plain(name, setting):
    """From one architecture to the next, a state is reached in the next way."""
    ways = SETTINGS[setting]
    first = NUMBERS[name] % max(1, len(ways))
    assert_sweeps(CLIENTS[name], [*ways[first:], *ways[:first]])


@crossed("kind, way", KINDS, WAYS)
def test_each_kind_of_state_in_each_way(kind, way):
    assert_sweeps(CLIENTS["electra"], [WAYS[way]], kinds=[kind])


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_each_activation(name):
    assert_sweeps(of_activation(name), SETTINGS["in hooks"], kinds=["attributes"])


# --- benchmarks/architectures.py ---


def test_the_command_says_who_equals_plain(scripts):
    """A cache that a block appends to is longer after torch's recompute."""
    script = scripts("architectures")
    found = script.row("llama", [])
    assert found["remat"] == "equal"
    assert found["torch.utils.checkpoint"].startswith("differs: ")
    assert {*script.row("electra", []).values()} == {"equal"}
    (left_out,) = {*script.row("align", []).values()}
    assert left_out.startswith("left out: ValueError: it has ")


def test_the_command_finds_what_differs_and_what_raises(scripts):
    script = scripts("architectures")
    client = script.client_of("electra")
    _, want = trained(client, lambda model: model)
    other = script.verdict(client, lambda m: m.requires_grad_(False), [], want)
    assert other.startswith("raises RuntimeError")
    _, want = trained(client, lambda model: model.eval())
    assert script.verdict(client, lambda m: m, [], want).startswith("differs: ")
