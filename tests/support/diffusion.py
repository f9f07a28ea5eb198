"""Models of Hugging Face's diffusers, small and with random weights, as clients."""

import pytest
import torch
from support.clients import Client


diffusers = pytest.importorskip("diffusers", reason="needs the extra `clients`")


def loss(out):
    return out.sample.square().mean()


def steps(rows=2):
    return torch.randint(0, 1000, (rows,))


# --- Inputs ---


def noised():
    return {
        "sample": torch.randn(2, 4, 16, 16),
        "timestep": steps(),
        "encoder_hidden_states": torch.randn(2, 4, 8),
    }


def packed():
    """Flux takes a sequence of patches, and one of text."""
    return {
        "hidden_states": torch.randn(2, 16, 4),
        "encoder_hidden_states": torch.randn(2, 8, 32),
        "pooled_projections": torch.randn(2, 32),
        "img_ids": torch.randn(16, 3),
        "txt_ids": torch.randn(8, 3),
        "timestep": torch.rand(2),
    }


def labelled():
    return {
        "hidden_states": torch.randn(2, 4, 8, 8),
        "timestep": steps(),
        "class_labels": torch.randint(0, 10, (2,)),
    }


def pictures():
    return {"sample": torch.randn(2, 3, 16, 16), "sample_posterior": True}


# --- Models ---


def unet():
    return diffusers.UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(8, 16),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=8,
        attention_head_dim=2,
        norm_num_groups=4,
        dropout=0.1,
    )


def flux():
    return diffusers.FluxTransformer2DModel(
        in_channels=4,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )


def dit():
    return diffusers.DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        out_channels=8,
        num_layers=2,
        sample_size=8,
        num_embeds_ada_norm=10,
        dropout=0.1,
    )


def autoencoder():
    return diffusers.AutoencoderKL(
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=4,
        sample_size=16,
    )


# --- Clients ---


def both_sides(model):
    return [model.down_blocks, [model.mid_block], model.up_blocks]


def coders(model):
    return [blocks for m in (model.encoder, model.decoder) for blocks in _sides(m)]


def _sides(model):
    name = "down_blocks" if hasattr(model, "down_blocks") else "up_blocks"
    return [getattr(model, name), [model.mid_block]]


CLIENTS = {
    "unet": Client(unet, both_sides, noised, loss),
    "flux": Client(
        flux,
        lambda m: [m.transformer_blocks, m.single_transformer_blocks],
        packed,
        loss,
    ),
    "dit": Client(dit, lambda m: [m.transformer_blocks], labelled, loss),
    "autoencoder": Client(autoencoder, coders, pictures, loss),
}
