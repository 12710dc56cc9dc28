"""Bad requests and bad model directories: a typed error that names the request, the item and the way out."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.checkpoint_files import checkpoint
from trinity.errors import BadMedia, ConfigError, RequestError, RequestTooLarge, UnsupportedModel
from trinity.preprocess.media_limits import MediaLimits
from trinity.preprocess.processor import RequestProcessor
from trinity.request import Media, Request, Sampling

IMAGE = np.random.default_rng(0).integers(0, 255, (56, 56, 3), dtype=np.uint8)
USER_IMAGE = {"role": "user", "content": [{"type": "image"}]}


@pytest.fixture(scope="module")
def llava() -> Iterator[RequestProcessor]:
    processor = RequestProcessor(checkpoint("llava"))
    yield processor
    processor.close()


@pytest.fixture(scope="module")
def qwen() -> Iterator[RequestProcessor]:
    processor = RequestProcessor(checkpoint("qwen2_vl"))
    yield processor
    processor.close()


@pytest.fixture(scope="module")
def llama() -> Iterator[RequestProcessor]:
    processor = RequestProcessor(checkpoint("llama"))
    yield processor
    processor.close()


def refused(processor: RequestProcessor, error: type[RequestError], request: Request) -> str:
    """The message of the error, which is exactly of this type and names the request."""
    with pytest.raises(error) as caught:
        processor.process(request)
    assert type(caught.value) is error
    assert caught.value.request_id == request.request_id
    return str(caught.value)


@pytest.mark.parametrize(("markers", "images"), [(1, 0), (0, 1), (2, 1), (1, 3)])
def test_images_and_markers_must_be_equal_in_number(llava: RequestProcessor, markers: int, images: int) -> None:
    said = refused(llava, BadMedia, Request("<image>" * markers, images=[IMAGE] * images))
    assert f"{images} image item(s) given, but the prompt has {markers} <image> marker(s)" in said
    parts = [{"type": "image"}] * markers
    said = refused(llava, BadMedia, Request(messages=[{"role": "user", "content": parts}], images=[IMAGE] * images))
    assert f"{images} image item(s) given, but messages= has {markers} image part(s)" in said


def test_kinds_that_the_model_lacks(llava: RequestProcessor, llama: RequestProcessor) -> None:
    said = refused(llava, BadMedia, Request("<video>", media=[Media("video", b"")]))
    assert "'llava' takes no media of kind 'video' here; it takes image" in said
    assert "it takes text only" in refused(llama, BadMedia, Request("<image>", images=[IMAGE]))
    assert "0 video item(s) given, but the prompt has 1 <video> marker" in refused(
        llava, BadMedia, Request("<video> what?")
    )
    assert "0 image item(s) given, but the prompt has 1 <image> marker" in refused(
        llama, BadMedia, Request("<image> what?")
    )
    assert "has 1 image part(s)" in refused(llama, BadMedia, Request(messages=[USER_IMAGE]))


@pytest.mark.parametrize("token", ["<|image_pad|>", "<|video_pad|>"])
def test_placeholder_tokens_typed_by_a_user(qwen: RequestProcessor, token: str) -> None:
    request = Request(f"a {token} b <image>", images=[IMAGE])
    assert "write <image> in prompt=" in refused(qwen, BadMedia, request)
    text = {"type": "text", "text": token}
    for content in ([text, {"type": "image"}], [{"type": "image"}, text]):
        request = Request(messages=[{"role": "user", "content": content}], images=[IMAGE])
        assert repr(token) in refused(qwen, BadMedia, request)


def test_every_reserved_token_of_gemma(tmp_path: Path) -> None:
    gemma = RequestProcessor(checkpoint("gemma3"))
    for token in ("<start_of_image>", "<image_soft_token>"):
        assert repr(token) in refused(gemma, BadMedia, Request(f"{token}<image>", images=[IMAGE]))
    gemma.close()


def test_placeholder_in_messages_is_no_marker(llava: RequestProcessor, qwen: RequestProcessor) -> None:
    messages = [{"role": "user", "content": "What does <image> mean in HTML?"}]
    assert "'<image>'" in refused(llava, BadMedia, Request(messages=messages))
    assert qwen.process(Request(messages=messages)).work.media == ()  # plain text to a model with another placeholder


def test_a_placeholder_that_only_the_tokenizer_sees(llava: RequestProcessor, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = llava.tokenizer

    class Normalising:
        bos_token = inner.bos_token

        def __call__(self, text: str, **kwargs: Any) -> Any:
            return inner(text.replace("<IMAGE>", "<image>"), **kwargs)

    monkeypatch.setattr(llava._prompt_tokenizer, "_tokenizer", Normalising())
    said = refused(llava, BadMedia, Request("<IMAGE> <image>", images=[IMAGE]))
    assert "17 placeholder tokens for 16 visual tokens" in said


def test_the_bad_image_is_named(llava: RequestProcessor, tmp_path: Path) -> None:
    (tmp_path / "cut.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    images = [IMAGE, tmp_path / "cut.png", tmp_path / "none.png"]
    said = refused(llava, BadMedia, Request("<image><image><image>", images=images))
    assert said.startswith("image 2 of 3 (")
    assert "cut.png" in said
    said = refused(llava, BadMedia, Request("<image>", images=[b"text"]))
    assert said.startswith("image 1 of 1: is not an image")


def test_an_image_that_the_models_processor_refuses(qwen: RequestProcessor) -> None:
    said = refused(qwen, BadMedia, Request("<image>", images=[np.zeros((2, 800, 3), np.uint8)]))
    assert "image 1 of 1: has 800 x 2 pixels, which the model's processor refuses" in said
    assert "aspect ratio" in said


def test_limits() -> None:
    limits = MediaLimits(max_images=2, max_pixels=5000, max_prompt_tokens=40)
    tight = RequestProcessor(checkpoint("llava"), limits=limits)
    assert "limit max_images is 2" in refused(tight, BadMedia, Request("<image>" * 3, images=[IMAGE] * 3))
    large = np.zeros((100, 100, 3), np.uint8)
    assert "max_pixels allows 1 to 5000" in refused(tight, BadMedia, Request("<image>", images=[large]))
    assert "prompt limit 40" in refused(
        tight, RequestTooLarge, Request("<image>" * 2 + "word " * 8, images=[IMAGE] * 2)
    )
    assert len(tight.process(Request("<image>", images=[IMAGE])).work.prompt) <= 40
    tight.close()


def test_prompts_up_to_the_context(llama: RequestProcessor) -> None:
    room = llama.context_length - 1  # the first token is the tokenizer's own
    assert "must leave room" in refused(llama, RequestTooLarge, Request("<s>" * room))
    done = llama.process(Request("<s>" * (room - 1), max_tokens=5))
    assert (len(done.work.prompt), done.work.max_tokens, done.clipped) == (llama.context_length - 1, 1, True)
    done = llama.process(Request("<s>" * (room - 5), max_tokens=5))
    assert (done.work.max_tokens, done.clipped) == (5, False)


def test_visual_tokens_count_towards_the_context(llava: RequestProcessor) -> None:
    small = Request("<image>" * 60, images=[IMAGE] * 60)
    assert len(llava.process(small).work.prompt) == 961
    images = llava.context_length // 16
    roomy = RequestProcessor(checkpoint("llava"), limits=MediaLimits(max_images=1000))
    said = refused(roomy, RequestTooLarge, Request("<image>" * images, images=[IMAGE] * images))
    assert f"media have at least {16 * images} tokens" in said
    said = refused(
        roomy, RequestTooLarge, Request("<image>" * (images - 1) + "word " * 20, images=[IMAGE] * (images - 1))
    )
    assert f"{16 * (images - 1)} of them of media" in said
    roomy.close()


def test_endless_text_is_refused_before_it_is_tokenised(
    llama: RequestProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama._prompt_tokenizer, "_tokenizer", None)
    assert "far more than the limit of 2047 tokens" in refused(llama, RequestTooLarge, Request("a" * 3_000_000))


BAD_MESSAGES: dict[str, Any] = {
    "empty": [],
    "text": "hello",
    "strings": ["hello"],
    "no role": [{"content": "hello"}],
    "no content": [{"role": "user"}],
    "number": [{"role": "user", "content": 3}],
}


@pytest.mark.parametrize("name", BAD_MESSAGES)
def test_bad_messages(llava: RequestProcessor, name: str) -> None:
    refused(llava, RequestError, Request(messages=BAD_MESSAGES[name]))


@pytest.mark.parametrize(
    "part",
    [{"type": "picture", "url": "a.png"}, {"type": "file"}, {"type": "text"}, "hello", {"text": "hello"}, None],
)
def test_bad_parts(llava: RequestProcessor, part: Any) -> None:
    said = refused(llava, BadMedia, Request(messages=[{"role": "user", "content": [part]}]))
    assert "images= or media=" in said


@pytest.mark.parametrize("prompt", [b"bytes", 3, "lone \ud800 surrogate"])
def test_prompts_that_are_no_text(llama: RequestProcessor, prompt: Any) -> None:
    refused(llama, RequestError, Request(prompt))


@pytest.mark.parametrize(
    "request_", [Request("a", max_tokens=0), Request("a", sampling=Sampling(temperature=float("nan"))), Request()]
)
def test_fields_without_a_meaning(llama: RequestProcessor, request_: Request) -> None:
    refused(llama, RequestError, request_)


def broken(name: str, folder: Path, **files: str | None) -> Path:
    """A copy of a checkpoint without weights in which some files are replaced or (None) missing."""
    copy = folder / name
    shutil.copytree(checkpoint(name), copy, ignore=shutil.ignore_patterns("*.safetensors"))
    for stem, text in files.items():
        (path,) = copy.glob(f"{stem}.*")
        path.unlink() if text is None else path.write_text(text)
    return copy


def test_a_chat_template_is_needed_and_may_refuse(tmp_path: Path) -> None:
    without = RequestProcessor(broken("llama", tmp_path / "a", chat_template=None))
    hello = [{"role": "user", "content": "hello"}]
    assert "give prompt= instead" in refused(without, RequestError, Request(messages=hello))
    strict = RequestProcessor(
        broken("llama", tmp_path / "b", chat_template="{{ raise_exception('roles must alternate') }}")
    )
    assert "roles must alternate" in refused(strict, RequestError, Request(messages=hello))
    forgetful = RequestProcessor(broken("llava", tmp_path / "c", chat_template="USER:"))
    said = refused(forgetful, BadMedia, Request(messages=[USER_IMAGE], images=[IMAGE]))
    assert "1 image item(s) given, but the chat template wrote 0 image placeholder(s)" in said


def test_text_models_add_nothing_to_what_their_template_wrote(tmp_path: Path) -> None:
    bare = RequestProcessor(broken("llama", tmp_path, chat_template="{{ messages[0]['content'] }}"))
    ids = bare.tokenizer("hello", add_special_tokens=False)["input_ids"]
    assert list(bare.process(Request(messages=[{"role": "user", "content": "hello"}])).work.prompt) == ids


def test_missing_directories_and_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        RequestProcessor(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        RequestProcessor(tmp_path)
    with pytest.raises(ConfigError, match="not valid JSON"):
        RequestProcessor(broken("llama", tmp_path / "a", config="{"))
    with pytest.raises(ConfigError, match="tokenizer"):
        RequestProcessor(broken("llama", tmp_path / "b", tokenizer="{}"))
    with pytest.raises(ConfigError, match="cannot be loaded"):
        RequestProcessor(broken("llava", tmp_path / "c", preprocessor_config=None))


@pytest.mark.parametrize("model_type", ["not_a_model", "t5", "clip"])
def test_unknown_architectures_are_told_which_are_known(tmp_path: Path, model_type: str) -> None:
    directory = broken("llama", tmp_path, config=json.dumps({"model_type": model_type}))
    with pytest.raises(UnsupportedModel) as caught:
        RequestProcessor(directory)
    for word in ("llava", "qwen2_vl", "To add a model", "trinity.models"):
        assert word in str(caught.value)
