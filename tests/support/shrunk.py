"""Any architecture of transformers, small and with random weights.

A configuration is its class's default, in which what names a size is small. The sizes
fit each other for most classes; a row says what else one needs. Nothing is downloaded.
"""

import dataclasses
from typing import Any

import pytest
from torch import nn


hf = pytest.importorskip("transformers", reason="needs the extra `clients`")
auto = pytest.importorskip("transformers.models.auto")


def _named(value: Any, names: str) -> dict[str, Any]:
    return dict.fromkeys(names.split(), value)


# What a size is called, and how small it is.
SIZES: dict[str, Any] = {
    **_named(
        64,
        """vocab_size src_vocab_size tgt_vocab_size text_vocab_size n_positions
        max_position_embeddings max_sequence_length max_seq_len max_seq_length
        max_2d_position_embeddings max_source_positions max_target_positions
        context_length""",
    ),
    **_named(
        32,
        """hidden_size d_model n_embd embed_dim embedding_size embedding_dim dim emb_dim
        hidden_dim encoder_hidden_dim encoder_hidden_size decoder_hidden_size
        decoder_embed_dim out_hidden_size output_hidden_size projection_dim d_embed
        word_embed_proj_dim attention_hidden_size lru_width output_proj_dim output_dim
        text_hidden_size text_embed_dim projector_hidden_size fpn_hidden_size
        mask_feature_size vision_hidden_size mm_hidden_size vlm_hidden_size
        pooler_output_size adapter_hidden_size d_hidden rank entity_emb_size
        xvector_output_dim classifier_proj_size cross_hidden_size image_size""",
    ),
    **_named(
        48,
        """intermediate_size encoder_intermediate_size decoder_intermediate_size
        dense_intermediate_size intermediate_size_mlp moe_intermediate_size
        shared_intermediate_size shared_expert_intermediate_size
        moe_shared_expert_intermediate_size expert_intermediate_size encoder_ffn_dim
        decoder_ffn_dim d_ff ffn_dim n_inner d_inner mlp_hidden_size feedforward_dim
        ffn_hidden_size block_ff_dim mlp_dim""",
    ),
    **_named(16, "kv_lora_rank q_lora_rank input_dim subsampling_conv_channels"),
    **_named(
        8,
        """head_dim d_kv qk_rope_head_dim qk_nope_head_dim v_head_dim global_head_dim
        attention_head_dim linear_key_head_dim linear_value_head_dim linear_head_dim
        index_head_dim index_topk time_step_rank query_pre_attn_scalar num_mel_bins
        sliding_window attention_chunk_size mamba_chunk_size block_size num_queries
        num_query_tokens hidden_size_per_layer_input num_conv_pos_embeddings
        codevector_dim proj_codevector_dim local_attention patch_size""",
    ),
    **_named(
        4,
        """num_attention_heads n_head n_heads num_heads encoder_attention_heads
        decoder_attention_heads encoder_num_attention_heads decoder_num_attention_heads
        num_encoder_attention_heads num_decoder_attention_heads linear_num_key_heads
        linear_num_value_heads linear_num_heads mamba_n_heads mamba_num_heads
        index_n_heads num_experts num_local_experts n_routed_experts moe_num_experts
        state_size mamba_d_state num_conv_pos_embedding_groups""",
    ),
    **_named(
        2,
        """num_hidden_layers n_layer n_layers num_layers depth encoder_layers
        decoder_layers num_encoder_layers num_decoder_layers encoder_num_hidden_layers
        decoder_num_hidden_layers decoder_num_layers num_key_value_heads num_kv_heads
        encoder_num_key_value_heads decoder_num_key_value_heads n_head_kv
        num_experts_per_tok moe_topk num_feat_extract_layers mamba_expand""",
    ),
    **_named(
        1,
        """n_group topk_group first_k_dense_replace num_nextn_predict_layers
        n_shared_experts num_shared_experts bos_token_id decoder_start_token_id""",
    ),
    **_named(2, "eos_token_id sep_token_id forced_eos_token_id"),
    **_named(3, "image_token_id image_token_index video_token_id video_token_index"),
    "pad_token_id": 0,
    "mamba_d_head": 16,
    "conv_dim": [16, 16],
    "conv_stride": [10, 4],
    "conv_kernel": [20, 8],
    # Else a layer that is dropped in the last step has no gradient.
    **_named(0.0, "layerdrop encoder_layerdrop decoder_layerdrop mask_time_prob"),
}
# Where these are None, the class makes them from others.
MADE = _named(
    None,
    """head_dim num_key_value_heads num_kv_heads n_inner q_lora_rank embedding_size
    sliding_window image_size pad_token_id bos_token_id eos_token_id
    decoder_start_token_id""",
)
# Lists with a number for each stage, or a word for each layer.
DEPTHS = "depths", "layer_depths", "num_blocks"
WIDTHS = _named(
    None,
    """hidden_sizes encoder_hidden_sizes neck_hidden_sizes widths embed_dims channels
    embed_dim""",
)
HEADS = "num_attention_heads", "num_heads", "num_key_value_heads"
LAYERS = "layer_types", "mlp_layer_types", "layers_block_type", "block_types"


def sizes_of(config: type[Any]) -> dict[str, Any]:
    """Return the small sizes of a class of configurations, with those of its parts."""
    default, parts = config(), getattr(config, "sub_configs", {})
    found = {
        field.name: small
        for field in dataclasses.fields(config)
        if field.name not in parts
        and (small := _small(field.name, getattr(default, field.name, None)))
        is not None
    }
    for name in parts:
        part = getattr(default, name, None)
        if dataclasses.is_dataclass(part):
            found[name] = {**sizes_of(type(part)), "model_type": part.model_type}
    return found


def _small(name: str, value: Any) -> Any:
    """Return the small value in the place of a default; None where that stays."""
    if isinstance(value, (list, tuple)):
        return _small_list(name, value)
    if (value is None and name in MADE) or isinstance(SIZES.get(name), list):
        return None
    return SIZES.get(name)


def _small_list(name: str, value: Any) -> Any:
    growing = [2 ** min(k, 2) for k in range(len(value))]
    if name in DEPTHS:
        return type(value)([2] * len(value))
    if name in WIDTHS:
        return type(value)(8 * n for n in growing)
    if name in HEADS:
        return type(value)(growing)
    if name in LAYERS and value:
        return (list(dict.fromkeys(value)) * 2)[:2]
    return SIZES.get(name) if isinstance(SIZES.get(name), list) else None


def shrunk(kind: str, **options: Any) -> nn.Module:
    """Return a small model without a head.

    Args:
        kind: what transformers calls the architecture.
        **options: of its configuration, beside sizes.
    """
    config, model = classes(kind)
    return model(config(**{**sizes_of(config), **options}))


def classes(kind: str) -> tuple[type[Any], type[Any]]:
    """Return the configuration and the model of an architecture."""
    name = auto.modeling_auto.MODEL_MAPPING_NAMES[kind]
    name = name if isinstance(name, str) else name[0]
    config = auto.configuration_auto.CONFIG_MAPPING_NAMES[kind]
    return getattr(hf, config), getattr(hf, name)


def kinds() -> list[str]:
    """Return each architecture that the library has."""
    return [*auto.modeling_auto.MODEL_MAPPING_NAMES]
