"""Sources of transformers and torch that were read: each computes what the kernels of its part compute.

A fingerprint stands for one source, however many classes have it; beside it are classes where it is found, as
``model:Class`` or ``module:Class``, and the release, if later ones differ. ``python tools/known_sources.py`` compares
the installed releases with this table, and decision 0039 says what to look for when a source is read again.
"""

from __future__ import annotations

from enum import Enum


class LayerPart(Enum):
    """Parts of a model that kernels stand in for, or that have to be known for it."""

    LINEAR = "a linear layer"
    RMS_NORM = "an RMS norm: x / sqrt(mean of squares + eps) * weight"
    GATED_MLP = "a gated MLP: down(act(gate(x)) * up(x))"
    SILU = "SiLU"
    QUICK_GELU = "x * sigmoid(1.702 x)"
    ROTARY = "a rotary embedding by halves"
    ATTENTION_FUNCTIONS = "the table of attention functions"
    SDPA = "attention through torch's scaled_dot_product_attention"
    LAYER_NORM = "a layer norm"
    CONVOLUTION = "a convolution"
    ACTIVATION = "an activation of each number by itself"
    DECODER_LAYER = "a decoder layer: norm, attention, sum, norm, MLP, sum"
    DECODER_ATTENTION = "attention: three projections, rotary embedding, attention function, output projection"
    SPLIT_LAYER = "a decoder layer that mixes rows in its attention alone"
    SPLIT_ATTENTION = "attention that mixes rows in its attention function alone"
    SPLIT_MODEL = "a text model that ends with its last layer and a norm of each row"
    ENCODER_LAYER = "an encoder layer: norm, attention, sum, norm, MLP, sum"
    ENCODER_ATTENTION = "attention of an encoder: three projections, attention function, output projection"
    ENCODER_MLP = "an MLP: fc2(activation(fc1(x)))"
    EACH_ROW = "a module that computes each row by itself"
    TOWER = "an encoder that runs its layers one after the other"
    IMAGE_FEATURES = "image features made of chosen hidden states"


# Parts of which one method's text alone was read: what else it calls is the same with kernels and without.
OUTLINES = {
    LayerPart.ATTENTION_FUNCTIONS: "get_interface",
    LayerPart.SDPA: "",
    LayerPart.SPLIT_MODEL: "forward",
    LayerPart.TOWER: "forward",
    LayerPart.IMAGE_FEATURES: "get_image_features",
}

KNOWN_SOURCES: dict[LayerPart, dict[str, str]] = {
    LayerPart.LINEAR: {
        "020378cd44034754": "torch.nn:Linear",
    },
    LayerPart.RMS_NORM: {
        "428c4facbef6c067": (
            "llama:LlamaRMSNorm mistral:MistralRMSNorm qwen2:Qwen2RMSNorm qwen3:Qwen3RMSNorm "
            "qwen2_vl:Qwen2VLRMSNorm qwen2_5_vl:Qwen2_5_VLRMSNorm qwen3_vl:Qwen3VLTextRMSNorm glm4:Glm4RMSNorm"
        ),
        "ce7a729f04c881ad": "olmo2:Olmo2RMSNorm gpt_oss:GptOssRMSNorm",
        "0a34208a1914625c": "helium:HeliumRMSNorm",
    },
    LayerPart.GATED_MLP: {
        "94ea6522824f5dc2": (
            "llama:LlamaMLP mistral:MistralMLP qwen2:Qwen2MLP qwen3:Qwen3MLP qwen3_vl:Qwen3VLTextMLP qwen2_vl:Qwen2MLP"
        ),
        "562597145d79208f": "qwen2_5_vl:Qwen2_5_VLMLP",
        "c9c6170054a27d53": "seed_oss:SeedOssMLP",
    },
    LayerPart.SILU: {
        "546604aeb634f664": "transformers.activations:SiLUActivation",
        "970f3d954142b440": "torch.nn:SiLU",
    },
    LayerPart.QUICK_GELU: {
        "579fc56b77e00763": "transformers.activations:QuickGELUActivation",
    },
    LayerPart.ROTARY: {
        "ed875c420f5513a5": (
            "llama:apply_rotary_pos_emb mistral:apply_rotary_pos_emb qwen2:apply_rotary_pos_emb "
            "qwen3:apply_rotary_pos_emb qwen2_vl:apply_rotary_pos_emb qwen2_5_vl:apply_rotary_pos_emb "
            "qwen3_vl:apply_rotary_pos_emb gemma3:apply_rotary_pos_emb"
        ),
        "fe21d6e6440df3bd": "olmo2:apply_rotary_pos_emb",
        "ef4625393e47300b": (
            "gpt_neox:apply_rotary_pos_emb glm4_moe:apply_rotary_pos_emb minimax_m2:apply_rotary_pos_emb"
        ),
        "d5d85bac1486fa09": "phi3:apply_rotary_pos_emb",
        "1d23ffa69a34bcf7": "persimmon:apply_rotary_pos_emb",
    },
    LayerPart.ATTENTION_FUNCTIONS: {
        "272012c2e25878cf": "transformers.modeling_utils:AttentionInterface",
        "fec99ab82a8f77bd": "transformers.modeling_utils:AttentionInterface (5.17)",
    },
    LayerPart.SDPA: {
        "e2e9241c0292f96b": "transformers.integrations.sdpa_attention:sdpa_attention_forward",
        "4e103cdc8161422b": "transformers.integrations.sdpa_attention:sdpa_attention_forward (5.17)",
    },
    LayerPart.LAYER_NORM: {
        "dfffe8aa1e1b5e47": "torch.nn:LayerNorm",
    },
    LayerPart.CONVOLUTION: {
        "927839fffe28f86e": "torch.nn:Conv2d",
    },
    LayerPart.ACTIVATION: {
        "9d2cd59fef99ca68": "transformers.activations:GELUActivation transformers.activations:GELUTanh",
        "4442e1788ccbefaa": "transformers.activations:NewGELUActivation",
        "49f7cf570c782cdb": "transformers.activations:FastGELUActivation",
        "579fc56b77e00763": "transformers.activations:QuickGELUActivation",
        "546604aeb634f664": "transformers.activations:SiLUActivation",
        "820ec9ca0721d7fe": "transformers.activations:ReLUSquaredActivation",
        "15ecd765e730fa5d": "torch.nn:GELU",
        "970f3d954142b440": "torch.nn:SiLU",
        "d5a70e574b5f3160": "torch.nn:ReLU",
        "5e1d1418e0467a84": "torch.nn:Tanh",
    },
    LayerPart.DECODER_LAYER: {
        "359ff49ebe7052cd": (
            "llama:LlamaDecoderLayer mistral:MistralDecoderLayer qwen2:Qwen2DecoderLayer qwen3:Qwen3DecoderLayer "
            "qwen2_vl:Qwen2VLDecoderLayer qwen2_5_vl:Qwen2_5_VLDecoderLayer seed_oss:SeedOssDecoderLayer "
            "smollm3:SmolLM3DecoderLayer cwm:CwmDecoderLayer ministral:MinistralDecoderLayer"
        ),
        "244e3d38f71ce22e": "qwen3_vl:Qwen3VLTextDecoderLayer",
    },
    LayerPart.DECODER_ATTENTION: {
        "436762c869aa4d69": "llama:LlamaAttention",
        "98729d960fd84023": "mistral:MistralAttention",
        "0cdac8534b0c74e0": "qwen2:Qwen2Attention cwm:CwmAttention ministral:MinistralAttention",
        "72d503022b5339df": "qwen2_vl:Qwen2VLAttention qwen2_5_vl:Qwen2_5_VLAttention",
        "4459c900289ef0b4": "seed_oss:SeedOssAttention",
        "2f632038ad0f3139": "smollm3:SmolLM3Attention",
    },
    LayerPart.SPLIT_LAYER: {
        "359ff49ebe7052cd": (
            "llama:LlamaDecoderLayer mistral:MistralDecoderLayer qwen2:Qwen2DecoderLayer qwen3:Qwen3DecoderLayer "
            "qwen2_vl:Qwen2VLDecoderLayer qwen2_5_vl:Qwen2_5_VLDecoderLayer"
        ),
        "244e3d38f71ce22e": "qwen3_vl:Qwen3VLTextDecoderLayer",
        "2ef31b7e9ff5cf72": "gemma3:Gemma3DecoderLayer",
    },
    LayerPart.SPLIT_ATTENTION: {
        "436762c869aa4d69": "llama:LlamaAttention",
        "98729d960fd84023": "mistral:MistralAttention",
        "0cdac8534b0c74e0": "qwen2:Qwen2Attention",
        "95e91a36a3ba610e": "qwen3:Qwen3Attention",
        "72d503022b5339df": "qwen2_vl:Qwen2VLAttention qwen2_5_vl:Qwen2_5_VLAttention",
        "a9fcb7c6f4b07901": "qwen3_vl:Qwen3VLTextAttention",
        "51e9828ff148aaed": "gemma3:Gemma3Attention",
    },
    LayerPart.SPLIT_MODEL: {
        "fa34b930652e63fd": "llama:LlamaModel",
        "fd271e2084fbc82b": "mistral:MistralModel",
        "70a0333f5e8df4bc": "qwen2:Qwen2Model qwen3:Qwen3Model",
        "5ae92d9f5d5d1845": "gemma3:Gemma3TextModel",
        "3bd469871029e8bf": "qwen2_vl:Qwen2VLTextModel qwen2_5_vl:Qwen2_5_VLTextModel",
        "d50085e28bd5c4fa": "qwen3_vl:Qwen3VLTextModel",
    },
    LayerPart.ENCODER_LAYER: {
        "d57047fad4ea7692": "clip:CLIPEncoderLayer",
        "5f97a2019291e4d1": (
            "siglip:SiglipEncoderLayer idefics3:Idefics3EncoderLayer smolvlm:SmolVLMEncoderLayer "
            "minicpmv4_6:MiniCPMV4_6VisionEncoderLayer"
        ),
    },
    LayerPart.ENCODER_ATTENTION: {
        "ecb399803c11139d": "clip:CLIPAttention",
        "33d63a46b573a85e": "siglip:SiglipAttention idefics3:Idefics3VisionAttention smolvlm:SmolVLMVisionAttention",
    },
    LayerPart.ENCODER_MLP: {
        "8febbefbd720da53": "clip:CLIPMLP siglip:SiglipMLP idefics3:Idefics3VisionMLP smolvlm:SmolVLMVisionMLP",
    },
    LayerPart.TOWER: {
        "87e63da059fdbd2a": "clip:CLIPVisionModel",
        "0cb37a624031003c": "clip:CLIPEncoder",
        "218c6935c7c98b43": "siglip:SiglipVisionModel",
        "6197dd98c6f82b58": "siglip:SiglipEncoder",
    },
    LayerPart.IMAGE_FEATURES: {
        "362121dac672308c": "llava:LlavaModel",
        "2960239c122c6917": "llava_next:LlavaNextModel",
        "188f5d1139230d7a": "llava_onevision:LlavaOnevisionModel",
        "6958e6d9c051d44a": "llava:LlavaModel (5.17)",
        "fdebb3b87184dabd": "llava_next:LlavaNextModel (5.17)",
        "d5be316095f203bb": "llava_onevision:LlavaOnevisionModel (5.17)",
    },
}

# Norms that round to the type of their rows once, behind the weight; the others round before it as well.
NORMS_ROUNDED_ONCE = {"ce7a729f04c881ad", "0a34208a1914625c"}

# Within a split layer, all but attention; Gemma's norms and MLPs have no kernel, but are known as well.
KNOWN_SOURCES[LayerPart.EACH_ROW] = {
    **KNOWN_SOURCES[LayerPart.LINEAR],
    **KNOWN_SOURCES[LayerPart.RMS_NORM],
    **KNOWN_SOURCES[LayerPart.GATED_MLP],
    **KNOWN_SOURCES[LayerPart.ACTIVATION],
    "421d89512befd1e8": "gemma3:Gemma3RMSNorm",
}
