"""A processor that takes clips in chats alone is given a text and clips, by what its tekken.json says of audio."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.any_model.media_checkpoint import multimodal_types
from support.any_model.tekken import TEKKEN_AUDIO, write_tekken
from support.checkpoint_files import checkpoint
from support.sounds import clip
from trinity.errors import UnsupportedModel
from trinity.preprocess.text.clip_windows import ClipWindows, hears_in_chats_alone, take_text_too

PLAIN = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


class Chats:
    """Has the parts of a processor that takes clips in chats alone."""

    def __init__(self, tokenizer: Any, feature_extractor: Any) -> None:
        self.tokenizer, self.feature_extractor, self.audio_token = tokenizer, feature_extractor, "[AUDIO]"

    def apply_chat_template(self, chat: Any) -> Any:
        raise AssertionError("no chat is written here")

    def __call__(self, text: Any) -> Any:
        raise AssertionError("no text is read here")


def make(directory: Path, template: str = PLAIN, **audio: Any) -> Chats:
    from transformers import WhisperFeatureExtractor
    from transformers.integrations.mistral import convert_tekken_tokenizer

    untyped: Any = WhisperFeatureExtractor
    file = write_tekken(directory, {**copy.deepcopy(TEKKEN_AUDIO), **audio})
    convert: Any = convert_tekken_tokenizer
    return Chats(convert(str(file), chat_template=template), untyped(feature_size=16))


@pytest.mark.parametrize(
    ("audio", "tokens"),
    [({}, [375, 375, 750]), ({"frame_rate": 2.5}, [75, 75, 150]), ({"chunk_length_s": 10.0}, [125, 375, 500])],
)
def test_tokens_and_windows_are_of_what_the_file_says(tmp_path: Path, audio: dict[str, Any], tokens: list[int]) -> None:
    made = take_text_too(make(tmp_path, **audio), tmp_path)
    number = made.tokenizer.convert_tokens_to_ids("[AUDIO]")
    for seconds, count in zip((0.4, 30.0, 30.1), tokens, strict=True):
        found = made(text="[AUDIO]", audio=[clip(1, seconds)], sampling_rate=16000)
        ids = found["input_ids"][0].tolist()
        assert ids == [made.tokenizer.convert_tokens_to_ids("[BEGIN_AUDIO]"), *[number] * count]
        frames = int(100 * audio.get("chunk_length_s", 30.0))
        assert found["input_features"].shape == (count // tokens[0], 16, frames)


def test_clips_stand_where_their_placeholders_do(tmp_path: Path) -> None:
    made = take_text_too(make(tmp_path), tmp_path)
    both = made(text=["a[AUDIO] the[AUDIO]"], audio=[clip(1), clip(2, 31.0)], sampling_rate=16000)
    words = made.tokenizer.convert_ids_to_tokens(both["input_ids"][0].tolist())
    assert [words[0], words[377]] == ["a", "Ġthe"]
    assert words.count("[AUDIO]") == 3 * 375
    assert both["input_features"].shape[0] == 3
    with pytest.raises(ValueError, match="1 placeholders for 2 clips"):
        made(text="[AUDIO]", audio=[clip(1), clip(2)], sampling_rate=16000)


def test_loud_parts_of_a_clip_count_in_all_its_windows(tmp_path: Path) -> None:
    """A window's spectrum is cut at what is far below the loudest of the whole clip."""
    made = take_text_too(make(tmp_path), tmp_path)
    quiet = 1e-3 * clip(1, 30.0)
    pair = made(text="[AUDIO]", audio=[np.concatenate([quiet, clip(2, 30.0)])], sampling_rate=16000)["input_features"]
    alone = made(text="[AUDIO]", audio=[quiet], sampling_rate=16000)["input_features"]
    assert float((pair[0] - alone[0]).abs().max()) > 0.1


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"frame_rate": 0}, "above 0"),
        ({"frame_rate": 16001.0}, "a frame of samples in each token"),
        ({"chunk_length_s": None}, "does not say how"),
        ({"chunk_length_s": 30.001}, "has windows of 30.001 s .* takes 480000 samples"),
        ({"chunk_length_s": 1e300}, "has windows of 1e[+]300 s"),
        ({"audio_encoding_config": {}}, "does not say how"),
    ],
)
def test_a_file_that_says_nothing_of_use_is_refused(tmp_path: Path, change: dict[str, Any], problem: str) -> None:
    made = make(tmp_path)
    write_tekken(tmp_path, {**TEKKEN_AUDIO, **change})
    with pytest.raises(UnsupportedModel, match=problem):
        take_text_too(made, tmp_path)


def test_a_checkpoint_without_the_file_or_its_audio_is_refused(tmp_path: Path) -> None:
    made = make(tmp_path)
    content = json.loads((tmp_path / "tekken.json").read_text())
    del content["audio"]
    (tmp_path / "tekken.json").write_text(json.dumps(content))
    with pytest.raises(UnsupportedModel, match="does not say how they become tokens"):
        take_text_too(made, tmp_path)
    (tmp_path / "tekken.json").unlink()
    with pytest.raises(UnsupportedModel, match=r"Chats takes clips in chats alone, and .* has no tekken.json"):
        take_text_too(made, tmp_path)


def test_what_takes_clips_beside_a_text_stays_as_it_is(tmp_path: Path) -> None:
    class Both(Chats):
        def __call__(self, text: Any, audio: Any = None) -> Any:
            raise AssertionError("no text is read here")

    made = make(tmp_path)
    both = Both(made.tokenizer, made.feature_extractor)
    assert take_text_too(both, tmp_path) is both
    assert isinstance(take_text_too(made, tmp_path), ClipWindows)


def test_of_the_types_of_transformers_it_is_one() -> None:
    found = []
    for name in multimodal_types():
        kind = find_kind(name)
        if kind is not None:
            made = kind.__new__(kind)
            for part in kind.get_attributes():
                setattr(made, part, None)
            found += [name] * hears_in_chats_alone(made)
    assert found == ["voxtral"]


def find_kind(model_type: str) -> Any:
    """The class of a type's processor; None if it has none, or none without a library that is not here."""
    from transformers.models.auto import processing_auto

    from trinity.preprocess.loader import find_processor_class

    names: Any = processing_auto.PROCESSOR_MAPPING_NAMES
    try:
        return find_processor_class(names[model_type]) if names.get(model_type) else None
    except ImportError:  # Voxtral Realtime's, without mistral-common
        return None


WITHOUT = """
import importlib.util, sys
own = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "mistral_common" else own(name, *rest)
import trinity.preprocess.checkpoint.libraries as libraries
libraries.version = lambda name: "" if name == "mistral-common" else "1"
from pathlib import Path
from trinity.errors import UnsupportedModel
from trinity.preprocess.checkpoint.verdicts import MediaFacts, on_trial
from trinity.preprocess.loader import load_tokenizer_and_processor
from trinity.stages.proof import prove
given = Path(sys.argv[1])
try:
    with on_trial(given, MediaFacts(audio_token="[AUDIO]", audio_token_id=24)):
        load_tokenizer_and_processor(given)
except UnsupportedModel as error:
    print(" ".join(str(error).split()))
(given / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
print(" ".join(prove(given).failed.said.split()))
"""


@pytest.mark.slow
def test_without_mistral_common_load_and_proof_say_what_to_install(tmp_path: Path) -> None:
    """With a chat template beside the file, the load needs it no more, and the proof does."""
    pytest.importorskip("mistral_common")  # to build the checkpoint
    directory = shutil.copytree(checkpoint("any-voxtral"), tmp_path / "model")
    command = [sys.executable, "-c", WITHOUT, str(directory)]
    environment = {"TRINITY_CACHE": str(tmp_path), "PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=True)
    for said in done.stdout.strip().splitlines()[-2:]:
        assert "pip install mistral-common soundfile" in said
        assert "pip install --no-deps mistral-common" in said
