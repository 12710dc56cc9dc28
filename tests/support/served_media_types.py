"""Multimodal types of transformers 5.23 that serve with images: tests/e2e builds, serves and compares each of them.

A type that comes to serve enters by its name alone; a test holds the lists equal to what docs/models.md has.
"""

_NAMES = """
aria aya_vision cohere2_vision cohere_compass cosmos3_edge cosmos3_omni deepseek_ocr2 deepseek_vl deepseek_vl_hybrid
ernie4_5_vl_moe exaone4_5 gemma3 glm46v glm4v glm4v_moe glm_ocr glmga granite4_vision granite_docling hunyuan_vl
hyperclovax_vision_v2 idefics2 idefics3 internvl janus lfm2_vl lfm3_vl lighton_ocr llava llava_next llava_next_video
llava_onevision minicpm_ocr minicpmv4_6 minicpmv4_7 minimax_m3_vl mistral3 mistral_large4 molmo2 nemotron_h_omni ovis2
paddleocr_vl qianfan_ocr qwen2_5_vl qwen2_vl qwen3_5 qwen3_5_moe qwen3_vl qwen3_vl_moe smolvlm video_llama_3
video_llava vipllava
"""
IN_FRONT = ("blip-2", "instructblip", "kosmos-2", "kosmos-2.5")  # one image, in front of a plain text
WITHOUT_CHATS = ("chameleon", "phi4_multimodal")  # their processors take no template
ALONE = ("emu3", "phi4_multimodal")  # one image a prompt: beside others it becomes something else
SERVED_MEDIA_TYPES = tuple(dict.fromkeys((*_NAMES.split(), *IN_FRONT, *WITHOUT_CHATS, *ALONE)))
# They serve by their proof, some in tests of their own; the matrix has not been run on them (it asks chats).
_OTHERS = """
gemma4 gemma4_unified got_ocr2 kimi_k25 llama4 muse_glimmer muse_spark paligemma pp_chart2table qwen2_5_omni
qwen2_5_omni_thinker qwen3_omni_moe qwen3_omni_moe_thinker step3p7
"""
OUTSIDE_OF_THE_MATRIX = tuple(_OTHERS.split())
