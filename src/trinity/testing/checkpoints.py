"""Small random checkpoints of real architectures, built offline: for tests, demos, benchmarks.

Weights are scaled (std 1.6/sqrt(fan in), embeddings 0.5) so that greedy output is diverse and depends on the image.
No special token is ever the greedy choice, so that outputs end by length unless a test wants otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trinity.errors import UnknownName

if TYPE_CHECKING:
    from trinity.testing.checkpoints_recipes import Recipe

ARCHITECTURES: tuple[str, ...] = (
    "llava",
    "llava_next",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "internvl",
    "llava_onevision",
    "smolvlm",
    "idefics3",
    "gemma3",
    "minicpmv4_6",
    "llama",
    "mistral",
)
VIDEO_ARCHITECTURES: tuple[str, ...] = ("llava_next_video", "video_llama_3")
"""Further types, which the tests of videos serve with images and videos."""
AUDIO_ARCHITECTURES: tuple[str, ...] = (
    "qwen2_audio",
    "audioflamingo3",
    "glmasr",
    "qwen3_asr",
    "qwen2_5_omni_thinker",
    "qwen3_omni_moe_thinker",
)
"""Further types, which the tests of audio serve with clips."""
MIDSIZE_CHECKPOINTS: tuple[str, ...] = ("llava-110m", "llava-500m", "llama-512x8")


def build_checkpoint(name: str, directory: Path, *, seed: int = 0) -> Path:
    """Write the tiny checkpoint ``name``, about 1 MB in float32, into ``directory``.

    ``name``: one of ``ARCHITECTURES``, ``VIDEO_ARCHITECTURES`` or ``AUDIO_ARCHITECTURES``.

    It holds safetensors, config, tokenizer, chat template and, for multimodal ones, the image processor's files, all in
    transformers' own layout. The same seed gives the same weights. Raises ``UnknownName``.
    """
    known = (*ARCHITECTURES, *VIDEO_ARCHITECTURES, *AUDIO_ARCHITECTURES)
    if name not in known:
        raise UnknownName("tiny checkpoint", name, known)
    return write_checkpoint(_recipe(name), Path(directory), seed)


def build_midsize(name: str, directory: Path, *, seed: int = 0) -> Path:
    """Write a mid-size checkpoint (one of ``MIDSIZE_CHECKPOINTS``) for benchmarks and memory measurements.

    "llava-110m": 12 x 384 ViT at 336 px (576 visual tokens) and a 12 x 768 LM with 12 heads over 3 KV heads;
    "llava-500m": 12 x 768 ViT at 336 px and a 22 x 1280 LM with 20 heads over 5 KV heads;
    "llama-512x8": text only, 512 wide, 8 layers, 8 heads over 2 KV heads. Raises ``UnknownName``.
    """
    if name not in MIDSIZE_CHECKPOINTS:
        raise UnknownName("mid-size checkpoint", name, MIDSIZE_CHECKPOINTS)
    return write_checkpoint(_recipe(name), Path(directory), seed)


def _recipe(name: str) -> Recipe:
    from trinity.testing import checkpoints_audio, checkpoints_qwen, checkpoints_recipes, checkpoints_tiles
    from trinity.testing import checkpoints_llava as llava

    function = name.replace("-", "_")
    for module in (checkpoints_recipes, llava, checkpoints_qwen, checkpoints_tiles, checkpoints_audio):
        if hasattr(module, function):
            recipe: Recipe = getattr(module, function)()
            return recipe
    raise AssertionError(f"no recipe is written for {name}")


def write_checkpoint(recipe: Recipe, directory: Path, seed: int) -> Path:
    """Write the checkpoint of a recipe in float32 into ``directory``, which is made; returns it."""
    import torch

    directory.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = recipe.model_class(recipe.config).float().eval()
        _scale_weights(model, recipe, torch.Generator().manual_seed(seed))
    if model.can_generate():
        _silence(model, recipe.tokenizer)
        model.generation_config.eos_token_id = recipe.tokenizer.eos_token_id
        model.generation_config.pad_token_id = recipe.tokenizer.pad_token_id
    with no_progress_bar():
        model.save_pretrained(directory)
    recipe.save_processor(directory)
    return directory


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """Keep transformers from drawing progress bars in the block."""
    from transformers.utils import logging as transformers_logging

    logging: Any = transformers_logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _scale_weights(model: Any, recipe: Recipe, generator: Any) -> None:
    import torch

    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if id(parameter) in embeddings:
                parameter.copy_(noise * recipe.embedding_std)
            elif parameter.ndim >= 2:
                parameter.copy_(noise * 1.6 / _count_inputs(name, parameter) ** 0.5)
            else:
                parameter.add_(noise * 0.1)
                parameter.add_(sum(gain for suffix, gain in recipe.raised.items() if name.endswith(suffix)))


def _count_inputs(name: str, parameter: Any) -> int:
    """Count the inputs of an output: experts lie behind each other, [experts, outputs, inputs] or turned."""
    shape = parameter.shape
    return int(min(shape[1:]) if "experts" in name and len(shape) == 3 else parameter.numel() // shape[0])


def _silence(model: Any, tokenizer: Any) -> None:
    """Give special tokens and unused rows a logit of 0, which the largest of many random logits exceeds."""
    import torch

    from trinity.stages.models.base import find_head

    found = find_head(model)
    if found is None:  # refused as it is loaded
        return
    with torch.no_grad():
        head = found.weight
        head[list(tokenizer.added_tokens_decoder)] = 0.0
        head[len(tokenizer) :] = 0.0
