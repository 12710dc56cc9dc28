"""Texts that have tokens of media: what transformers serves of a trusted one is served, a stranger's has none.

The other side is transformers alone: its processor's call and ``generate()``.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from support.checkpoint_files import checkpoint
from support.picture_pages import PNG
from support.recordings import serve
from support.stage_driver import picture
from trinity.core.scheduler import BatchRules
from trinity.errors import BadMedia, RequestError
from trinity.preprocess.checkpoint.verdicts import find_verdict
from trinity.preprocess.processor import RequestProcessor
from trinity.request import Request, Sampling
from trinity.stages.models.generic import GenericAdapter
from trinity.stages.proof import prove
from trinity.stages.proof.subject import Subject

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
OUTPUTS = 6


@pytest.mark.timeout(300)
@pytest.mark.xdist_group("front-kosmos-2")
def test_kosmos_is_asked_for_a_grounded_text_by_who_is_trusted_alone() -> None:
    """``<grounding>`` and its kin are added tokens, and not special: they are marks that a program writes."""
    import transformers

    directory = checkpoint("any-kosmos-2")
    if find_verdict(directory) is None:
        assert (failed := prove(directory).failed) is None, f"{failed}"
    open_processor: Any = transformers.AutoProcessor.from_pretrained
    own = open_processor(directory, backend="pil")
    processor = RequestProcessor(directory)
    try:
        for text in ("<grounding>An image of", "<grounding><phrase>a boat</phrase><object>", "a <patch_index_0003>"):
            trusted = Request(f"<image>{text}", images=[picture(1)])
            wanted = own(text=text, images=picture(1), return_tensors="pt")["input_ids"][0].tolist()
            assert list(processor.process(trusted).work.prompt) == wanted
            with pytest.raises(RequestError, match="special tokens of this model") as refused:
                processor.process(msgspec.structs.replace(trusted, untrusted=True, images=[PNG]))
            assert not isinstance(refused.value, BadMedia)
        asked = Request("<image>An image of < grounding >", images=[PNG], untrusted=True)
        assert processor.process(asked).work.prompt
    finally:
        processor.close()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.xdist_group("front-kosmos-2.5")
def test_a_trusted_text_may_have_the_token_that_stands_for_an_image() -> None:
    """A mask tells Kosmos-2.5's image, whatever else has its token; a stranger's text never becomes such tokens."""
    import transformers

    text, directory = "<md> a<s> boat <s>there", checkpoint("any-kosmos-2.5")
    if find_verdict(directory) is None:
        assert (failed := prove(directory).failed) is None, f"{failed}"
    load: Any = transformers.AutoModelForImageTextToText.from_pretrained
    open_processor: Any = transformers.AutoProcessor.from_pretrained
    inputs = open_processor(directory, backend="pil")(text=text, images=picture(1), return_tensors="pt")
    settings = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    made = load(directory, dtype=torch.float32).eval().generate(**inputs, max_new_tokens=OUTPUTS, **settings)
    own = torch.cat(list(made.logits))
    asked = Sampling(ignore_eos=True)
    trusted = Request(f"<image>{text}", images=[picture(1)], max_tokens=OUTPUTS, sampling=asked, request_id="a")
    found = serve(directory, "EPD", [[trusted]], rules=BatchRules(token_budget=7), pools={"image": 256, "kv": 512})
    assert list(found.works["a"].prompt) == inputs["input_ids"][0].tolist()
    assert found.works["a"].prompt.count(inputs["input_ids"][0, 0].item()) == 3 + found.works["a"].media[0].tokens
    assert float((found.logits("a")[: len(own)] - own).abs().max()) < 1e-4 * float(own.abs().max())
    processor = RequestProcessor(directory)
    try:
        with pytest.raises(RequestError, match="special tokens"):
            processor.process(msgspec.structs.replace(trusted, special_tokens=False))
    finally:
        processor.close()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_marks_of_an_image_in_a_trusted_text_are_those_of_generate() -> None:
    """Molmo 2 marks see all images of a prompt, whoever wrote them; without an image they are refused."""
    directory, images = checkpoint("any-molmo2"), [picture(1), picture(2)]
    if find_verdict(directory) is None:
        assert (failed := prove(directory).failed) is None, f"{failed}"
    subject = Subject.load(directory, GenericAdapter)
    processor, text = subject.reference.processor, "{0}<im_start> a <im_col>boat<im_end> there{0} <im_end>and"
    inputs = processor(text=text.format(processor.image_token), images=images, return_tensors="pt")
    settings = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    made = subject.model.generate(**inputs, max_new_tokens=OUTPUTS, min_new_tokens=OUTPUTS, **settings)
    own = torch.cat(list(made.logits))
    asked = Sampling(ignore_eos=True)
    request = Request(text.format("<image>"), images=images, max_tokens=OUTPUTS, sampling=asked, request_id="a")
    found = serve(directory, "EPD", [[request]], rules=BatchRules(token_budget=200), pools={"image": 256, "kv": 512})
    assert list(found.works["a"].prompt) == inputs["input_ids"][0].tolist()
    assert found.tokens("a") == made.sequences[0, -OUTPUTS:].tolist()
    assert float((found.logits("a") - own).abs().max()) < 1e-4 * float(own.abs().max())
    reader = RequestProcessor(directory)
    try:
        for refused in (Request("a <im_col> boat"), Request("<image> <im_patch>", images=images[:1])):
            with pytest.raises(BadMedia, match="reserves for media"):
                reader.process(refused)
    finally:
        reader.close()
