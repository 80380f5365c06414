# SPDX-License-Identifier: Apache-2.0
"""Sizes of the tiny configs: field name -> value, and what single types need. Data only."""

from __future__ import annotations

from typing import Any

SIZES: dict[str, Any] = {
    "vocab_size": 99, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
    "decoder_start_token_id": 1, "hidden_size": 32, "d_model": 32, "n_embd": 32, "dim": 32,
    "emb_dim": 32, "embed_dim": 32, "embedding_size": 32, "hidden_dim": 64,
    "intermediate_size": 64, "ffn_hidden_size": 64, "n_inner": 64, "d_ff": 64, "dff": 64,
    "ffn_dim": 64, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "d_inner": 64, "inner_dim": 64,
    "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "encoder_layers": 2,
    "decoder_layers": 2, "num_decoder_layers": 2, "num_encoder_layers": 2,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_encoder_attention_heads": 4,
    "num_decoder_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "d_kv": 8,
    "d_head": 8, "max_position_embeddings": 64, "n_positions": 64, "n_ctx": 64,
    "max_sequence_length": 64, "max_source_positions": 64, "max_target_positions": 64,
    "type_vocab_size": 2, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "n_shared_experts": 1, "moe_num_experts": 4, "moe_k": 2, "moe_topk": 2,
    "moe_shared_expert_intermediate_size": 32, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8, "v_head_dim": 8, "sliding_window": 8, "attention_window": 8,
    "local_attention": 8, "image_size": 16, "patch_size": 8, "num_channels": 3, "num_latents": 4,
    "d_latents": 32, "num_self_attends_per_block": 1, "num_blocks": 1,
    "num_self_attention_heads": 4, "num_cross_attention_heads": 4, "use_cache": False,
}  # fmt: skip

EXTRA: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"head_dim": 8, "num_experts_per_token": 2, "num_key_value_heads": 4,
                       "n_group": 1},
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8},
    "big_bird": {"attention_type": "original_full"},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "blt": {"encoder_config": {"hidden_size_global": 32},
            "decoder_config": {"hidden_size_global": 32}, "encoder_hash_embedding_vocab_size": 50},
    "bros": {"hidden_size": 64},
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": {
                            "rope_parameters": {"full_attention": {"rope_type": "default",
        "rope_theta": 10000.0}, "sliding_attention": {"rope_type": "default",
        "rope_theta": 10000.0}}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
             "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2}},
    "dots3_note": {"text_config": {"num_key_value_heads": 4},
                   "vision_config": {"per_layer_config": {}, "adapter_in_dim": 32}},
    "dots3_note_text": {"num_key_value_heads": 4},
    "esmc": {"num_key_value_heads": 4},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8,
                  "mamba_n_groups": 1, "mamba_chunk_size": 16},
    "funnel": {"block_sizes": [1, 1]},
    # 4.57 shares keys between layers by way of the cache
    "gemma3n_text": {"use_cache": True, "num_kv_shared_layers": 2, "num_hidden_layers": 4,
                     "layer_types": ["sliding_attention", "full_attention"] * 2,
                     "vocab_size_per_layer_input": 99,
                     "hidden_size_per_layer_input": 8, "laurel_rank": 8},
    "gemma4": {
               "text_config": {"vocab_size_per_layer_input": 99, "hidden_size_per_layer_input": 8,
        "global_head_dim": 8, "num_kv_shared_layers": 0}},
    "gemma4_text": {"vocab_size_per_layer_input": 99, "hidden_size_per_layer_input": 8,
                    "global_head_dim": 8, "num_kv_shared_layers": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1,
                         "mamba_d_state": 8},
    "jamba": {"use_mamba_kernels": False, "attn_layer_period": 2, "attn_layer_offset": 1,
              "expert_layer_period": 2, "expert_layer_offset": 1, "mamba_dt_rank": 4},
    "granitemoehybrid@4": {"layer_types": ["mamba", "attention"]},
    "kimi_linear": {"num_experts_per_token": 2},
    "layoutlmv3": {"coordinate_size": 6, "shape_size": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lilt": {"hidden_size": 48, "channel_shrink_ratio": 4},
    "longcat_flash": {"expert_ffn_hidden_size": 32, "zero_expert_num": 2},
    "luke": {"entity_vocab_size": 9, "entity_emb_size": 16},
    "mamba2": {"num_heads": 8, "head_dim": 8, "expand": 2, "n_groups": 1, "state_size": 8},
    "mistral4": {"head_dim": 16},
    "mllama@4": {"text_config": {"rope_scaling": {"rope_type": "default"}}},
    "mllama_text_model@4": {"rope_scaling": {"rope_type": "default"}},
    "mt5": {"decoder_start_token_id": 1},
    "open-llama": {"shared_input_output_embedding": False},
    "phi4_multimodal@4": {
        "vision_config": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
                          "num_attention_heads": 4, "crop_size": 16, "patch_size": 8},
        "audio_config": {"hidden_size": 32, "intermediate_size": 64, "num_blocks": 1,
                         "num_attention_heads": 4, "nemo_conv_channels": 32},
    },
    "reformer": {"is_decoder": True,
                 "axial_pos_embds_dim": (16, 16), "axial_pos_shape": (8, 8), "hash_seed": 0,
                 "attention_head_size": 8, "attn_layers": ["local", "lsh"], "num_buckets": 4,
                 "feed_forward_size": 64, "lsh_attn_chunk_length": 8,
                 "local_attn_chunk_length": 8},
    "roc_bert": {"pronunciation_vocab_size": 20, "pronunciation_embed_dim": 16,
                 "shape_vocab_size": 20, "shape_embed_dim": 16},
    "t5": {"decoder_start_token_id": 1},
    "umt5": {"decoder_start_token_id": 1},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"use_mamba_kernels": False, "num_hidden_layers": 4, "attention_head_dim": 16,
              "attention_hidden_size": 64, "mamba_dt_rank": 4, "n_mamba_heads": 2,
              "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]},
    "zamba2": {"use_mamba_kernels": False, "num_hidden_layers": 4, "mamba_ngroups": 1,
               "n_mamba_heads": 4, "mamba_headdim": 16, "mamba_d_state": 8,
               "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]},
    "zamba2@4": {"layers_block_type": ["mamba", "hybrid", "mamba", "mamba"]},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
"""What a type needs beside the sizes; "zamba2@4" is for that major release of transformers only
(4.57 cannot save what two hybrid layers share)."""

NO_CLASS_HERE: dict[str, str] = {
    "layoutlmv2": "its class needs detectron2",
    "qdqbert": "its class needs pytorch-quantization",
    "transfo-xl": "its own class fails on this torch",
}
"""Types whose own class can't run here, so that there is nothing to compare with."""

PADS_COUNT = frozenset({"canine", "convbert", "doge", "fnet", "mobilebert", "nystromformer",
                        "perceiver", "reformer", "t5gemma", "t5gemma2", "yoso"})  # fmt: skip
"""Types whose own class gives a row other logits in a padded batch than alone."""

NO_CAUSAL_HERE: dict[str, str] = {
    "gemma3n": "its class needs timm",
    "gemma4_assistant": "its class runs beside another model's cache only",
    "gemma4_unified_assistant": "its class runs beside another model's cache only",
    "qdqbert": "its class needs pytorch-quantization",
    "speech_to_text_2": "its own class fails on this torch",
    "transfo-xl": "its own class fails on this torch",
}
"""Types whose own causal class can't run here on text alone."""

NO_MASK = frozenset({"cpmant", "fnet", "xlstm"})
"""Types whose backbone takes no attention mask, so that rows of several lengths can't be mixed."""

NO_TOKENS_HERE: dict[str, str] = {
    "layoutlmv2": "its class needs detectron2",
    "layoutlmv3": "refused, since its head changes its layers with the number of labels",
    "qdqbert": "its class needs pytorch-quantization",
}
"""Types whose own token classifier can't be compared."""

TRANSFORMS_STATE = frozenset(
    ["bert", "big_bird", "camembert", "data2vec-text", "dory", "electra", "ernie", "mega",
     "megatron-bert", "modernbert-decoder", "rembert", "roberta", "roberta-prelayernorm",
     "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod"]
)  # fmt: skip
"""Types whose language model has more layers between the state and its output rows."""
