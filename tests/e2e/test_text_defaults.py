"""Types whose ``generate()`` runs that of their text model: its config has the defaults, and no file is read.

BLIP-2, InstructBLIP and Kosmos-2. The other side is transformers alone: the processor, and then ``generate()`` without
any setting but the greatest length.
"""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from support.checkpoint_files import checkpoint
from support.recordings import serve
from support.stage_driver import picture
from trinity.preprocess.checkpoint.verdicts import find_verdict
from trinity.request import Request
from trinity.stages.models.generic import GenericAdapter
from trinity.stages.proof import prove
from trinity.stages.proof.prompts import one_image
from trinity.stages.proof.subject import Differs, Subject

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
TYPES = ("blip-2", "instructblip", "kosmos-2")
TEXTS = ("Question: what is in this picture? Answer:", "Who has left it there?", "A boat and")
OUTPUTS = 12


def generate(directory: Path, **settings: Any) -> list[list[int]]:
    """Let transformers answer each text behind one picture: the ids that it writes."""
    import transformers

    load: Any = transformers.AutoModelForImageTextToText.from_pretrained
    open_processor: Any = transformers.AutoProcessor.from_pretrained
    model, processor = load(directory, dtype="float32").eval(), open_processor(directory, backend="pil")
    found = []
    for text in TEXTS:
        inputs = processor(text=text, images=picture(1), return_tensors="pt")
        made = model.generate(**inputs, max_new_tokens=OUTPUTS, **settings)[0].tolist()
        own = inputs["input_ids"][0].tolist()
        found.append(made[len(own) :] if made[: len(own)] == own else made)
    return found


def edit(path: Path, part: str, **fields: Any) -> None:
    """Set fields of a file of JSON, or of a part of it."""
    whole = json.loads(path.read_text()) if path.exists() else {}
    (whole[part] if part else whole).update(fields)
    path.write_text(json.dumps(whole))


@pytest.fixture
def edited(model_type: str, tmp_path: Path) -> Path:
    """Make a checkpoint whose text config ends an output by a token that it writes, and whose file says others."""
    source = checkpoint(f"any-{model_type}")
    free = generate(source, do_sample=False, eos_token_id=None)
    ends, other = free[2][5], free[0][0]
    assert ends != other
    found = Path(shutil.copytree(source, tmp_path / "model"))
    edit(found / "config.json", "text_config", eos_token_id=ends)
    edit(found / "config.json", "", eos_token_id=other)
    edit(found / "generation_config.json", "", eos_token_id=other, repetition_penalty=1.9, num_beams=3)
    if find_verdict(found) is None:
        assert (failed := prove(found).failed) is None, f"{failed}"
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("model_type", [TYPES[0], *(pytest.param(each, marks=pytest.mark.slow) for each in TYPES[1:])])
def test_defaults_are_those_of_the_text_config(edited: Path) -> None:
    own = generate(edited)
    assert min(map(len, own)) < OUTPUTS, "none ends by the text config's token"
    asked = [
        Request(f"<image>{text}", images=[picture(1)], max_tokens=OUTPUTS, request_id=str(at))
        for at, text in enumerate(TEXTS)
    ]
    found = serve(edited, "EPD", [asked], pools={"image": 256, "kv": 512})
    assert [found.tokens(str(at)) for at in range(len(TEXTS))] == own


def test_a_part_that_writes_with_another_config_is_no_text_model() -> None:
    subject = Subject.load(checkpoint("any-blip-2"), GenericAdapter)
    subject.model.language_model.config = copy.deepcopy(subject.model.language_model.config)
    assert subject.expect(one_image(), outputs=1).text_writes
    subject.model.language_model.config.eos_token_id = 7
    with pytest.raises(Differs, match=r"runs that of \w+ForCausalLM, which has other defaults"):
        subject.expect(one_image(), outputs=1)
