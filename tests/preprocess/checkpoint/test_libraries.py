"""Libraries that processors ask for: which types do, and what somebody without them is told."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers

from support.any_model.media_checkpoint import multimodal_types
from support.checkpoint_files import checkpoint
from trinity.preprocess.checkpoint.libraries import explain_library, library_version
from trinity.preprocess.media import audio_kind
from trinity.preprocess.processor import RequestProcessor

BY_TORCHAUDIO = {"fun_asr_nano", "granite_speech", "granite_speech_plus"}  # those that tests/e2e serves


def test_an_installed_library_has_a_version_and_another_none() -> None:
    assert library_version("torch").startswith("2.")
    assert library_version("no-such-distribution") == ""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ImportError("X requires the torchaudio library but it was not found"), "install torchaudio in a build for"),
        (
            OSError("Could not load this library: /a/torchaudio/lib/_torchaudio.abi3.so"),
            "install torchaudio in a build",
        ),
        (ImportError("\nX requires the num2words library but it was not found"), "pip install num2words"),
        (ImportError("cannot import name 'Y'"), ""),
        (ModuleNotFoundError("No module named 'pcre.x'", name="pcre.x"), "pip install pcre"),
        (ValueError("torchaudio is a word in a message"), ""),
    ],
)
def test_an_error_for_want_of_a_library_says_what_to_install(error: Exception, said: str) -> None:
    assert explain_library(error).startswith(said)
    assert bool(explain_library(error)) is bool(said)


def test_types_whose_extractor_is_in_torchaudio_are_those_that_the_tests_serve() -> None:
    """What else of transformers asks for it takes no other way with it: decoding by that name, and word times."""
    from transformers.models.auto import feature_extraction_auto as auto

    names: Any = auto.FEATURE_EXTRACTOR_MAPPING_NAMES
    models = Path(transformers.__file__).parent / "models"
    sources = [path.read_text(encoding="utf-8") for path in models.glob("*/feature_extraction_*.py")]
    asking = {
        name
        for name in multimodal_types()
        for source in sources
        if f"class {names.get(name)}(" in source and re.search("torchaudio|is_speech_available", source)
    }
    assert asking <= BY_TORCHAUDIO
    assert "granite_speech" in asking


WITHOUT = """
import importlib.util, sys
own = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "torchaudio" else own(name, *rest)
from pathlib import Path
from trinity.errors import UnsupportedModel
from trinity.preprocess.checkpoint.verdicts import MediaFacts, on_trial
from trinity.preprocess.loader import load_tokenizer_and_processor
from trinity.stages.proof import prove
given = Path(sys.argv[1])
try:
    with on_trial(given, MediaFacts(audio_token="<|audio|>", audio_token_id=7)):
        load_tokenizer_and_processor(given)
except UnsupportedModel as error:
    print(" ".join(str(error).split()))
print(" ".join(prove(given).failed.said.split()))
"""


@pytest.mark.slow
def test_without_torchaudio_load_and_proof_say_what_to_install(tmp_path: Path) -> None:
    pytest.importorskip("torchaudio")  # to build the checkpoint
    command = [sys.executable, "-c", WITHOUT, str(checkpoint("any-granite_speech"))]
    environment = {"TRINITY_CACHE": str(tmp_path), "PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=True)
    load, proof = done.stdout.strip().splitlines()[-2:]
    for said in (load, proof):
        assert "requires the torchaudio library" in said
        assert "install torchaudio in a build for this torch" in said
    assert "IMAGE_TEXT" not in load, "how to add a model is no help here"


def test_the_key_of_features_has_the_version_of_torchaudio(monkeypatch: pytest.MonkeyPatch) -> None:
    """It makes spectra: what one version made is not taken for what another would."""
    processor = RequestProcessor(checkpoint("qwen2_audio"))
    try:
        before: Any = processor.readers["audio"]
        monkeypatch.setattr(audio_kind, "library_version", lambda name: "99.1" if name == "torchaudio" else "")
        after = audio_kind._fingerprint(before._loaded.processor, before._extractor)
    finally:
        processor.close()
    assert after != before.fingerprint
