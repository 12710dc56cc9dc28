"""Prompts and pixels of InternVL as published are the original's; folders that lack something are refused in words."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from support.internvl_answers import ANSWERS, digest
from support.internvl_chats import copy_published, needs_sentencepiece, picture, published, requests
from support.internvl_folders import PUBLISHED, SIDE
from support.internvl_tokenizers import write_sentencepiece
from trinity.errors import BadMedia, ConfigError, RequestError, UnsupportedModel
from trinity.preprocess.checkpoint import internvl_format
from trinity.preprocess.checkpoint.config_file import read_config
from trinity.preprocess.processor import RequestProcessor
from trinity.request import Media, Request

MEAN, DEVIATION = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])


def cut(image: Image.Image, most: int) -> np.ndarray[Any, Any]:
    """Cut an image as the original's documents say: the grid of tiles next to its shape, and a thumbnail behind."""
    shape, best = image.width / image.height, (1, 1)
    grids = [(x, y) for x in range(1, most + 1) for y in range(1, most + 1) if x * y <= most]
    for x, y in sorted(grids, key=lambda grid: grid[0] * grid[1]):
        nearer = abs(shape - x / y) - abs(shape - best[0] / best[1])
        if nearer < 0 or (nearer == 0 and image.width * image.height > 0.5 * SIDE * SIDE * x * y):
            best = (x, y)
    whole = np.asarray(image.resize((best[0] * SIDE, best[1] * SIDE), Image.Resampling.BICUBIC))
    tiles = [
        whole[y * SIDE : (y + 1) * SIDE, x * SIDE : (x + 1) * SIDE] for y in range(best[1]) for x in range(best[0])
    ]
    tiles += [np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BICUBIC))] * (len(tiles) > 1)
    return ((np.stack(tiles) / 255 - MEAN) / DEVIATION).transpose(0, 3, 1, 2)


@pytest.fixture
def opened() -> Any:
    """Open processors, which are closed at the end."""
    made: list[RequestProcessor] = []

    def open_one(folder: Path, **options: Any) -> RequestProcessor:
        made.append(RequestProcessor(folder, **options))
        return made[-1]

    yield open_one
    for each in made:
        each.close()


@pytest.mark.parametrize("name", PUBLISHED)
def test_prompts_and_tiles_are_those_of_the_original(name: str, opened: Callable[..., RequestProcessor]) -> None:
    needs_sentencepiece()
    processor = opened(published(name))
    for request in requests():
        found, wanted = processor.process(request), ANSWERS[name][str(request.request_id)]
        assert (len(found.work.prompt), digest(found.work.prompt)) == wanted.prompt, request.request_id
        assert tuple(len(each["pixel_values"]) for each in found.inputs) == wanted.tiles
    assert processor.media_kinds == {"image"}


@pytest.mark.parametrize("name", ["small", "large"])
def test_pixels_of_any_size_are_those_of_the_original(name: str, opened: Callable[..., RequestProcessor]) -> None:
    needs_sentencepiece()
    processor, most = opened(published(name)), {"small": 4, "large": 6}[name]
    sizes = random.Random(name)
    drawn = [(sizes.randint(8, 400), sizes.randint(8, 400)) for _ in range(20)]
    for number, (width, height) in enumerate([(1, 9), (112, 112), (56, 112), (79, 79), (80, 80), *drawn]):
        image = picture(width, height, number)
        made = processor.process(Request("<image>", images=[image], max_tokens=1)).inputs[0]["pixel_values"]
        wanted = cut(image, most)
        assert made.shape == wanted.shape, (width, height)
        assert np.abs(made.numpy() - wanted).max() < 1e-5, (width, height)


@pytest.mark.parametrize("tiles", [True, False])
def test_a_colour_that_a_file_calls_transparent_stays(
    tiles: bool, tmp_path: Path, opened: Callable[..., RequestProcessor]
) -> None:
    """The original's ``load_image`` takes colours as they are, and so does ``transparency="drop"``."""
    folder = change(copy_published("qwen", tmp_path), dynamic_image_size=tiles)
    processor = opened(folder, transparency="drop")
    palette = picture(90, 40, 5).convert("P")
    path = tmp_path / "palette.png"
    palette.save(path, transparency=palette.getpixel((7, 7)))
    plain, marked = palette.convert("RGB"), Image.open(path)
    found = [processor.process(Request("<image>", images=[each], max_tokens=1)).inputs[0] for each in (plain, marked)]
    assert np.array_equal(found[0]["pixel_values"], found[1]["pixel_values"])
    assert np.abs(found[1]["pixel_values"].numpy() - cut(plain, 4 if tiles else 1)).max() < 1e-5


def test_an_image_is_one_tile_where_the_config_says_so(tmp_path: Path, opened: Callable[..., RequestProcessor]) -> None:
    processor = opened(change(copy_published("qwen", tmp_path), dynamic_image_size=False, use_thumbnail=False))
    made = processor.process(Request("<image>", images=[picture(200, 60, 1)], max_tokens=1))
    assert made.inputs[0]["pixel_values"].shape == (1, 3, SIDE, SIDE)


def test_an_output_ends_at_the_end_of_a_turn_alone(opened: Callable[..., RequestProcessor]) -> None:
    """So does the original, whatever generation_config.json and the text model's config say."""
    processor = opened(published("qwen"))
    assert processor.eos_ids == {processor.tokenizer.convert_tokens_to_ids("<|im_end|>")}


def test_a_system_message_takes_the_place_of_the_checkpoints(opened: Callable[..., RequestProcessor]) -> None:
    processor = opened(published("qwen"))
    chat = [{"role": "system", "content": "Own words."}, {"role": "user", "content": "x"}]
    text = processor.tokenizer.decode(processor.process(Request(messages=chat, max_tokens=1)).work.prompt)
    assert text == "<|im_start|>system\nOwn words.<|im_end|>\n<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"


def test_one_in_the_config_goes_before_the_templates(tmp_path: Path, opened: Callable[..., RequestProcessor]) -> None:
    processor = opened(change(copy_published("qwen", tmp_path), system_message="Of the config."))
    chat = [{"role": "user", "content": "x"}]
    text = processor.tokenizer.decode(processor.process(Request(messages=chat, max_tokens=1)).work.prompt)
    assert text.startswith("<|im_start|>system\nOf the config.<|im_end|>\n")
    none = opened(change(tmp_path / "qwen", system_message=None))  # as InternVL3 is published
    text = none.tokenizer.decode(none.process(Request(messages=chat, max_tokens=1)).work.prompt)
    assert text.startswith("<|im_start|>system\nShort lines.<|im_end|>\n")


def test_videos_and_roles_of_tools_are_refused(opened: Callable[..., RequestProcessor]) -> None:
    processor = opened(published("qwen"))
    frames = np.zeros((2, 20, 20, 3), np.uint8)
    with pytest.raises(BadMedia, match="video"):
        processor.process(Request("<video>", media=[Media("video", frames)], max_tokens=1))
    with pytest.raises(RequestError, match="roles are user and assistant"):
        processor.process(Request(messages=[{"role": "tool", "content": "x"}], max_tokens=1))


def test_no_code_is_run_and_nothing_is_written(tmp_path: Path, opened: Callable[..., RequestProcessor]) -> None:
    folder = copy_published("qwen", tmp_path)
    for name in ("configuration_internvl_chat", "modeling_internvl_chat", "tokenization_internlm2"):
        (folder / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    before = {path.name: (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.iterdir()}
    opened(folder).process(Request("<image>", images=[picture(60, 60, 0)], max_tokens=1))
    assert {path.name: (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.iterdir()} == before
    assert not (tmp_path / "ran").exists()


def change(folder: Path, file: str = "config.json", **fields: Any) -> Path:
    """Set fields of a file of JSON."""
    content = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps({**content, **fields}))
    return folder


def without(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).unlink()
    return folder


BROKEN: dict[str, tuple[Callable[[Path], object], type[ConfigError], str]] = {
    "chats": (lambda at: without(at, "conversation.py"), ConfigError, r"no conversation\.py.*never run"),
    "template": (lambda at: change(at, template="none"), ConfigError, "0 templates of the name 'none'"),
    "no template": (lambda at: change(at, template=None), ConfigError, "names no chat template"),
    "ids": (
        lambda at: without(at, "tokenizer_config.json", "added_tokens.json"),
        ConfigError,
        "no token '<IMG_CONTEXT>'",
    ),
    "vocabulary": (lambda at: change(at, llm_config=shrunk(at)), ConfigError, "among the 300 of the model"),
    "class": (lambda at: renamed(at, "Own"), UnsupportedModel, "class 'Own'"),
    "no class": (lambda at: renamed(at, []), UnsupportedModel, r"class \[\]"),
    "no model": (
        lambda at: change(at, "tokenizer_config.json", tokenizer_class="InternLM2Tokenizer"),
        ConfigError,
        "no tokenizer.model",
    ),
    "words": (lambda at: without(at, "vocab.json", "merges.txt"), ConfigError, "tokenizer"),
    "config": (lambda at: change(at, llm_config=0), ConfigError, "llm_config"),
    "counts": (lambda at: change(at, llm_config=shrunk(at, hidden_size=0)), ConfigError, "hidden_size"),
    "strings": (lambda at: change(at, llm_config=shrunk(at, rms_norm_eps="x")), ConfigError, "once it is converted"),
    "style": (lambda at: change(at, template="other"), UnsupportedModel, "ADD_COLON_TWO"),
    "shuffle": (lambda at: change(at, ps_version="v1"), UnsupportedModel, "ps_version"),
}


def renamed(folder: Path, tokenizer: Any) -> Path:
    return change(folder, "tokenizer_config.json", tokenizer_class=tokenizer)


def shrunk(folder: Path, **fields: Any) -> dict[str, Any]:
    found = json.loads((folder / "config.json").read_text())["llm_config"]
    return {**found, **(fields or {"vocab_size": 300})}


@pytest.mark.parametrize("name", BROKEN)
def test_a_folder_that_lacks_something_says_what(name: str, tmp_path: Path) -> None:
    alter, error, said = BROKEN[name]
    folder = copy_published("qwen", tmp_path)
    alter(folder)
    with pytest.raises(error, match=said):
        RequestProcessor(folder)


def test_a_model_of_sentencepiece_that_rewrites_texts_is_refused(tmp_path: Path) -> None:
    needs_sentencepiece()
    folder = copy_published("small", tmp_path)
    write_sentencepiece(folder, prefix=True)
    with pytest.raises(UnsupportedModel, match="makes other tokens of 'a b'"):
        RequestProcessor(folder)


def test_older_files_name_their_tokens_elsewhere(tmp_path: Path, opened: Callable[..., RequestProcessor]) -> None:
    needs_sentencepiece()
    folder = copy_published("small", tmp_path)
    write_sentencepiece(folder, added=False)
    processor = opened(folder)
    for request in requests():
        found, wanted = processor.process(request), ANSWERS["small"][str(request.request_id)]
        assert digest(found.work.prompt) == wanted.prompt[1]


def test_a_llamas_tokenizer_of_the_older_manner_splits_texts_alike(
    tmp_path: Path, opened: Callable[..., RequestProcessor]
) -> None:
    needs_sentencepiece()
    folder = renamed(copy_published("small", tmp_path), "LlamaTokenizer")
    processor = opened(folder)
    for request in requests():
        found, wanted = processor.process(request), ANSWERS["small"][str(request.request_id)]
        assert digest(found.work.prompt) == wanted.prompt[1]
    with pytest.raises(UnsupportedModel, match="says legacy=false"):
        RequestProcessor(change(folder, "tokenizer_config.json", legacy=False))


def test_what_reads_sentencepiece_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    needs_sentencepiece()
    folder = copy_published("small", tmp_path)
    monkeypatch.setattr(internvl_format, "_is_here", lambda module: module != "sentencepiece")
    with pytest.raises(ConfigError, match="with sentencepiece, not installed here: pip install sentencepiece"):
        RequestProcessor(folder)


def test_the_config_names_the_tokens_of_its_tokenizer() -> None:
    config = read_config(published("qwen"))
    added = json.loads((published("qwen") / "added_tokens.json").read_text())
    assert config.model_type == "internvl"
    assert config.image_token_id == added["<IMG_CONTEXT>"]
    assert config.get_text_config().eos_token_id == added["<|im_end|>"]
