"""Visual tokens of an image: the rules agree with transformers' own processors, and with the papers' figures."""

from __future__ import annotations

import random
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from trinity.costs import visual_tokens
from trinity.errors import ConfigError
from trinity.traces.synthetic import VisualTokenRule

NOISE = random.Random(5)
SIZES = [(NOISE.randint(8, 1400), NOISE.randint(8, 1400)) for _ in range(150)]
SIZES += [(NOISE.randint(60, 6000), NOISE.randint(60, 6000)) for _ in range(150)]
SIZES += [(each, each) for each in (28, 336, 448, 896, 1000)] + [(1, 150), (150, 1), (672, 336), (4000, 100)]
RULES: dict[str, VisualTokenRule] = {
    "fixed": visual_tokens.fixed_tokens,
    "anyres": visual_tokens.anyres_tokens,
    "smart_resize": visual_tokens.smart_resize_tokens,
    "tiles": visual_tokens.tile_tokens,
    "slices": visual_tokens.slice_tokens,
    "pan_and_scan": visual_tokens.pan_and_scan_tokens,
    "split": visual_tokens.split_tokens,
}


def check(rule: VisualTokenRule, theirs: VisualTokenRule, sizes: list[tuple[int, int]] = SIZES) -> None:
    wrong = [(size, rule(*size), theirs(*size)) for size in sizes if rule(*size) != theirs(*size)]
    assert not wrong, wrong[:3]


def test_llava_next_as_its_processor_counts() -> None:
    from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor

    processor: Any = SimpleNamespace(image_processor=SimpleNamespace(image_grid_pinpoints=GRIDS), patch_size=14)
    processor.num_additional_image_tokens = 1
    processor._get_unpadded_features = partial(LlavaNextProcessor._get_unpadded_features, processor)
    count = LlavaNextProcessor._get_number_of_features
    check(visual_tokens.anyres_tokens, lambda width, height: int(count(processor, height, width, 336, 336)) - 1)


GRIDS = [list(grid) for grid in visual_tokens.LLAVA_NEXT_GRIDS]


@pytest.mark.parametrize(("least", "most"), [(3136, 1_003_520), (100 * 784, 400 * 784), (3136, 10**9)])
def test_qwen2_vl_as_its_processor_resizes(least: int, most: int) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    def theirs(width: int, height: int) -> int:
        rows, columns = smart_resize(height, width, 28, min_pixels=least, max_pixels=most)
        return int(rows // 28 * (columns // 28))

    check(partial(visual_tokens.smart_resize_tokens, least=least, most=most), theirs)


@pytest.mark.parametrize(("fewest", "most"), [(1, 12), (1, 6), (2, 4), (1, 1)])
def test_internvl_as_its_processor_tiles(fewest: int, most: int) -> None:
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas

    def theirs(width: int, height: int) -> int:
        columns, rows = get_optimal_tiled_canvas((height, width), (448, 448), fewest, most)
        return int(256 * (columns * rows + (columns * rows > 1)))

    check(partial(visual_tokens.tile_tokens, fewest=fewest, most=most), theirs)


@pytest.mark.parametrize("most", [9, 4, 2])
def test_minicpm_v_as_its_processor_slices(most: int) -> None:
    from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import MiniCPMV4_6ImageProcessorPil

    nobody: Any = None

    def theirs(width: int, height: int) -> int:
        grid = MiniCPMV4_6ImageProcessorPil.get_sliced_grid(nobody, (height, width), most, 448)
        return 64 * (grid[0] * grid[1] + 1) if grid else 64

    check(partial(visual_tokens.slice_tokens, most=most), theirs)


@pytest.mark.parametrize("crops", [0, 4, 2])
def test_gemma_3_as_its_processor_pans_and_scans(crops: int) -> None:
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    nobody: Any = None

    def theirs(width: int, height: int) -> int:
        image = np.broadcast_to(np.uint8(0), (3, height, width))
        return 256 * (1 + len(Gemma3ImageProcessorPil.pan_and_scan(nobody, image, 256, crops, 1.2) if crops else []))

    check(partial(visual_tokens.pan_and_scan_tokens, crops=crops), theirs)


@pytest.mark.parametrize(("longest", "tile", "tokens"), [(1456, 364, 169), (1536, 384, 81), (2048, 512, 64)])
def test_idefics3_and_smolvlm_as_their_processor_splits(longest: int, tile: int, tokens: int) -> None:
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    settings: Any = SimpleNamespace(do_image_splitting=True)
    settings.max_image_size, settings.size = {"longest_edge": tile}, {"longest_edge": longest}

    def theirs(width: int, height: int) -> int:
        count, _, _ = SmolVLMImageProcessorPil.get_number_of_image_patches(settings, height, width)
        return tokens * max(1, int(count))

    check(partial(visual_tokens.split_tokens, longest=longest, tile=tile, tokens=tokens), theirs)


@pytest.mark.parametrize(
    ("width", "height", "next_tokens", "qwen_tokens"),
    [
        (1024, 768, 2340, 999),
        (768, 1024, 2352, 999),
        (1024, 683, 2144, 888),
        (1024, 1024, 2928, 1369),
        (640, 480, 2340, 391),
        (640, 427, 2144, 345),
        (480, 640, 2352, 391),
        (500, 375, 2340, 234),
        (300, 400, 1376, 154),
        (720, 1280, 1968, 1196),
        (1224, 1632, 2352, 2552),
    ],
)
def test_the_sizes_of_triinfers_datasets(width: int, height: int, next_tokens: int, qwen_tokens: int) -> None:
    assert visual_tokens.fixed_tokens(width, height) == 576
    assert visual_tokens.anyres_tokens(width, height) == next_tokens
    # These counts are without the limit that transformers' processor has by default.
    assert visual_tokens.smart_resize_tokens(width, height, most=10**9) == qwen_tokens


@pytest.mark.parametrize(
    ("width", "height", "tokens"), [(280, 280, 100), (560, 560, 400), (1280, 720, 1196), (1920, 1080, 2691)]
)
def test_the_features_that_epd_serve_sends(width: int, height: int, tokens: int) -> None:
    assert visual_tokens.smart_resize_tokens(width, height, most=10**9) == tokens  # EPD-Serve table 3


@pytest.mark.parametrize("name", RULES)
def test_an_image_has_pixels(name: str) -> None:
    assert RULES[name](100, 50) > 0
    for size in ((0, 5), (5, 0), (-1, 5)):
        with pytest.raises(ConfigError, match="at least 1 x 1"):
            RULES[name](*size)


def test_an_image_as_narrow_as_the_model_refuses() -> None:
    assert visual_tokens.smart_resize_tokens(5600, 28) == 200
    with pytest.raises(ConfigError, match="200 to 1"):
        visual_tokens.smart_resize_tokens(5628, 28)
