"""Models of timm, unmodified: those that it has for tests, with random weights.

timm cannot be imported without torchvision, of which PyPI has no build that loads
beside a CPU build of torch 2.13. These tests run where it loads.
"""

import pytest
import torch
from support.clients import (
    STYLES,
    adamw,
    assert_changed_trains_as_plain,
    assert_leaves_nothing_behind,
    assert_no_more_than_theirs,
    assert_trains_as_plain,
    built,
    bytes_after_forward,
    of_style,
    products,
    residual_stages,
    sgd,
    train,
    vision,
)
from support.restless import SETTINGS, assert_sweeps
from support.tables import crossed

import remat as package
from remat import policies, remat
from remat.testing import assert_same


pytestmark = pytest.mark.clients
reason = "timm needs a torchvision that loads beside this torch"
pytest.importorskip("torchvision", reason=reason, exc_type=(ImportError, RuntimeError))
timm = pytest.importorskip("timm", reason="needs timm")


# --- The models ---


def client(name, blocks, **options):
    return vision(lambda: timm.create_model(name, num_classes=5, **options), blocks)


CLIENTS = {
    "vit": client(
        "test_vit", lambda m: [m.blocks], img_size=64, drop_rate=0.1, attn_drop_rate=0.1
    ),
    "vit-relpos": client(
        "test_vit_relpos", lambda m: [m.blocks], img_size=64, drop_path_rate=0.2
    ),
    "resnet": client("test_resnet", residual_stages, drop_path_rate=0.2),
    "convnext": client("test_convnext", lambda m: [s.blocks for s in m.stages]),
    "efficientnet": client("test_efficientnet", lambda m: m.blocks, drop_path_rate=0.2),
    "nfnet": client("test_nfnet", lambda m: m.stages, drop_path_rate=0.2),
}
styles = pytest.mark.parametrize("style", STYLES)


def clients(*names):
    return pytest.mark.parametrize("name", names or tuple(CLIENTS))


# --- Training ---


@styles
@clients()
@pytest.mark.parametrize("optimizer", [adamw, sgd])
def test_three_steps_are_those_of_plain(name, style, optimizer):
    """Running statistics are updated once in each step."""
    assert_trains_as_plain(CLIENTS[name], style, remat, optimizer=optimizer)


@crossed("name, setting", CLIENTS, SETTINGS)
def test_under_state_that_goes_on(name, setting):
    assert_sweeps(CLIENTS[name], SETTINGS[setting])


@styles
@clients("vit", "resnet")
def test_gradients_add_up_over_micro_batches(name, style):
    assert_trains_as_plain(CLIENTS[name], style, remat, micro_batches=2)


@clients("vit", "resnet", "convnext", "efficientnet")
def test_whole_stages(name):
    """A stage is an nn.Sequential of layers, and is one call."""

    def stages(blocks, wrap):
        for block in blocks:
            block.forward = wrap(block.forward)

    assert_trains_as_plain(CLIENTS[name], stages, remat)


@styles
@clients("vit", "convnext")
@pytest.mark.parametrize("policy", ["dots_saveable", "everything_saveable"])
def test_policies(name, style, policy):
    """Products are not run again, and convolutions are products."""
    of_policy = remat(policy=getattr(policies, policy))
    client = CLIENTS[name]
    want = train(client, built(client))
    ours = of_style(client, style, of_policy)
    assert_same(train(client, ours), want)
    models = of_style(client, style, remat), ours, built(client)
    _, ran, of_plain = (products(client, model) for model in models)
    assert ran == of_plain
    nothing, kept, all_bytes = (bytes_after_forward(client, m) for m in models)
    assert nothing < kept <= all_bytes


# --- package.nn.apply ---


@clients()
def test_the_blocks_are_found(name):
    client = CLIENTS[name]
    model = built(client)
    blocks = [block for blocks in client.blocks(model) for block in blocks]
    # A single convolution; and the only block of its class, in a list by itself.
    alone = {"efficientnet": 0, "resnet": 2}.get(name)
    want = [block for i, block in enumerate(blocks) if i != alone]
    assert [*package.nn.blocks(model).values()] == want


# The first block of each, and how many there are.
SHAPES = {
    "pvt_v2_b0": ("stages.0.blocks.0", 8),
    "swin_tiny_patch4_window7_224": ("layers.0.blocks.0", 12),
    "mobilenetv3_small_050": ("blocks.0", 11),
    "maxvit_nano_rw_256": ("stages.0.blocks.0", 7),
    "edgenext_xx_small": ("stages.0.blocks.0", 12),
    "mixer_s16_224": ("blocks.0", 8),
    "resnet50": ("layer1.0", 16),
    "vgg11": (None, 0),
}


@pytest.mark.parametrize("name", SHAPES)
def test_the_blocks_of_models_of_many_shapes(name):
    first, count = SHAPES[name]
    with torch.device("meta"):
        model = timm.create_model(name)
    found = [*package.nn.blocks(model)]
    assert [next(iter(found), None), len(found)] == [first, count]


@clients()
def test_an_applied_model_trains_as_plain(name):
    assert_changed_trains_as_plain(CLIENTS[name], package.nn.apply)


# --- Memory ---


@styles
@clients()
def test_no_more_work_and_bytes_than_with_torchs_checkpoint(name, style):
    all_bytes, held, *_ = assert_no_more_than_theirs(CLIENTS[name], style, copies=True)
    assert held < all_bytes


@styles
@clients("vit", "resnet")
def test_steps_leave_nothing_behind(name, style):
    assert_leaves_nothing_behind(CLIENTS[name], style)
