"""Needs of single types, for their tiny checkpoints, beyond the rules of sizes."""

from __future__ import annotations

from dataclasses import replace

from support.any_model.media_sizes import SIDE, TypeSizes


def _in_letters(number: int) -> str:
    """Write a number as Chameleon's vocabulary names the codes of an image: A for 0, B for 1, and so on."""
    return "".join(chr(ord("A") + int(digit)) for digit in str(number))


_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_MROPE = {**_ROPE, "mrope_section": [2, 3, 3]}
_HALF_MROPE = {**_MROPE, "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}
_QWEN_IMAGES = {"patch_size": 14, "size": {"shortest_edge": SIDE * SIDE, "longest_edge": 4 * SIDE * SIDE}}
_SQUARE = {"height": SIDE, "width": SIDE}
_VISION_START = "<|vision_start|><|image_pad|><|vision_end|>"
_UNTIED = {"tie_word_embeddings": False, "text_config.tie_word_embeddings": False}  # else each token says itself again
_HYBRID = ["linear_attention", "full_attention"]
_GRID = {"image_grid_pinpoints": [[56, 56], [56, 112], [112, 56], [112, 112]]}
_OPT = {"model_type": "opt", "hidden_size": 64, "ffn_dim": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
_QUERIES = TypeSizes(processor={"num_query_tokens": 4}, unnamed=("image_token",), chats=False, image_token="<image>")
_LLAVA = TypeSizes(
    config={"image_seq_length": 16, **_GRID},
    images=_GRID,
    processor={"num_additional_image_tokens": 1, "patch_size": 14, "vision_feature_select_strategy": "default"},
)
OWN_SIZES: dict[str, TypeSizes] = {
    "chameleon": TypeSizes(
        plain=("<racm3:break>", "<eoss>", *(f"IMGIMG{_in_letters(number)}Z" for number in range(32))),
        config={
            "vq_config.num_embeddings": 32,
            "vq_config.base_channels": 32,
            "vq_config.channel_multiplier": [1, 1, 1, 1, 1],
            "vq_config.embed_dim": 4,
            "vq_config.latent_channels": 4,
        },
        images={"size": {"shortest_edge": 64}, "crop_size": {"height": 64, "width": 64}},
        processor={"image_seq_length": 16},
        chats=False,
    ),
    "phi4_multimodal": TypeSizes(
        config={
            "vision_config.image_size": 160,
            "vision_config.crop_size": 160,
            "vision_config.patch_size": 5,
            "audio_config.num_blocks": 2,  # more of random weights make other features of a rounding error
            "audio_config.nemo_conv_channels": 64,
            "audio_config.ext_pw_out_channel": 64,
            "audio_config.depthwise_separable_out_channel": 64,
        },
        images={"size": {"height": 160, "width": 160}, "patch_size": 5},  # 32 a side make its processor's 256 tokens
        chats=False,
    ),
    "granite_speech": TypeSizes(config={"has_lora_adapter": False}, embedding_std=0.1),
    "granite_speech_plus": TypeSizes(
        config={
            "has_lora_adapter": False,
            "encoder_config.cat_hidden_layers": [0],
            "projector_config.encoder_hidden_size": 128,  # of that layer's rows and of the last one's
        }
    ),
    "voxtral": TypeSizes(
        tekken=True,
        config={"audio_config.intermediate_size": 256},  # four rows of the tower, which become one
        audio={"feature_size": 128},
    ),
    "cohere2_vision": TypeSizes(images={"patch_size": 2}),
    "minimax_m3_vl": TypeSizes(image_token="]<]image[>[", image_text="]<]image[>[", plain=("]<]image[>[",)),
    "lfm2_vl": TypeSizes(
        config={"vision_config.patch_size": 16, "text_config.layer_types": ["conv", "full_attention"]}
    ),
    "gemma4_unified": TypeSizes(
        start={"vision_config": {}},
        config={
            "text_config.per_layer_config": None,
            "text_config.num_hidden_layers": 3,
            "text_config.layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "text_config.sliding_window": 300,  # longer than an image, as in its checkpoints
        },
    ),
    "aya_vision": TypeSizes(processor={"img_size": 56, "patch_size": 14}),
    "blip-2": replace(
        _QUERIES,
        config={
            "num_query_tokens": 4,
            "text_config": {**_OPT, "word_embed_proj_dim": 64, "max_position_embeddings": 2048},
        },
    ),
    "instructblip": replace(_QUERIES, config={"num_query_tokens": 4, "text_config.word_embed_proj_dim": 64}),
    "cohere_compass": TypeSizes(
        config={
            "text_config.layer_types": ["sliding_attention", "full_attention"],
            "text_config.rope_parameters": {"sliding_attention": _MROPE, "full_attention": _MROPE},
        },
        images=_QWEN_IMAGES,
    ),
    "cosmos3_omni": TypeSizes(
        config={"text_config.rope_parameters": {**_MROPE, "mrope_interleaved": True}},
        images=_QWEN_IMAGES,
        processor_class="Qwen3VLProcessor",
    ),
    "deepseek_vl": TypeSizes(processor={"num_image_tokens": 16}, config={"num_image_tokens": 16}),
    "deepseek_ocr2": TypeSizes(
        config={
            "text_config.mlp_layer_types": ["dense", "sparse"],
            "text_config.num_experts_per_tok": 2,
            "text_config.max_position_embeddings": 8192,
            "vision_config.sam_config.downsample_channels": [32, 64],
            "vision_config.sam_config.output_channels": 32,
        },
        images={"size": _SQUARE, "tile_size": SIDE, "min_patches": 2, "max_patches": 2},
        processor={"patch_size": 5, "downsample_ratio": 1},  # 144 queries an image, whatever its patches
    ),
    "deepseek_vl_hybrid": TypeSizes(
        processor={"num_image_tokens": 16}, images={"high_res_size": {"height": 56, "width": 56}}
    ),
    "janus": TypeSizes(processor={"num_image_tokens": 16}),
    "dots3_note": TypeSizes(
        config={
            "text_config.per_layer_config": None,
            "text_config.num_key_value_heads": 4,
            "text_config.layer_types": ["sliding_attention", "indexed_attention"],
            "text_config.mlp_layer_types": ["dense", "sparse"],
            "vision_config.per_layer_config": None,
            "vision_config.mlp_layer_types": ["dense", "sparse"],
            "vision_config.adapter_in_dim": 64,
            "vision_config.adapter_out_dim": 64,
            "audio_config.adapter_input_size": 64,
            "audio_config.adapter_out_dim": 64,
        },
        images={**_QWEN_IMAGES, "temporal_patch_size": 1},
    ),
    "inkling2": TypeSizes(
        config={
            "text_config.layer_types": ["hybrid_sliding", "hybrid"],
            "text_config.swa_num_attention_heads": 4,
            "text_config.swa_num_key_value_heads": 2,
            "text_config.swa_head_dim": 16,
            "text_config.sliding_window_size": 40,
            "vision_config.posemb_grid_size": 8,
        },
        images={"size": {"height": 28, "width": 28}},  # of a piece of two by two patches
    ),
    "emu3": TypeSizes(
        tokens={"image_token": "<image>"},
        plain=("<|extra_200|>", *(f"<|visual token {number:06}|>" for number in range(32))),
        config={
            "vq_config.codebook_size": 32,
            "vq_config.base_channels": 64,
            "vq_config.channel_multiplier": [1, 1, 1, 1],
            "vq_config.num_attention_heads": 1,
            "vq_config.attn_resolutions": [7],
            "vq_config.num_res_blocks": 1,
            "vq_config.embed_dim": 4,
        },
        images={"min_pixels": 32 * 32, "max_pixels": 64 * 64},
    ),
    "ernie4_5_vl_moe": TypeSizes(
        image_text="<image_start><image><image_end>",
        config={
            "text_config.rope_parameters": {**_ROPE, "mrope_section": [2, 2, 4]},
            "text_config.moe_intermediate_size": [32, 32],
            "text_config.mlp_layer_types": ["sparse", "sparse"],  # experts of images must reach the text behind them
        },
        images=_QWEN_IMAGES,
    ),
    "gemma3n": TypeSizes(  # its tower, by the library timm, has one size
        config={
            **{"text_config.num_hidden_layers": 4, "text_config.intermediate_size": [128] * 4},
            **{"text_config.num_kv_shared_layers": 2, "text_config.activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0]},
            **{"text_config.hidden_size_per_layer_input": 16, "text_config.vocab_size_per_layer_input": 355},
            "text_config.layer_types": ["sliding_attention", "full_attention"] * 2,
            **{"vision_config.hidden_size": 2048, "vision_config.vocab_offset": 362, "audio_config.vocab_offset": 363},
        },
        further_ids=2,  # of its encoders; a table of each layer has no id of media
        image_text="<image>",
    ),
    "gemma4": TypeSizes(
        start={"vision_config": {}, "audio_config": {}},
        config={
            **_UNTIED,
            "text_config.per_layer_config": None,
            "text_config.global_head_dim": 32,
            "text_config.num_hidden_layers": 4,
            "text_config.num_kv_shared_layers": 1,  # the layer before it must see what one that is not causal did
            "text_config.hidden_size_per_layer_input": 16,
            "text_config.use_bidirectional_attention": "vision",
            "text_config.layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        images={"max_soft_tokens": 70},
    ),
    "glm4v": TypeSizes(config={"text_config.rope_parameters": _HALF_MROPE}, images=_QWEN_IMAGES),
    "glm46v": TypeSizes(config={"text_config.rope_parameters": _HALF_MROPE}, images=_QWEN_IMAGES),
    "glm4v_moe": TypeSizes(
        config={"text_config.rope_parameters": _HALF_MROPE},
        images=_QWEN_IMAGES,
        image_processor="Glm4vImageProcessorPil",
    ),
    "glm_ocr": TypeSizes(
        config={"text_config.rope_parameters": _HALF_MROPE},
        images=_QWEN_IMAGES,
        image_processor="Glm46VImageProcessorPil",
        processor_class="Glm46VProcessor",
    ),
    "glmga": TypeSizes(
        config={"text_config.rope_parameters": _HALF_MROPE}, images=_QWEN_IMAGES, processor_class="Glm46VProcessor"
    ),
    "glm5_next": TypeSizes(
        config={
            "text_config.num_key_value_heads": 4,
            "text_config.layer_types": _HYBRID,
            "text_config.linear_head_dim": 16,
            "text_config.linear_num_heads": 4,
            "text_config.index_head_dim": 16,
            "text_config.index_n_heads": 2,
            "text_config.index_topk": 32,
        },
        images=_QWEN_IMAGES,
    ),
    "granite_docling": TypeSizes(processor={"image_seq_len": 1}),
    "minicpm_ocr": TypeSizes(config={"text_config.layer_types": _HYBRID}),
    "granite4_vision": TypeSizes(
        config={
            "downsample_rate": "1/2",
            "deepstack_layer_map": [[-1, 0], [-2, 1]],
            "spatial_target_layers": [0, 1, 0, 1],
            **_GRID,
        },
        images=_GRID,
        processor={"downsample_rate": "1/2", "num_additional_image_tokens": 1},
    ),
    "got_ocr2": TypeSizes(
        config={
            "vision_config.image_size": 128,
            "vision_config.patch_size": 2,
            "vision_config.mlp_dim": 128,
            "vision_config.global_attn_indexes": [],
        },
        images={"size": {"height": 128, "width": 128}},  # 64 patches a side make the 256 tokens of its processor
        chats=False,
    ),
    "hunyuan_vl": TypeSizes(
        image_text="<image_start><image><image_end>",
        config={
            "text_config.head_dim": 16,
            "text_config.rope_parameters": {
                "rope_type": "dynamic",
                "rope_theta": 10_000.0,
                "alpha": 1000.0,
                "factor": 1.0,
                "xdrope_section": [2, 2, 2, 2],
                "mrope_section": [2, 2, 2, 2],
            },
        },
        images=_QWEN_IMAGES,
    ),
    "kimi_k25": TypeSizes(config={"text_config.num_key_value_heads": 4}),
    "lfm3_vl": TypeSizes(
        config={
            "text_config.layer_types": ["conv", "full_attention"],
            "vision_config.layer_types": ["conv", "full_attention"],
        },
        images=_QWEN_IMAGES,
    ),
    "llama4": TypeSizes(
        config={
            "vision_config.intermediate_size": 256,  # four times the hidden size, by its pixel shuffle
            "vision_config.vision_output_dim": 64,
            "vision_config.projector_input_dim": 64,
            "vision_config.projector_output_dim": 64,
            "text_config.attention_chunk_size": 64,
            "text_config.floor_scale": 16,
            "text_config.no_rope_layer_interval": 2,
        },
        ids={"image_token_id": "<|patch|>"},
    ),
    "llava_next_video": _LLAVA,
    "minicpmv4_6": TypeSizes(config={"text_config.layer_types": _HYBRID}),
    "minicpmv4_7": TypeSizes(config={"text_config.layer_types": _HYBRID}),
    "mistral3": TypeSizes(
        config={"vision_feature_layer": -1, "vision_config.head_dim": 16},
        images={"size": {"longest_edge": 112}, "patch_size": {"height": 14, "width": 14}},
        processor={"patch_size": 14, "spatial_merge_size": 2},
    ),
    "mistral_large4": TypeSizes(
        config={
            "vision_feature_layer": -1,
            "text_config.kv_source_layers": [0, 1],
            "text_config.indexer_types": None,
            "text_config.num_key_value_heads": 4,
        },
        images={"size": {"longest_edge": 112}, "patch_size": {"height": 14, "width": 14}},
        processor={"patch_size": 14, "spatial_merge_size": 2},
    ),
    "nemotron_h_omni": TypeSizes(
        config={
            "text_config.layers_block_type": ["linear_attention", "full_attention", "moe"],
            "text_config.mamba_num_heads": 8,
            "text_config.mamba_head_dim": 16,
            "text_config.ssm_state_size": 16,
            "text_config.n_groups": 2,
            "text_config.moe_shared_expert_intermediate_size": 128,
            "vision_hidden_size": 64,
            "vision_config.max_img_size": 224,
        },
        images={"min_num_patches": 16, "max_num_patches": 64},
    ),
    "molmo2": TypeSizes(
        config={
            "adapter_config.vision_feature_layer": [-1, -2],
            "vision_config.image_size": [56, 56],
            "vision_config.num_position_embeddings": 16,
        },
        images={"size": {"height": 56, "width": 56}, "overlap_margins": [1, 1], "max_crops": 4},
        ids={"image_patch_id": "<im_patch>"},
        bos="<|im_end|>",
    ),
    "muse_glimmer": TypeSizes(config={"out_hidden_size": 256, "text_config.layer_rope_theta": [10_000.0, 0]}),
    "muse_spark": TypeSizes(
        config={
            "out_hidden_size": 256,
            "text_config.layer_rope_theta": [10_000.0, 0],
            "text_config.moe_hidden_size": 32,
            "audio_config.num_hidden_layers": 4,
            "audio_config.hidden_sizes": [16, 16, 32, 32],
        },
    ),
    "ovis2": TypeSizes(
        tokens={"image_token": "<IMG_ATOM>"},
        image_text="<image>",
        plain=("<image>",),
        processor={"image_seq_length": 16},
    ),
    "paddleocr_vl": TypeSizes(config={"text_config.rope_parameters": _MROPE}, images=_QWEN_IMAGES),
    "paligemma": TypeSizes(config=_UNTIED, further_ids=1200, images={"image_seq_length": 16}, embedding_std=0.02),
    "qianfan_ocr": TypeSizes(processor={"image_seq_length": 4}),
    "qwen2_5_omni": TypeSizes(config={}),
    "qwen3_5": TypeSizes(
        config={
            "text_config.layer_types": _HYBRID,
            "text_config.rope_parameters": {**_MROPE, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]},
        },
        images=_QWEN_IMAGES,
    ),
    "qwen3_5_moe": TypeSizes(
        config={
            "text_config.layer_types": _HYBRID,
            "text_config.rope_parameters": {**_MROPE, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]},
        },
        images=_QWEN_IMAGES,
    ),
    "qwen3_vl_moe": TypeSizes(
        config={"text_config.rope_parameters": {**_MROPE, "mrope_interleaved": True}},
        images=_QWEN_IMAGES,
        image_processor="Qwen2VLImageProcessorPil",
    ),
    "qwen4_exp": TypeSizes(
        config={
            "text_config.layer_types": _HYBRID,
            "text_config.hc_lowrank": 16,
            "text_config.indexer_n_heads": 2,
            "text_config.indexer_kv_heads": 1,
            "text_config.indexer_head_dim": 16,
            "text_config.indexer_budget": 32,
            "text_config.indexer_compress_ratio": 4,
            "text_config.rope_parameters": {**_MROPE, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]},
        },
        images=_QWEN_IMAGES,
    ),
    "step3p7": TypeSizes(
        config={"text_config.sliding_window": 40},
        images={"size": {"height": 112, "width": 112}, "patch_size": 56},
        image_token="<im_patch>",
    ),
    "unlimited_ocr": TypeSizes(config={"vision_config.sam_config.downsample_channels": [32, 64]}),
    "vision-encoder-decoder": TypeSizes(
        start={"encoder": {"model_type": "vit"}, "decoder": {"model_type": "gpt2"}},
        config={"decoder.is_decoder": True, "decoder.add_cross_attention": True},
        processor_class="TrOCRProcessor",
        image_processor="ViTImageProcessorPil",
    ),
    "video_llava": TypeSizes(images={"size": {"shortest_edge": 56}, "crop_size": _SQUARE}),
    "vipllava": TypeSizes(
        config={"vision_feature_layers": [-1, -2]},
        images={"size": {"shortest_edge": 56}, "crop_size": _SQUARE},
        processor={"num_additional_image_tokens": 1, "patch_size": 14, "vision_feature_select_strategy": "default"},
    ),
    "fuyu": TypeSizes(
        config={"patch_size": 30},
        images={"size": {"height": 90, "width": 120}},
        plain=("|SPEAKER|", "|NEWLINE|", "<0x04>", "<0x00>", "<0x01>", "<0x02>", "<0x03>"),
        image_text="|SPEAKER|",
    ),
    "shieldgemma2": TypeSizes(
        image_text="<boi>",
        config={"mm_tokens_per_image": 4},
        processor={"image_seq_length": 4},
        model_class="ShieldGemma2ForImageClassification",
    ),
    "t5gemma2": TypeSizes(config={"encoder.mm_tokens_per_image": 4}, image_text="<boi>"),
    "mllama": TypeSizes(config={"text_config.cross_attention_layers": [1]}),
    "kosmos-2": TypeSizes(
        further_ids=40,
        processor={"num_patch_index_tokens": 8},
        processor_class="Kosmos2Processor",
        pad="!",  # the first id: positions begin behind it
        tokens={"unk_token": '"'},  # behind it are words, and some of these stand for an image
        chats=False,
    ),
    "kosmos-2.5": TypeSizes(
        config={"latent_query_num": 16},
        images={"max_patches": 64},
        processor={"num_image_tokens": 16},
        bos=None,  # its processor writes the token itself
        pad="!",
        tokens={"bos_token": "<s>", "boi_token": "<image>", "eoi_token": "</image>", "image_token": "<s>"},
        processor_class="Kosmos2_5Processor",
        image_processor="Kosmos2_5ImageProcessorPil",
        chats=False,
    ),
    "fun_asr_nano": TypeSizes(config={"adaptor_config.intermediate_size": 16}),
    "nemo_speechlm": TypeSizes(
        config={
            "audio_config.diarization_config.head_config.audio_hidden_size": 64,
            "audio_config.diarization_config.audio_config.num_key_value_heads": 4,
            "audio_config.asr_config.num_key_value_heads": 4,
            "word_timestamp_config.num_key_value_heads": 4,
            "word_timestamp_config.blank_token_id": 1,
        },
        audio={"feature_size": 128},
    ),
    "moss_transcribe_diarize": TypeSizes(
        config={"audio_config.max_source_positions": 100, "audio_config.num_mel_bins": 16, "audio_chunk_size": 32_000},
        audio={"chunk_length": 2, "feature_size": 16},
    ),
    "fast_vlm": TypeSizes(processor_class="LlavaProcessor", image_processor="CLIPImageProcessorPil"),
}
