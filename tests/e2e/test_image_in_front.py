"""Types whose processor puts an image in front of a prompt by itself give the tokens and logits of ``generate()``.

The other side is transformers alone: ``processor(text=, images=)`` of the text behind ``<image>``, then ``generate()``.
The matrix of ``test_served_media_types`` has them in all placements.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from support.checkpoint_files import checkpoint
from support.recordings import serve
from support.stage_driver import picture
from trinity.core.scheduler import BatchRules
from trinity.errors import BadMedia, RequestError
from trinity.preprocess.checkpoint.verdicts import find_verdict
from trinity.preprocess.processor import RequestProcessor
from trinity.request import Request, Sampling
from trinity.stages.proof import prove
from trinity.testing.oracle import Oracle

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
TYPES = ("blip-2", "instructblip")
OUTPUTS, WITHIN = 8, 1e-4
TEXTS = {
    "one": ("Question: what is in this picture? Answer:", 1),
    "again": ("Question: what is in this picture? Answer:", 1),
    "other": ("Question: what is in this picture? Answer:", 11),
    "asked": ("Question: who has left it there in the morning, and why? Answer:", 1),
}
CELLS = [
    pytest.param(name, method, marks=[pytest.mark.xdist_group(f"front-{name}"), *([] if soon else [pytest.mark.slow])])
    for name in TYPES
    for method, soon in [("E+P+D", name == "instructblip")]
]


def requests() -> list[Request]:
    return [
        Request(
            f"<image>{text}",
            images=[picture(seed)],
            max_tokens=OUTPUTS,
            sampling=Sampling(ignore_eos=True),
            request_id=name,
        )
        for name, (text, seed) in TEXTS.items()
    ]


@cache
def own_answers(model_type: str) -> dict[str, tuple[list[int], torch.Tensor]]:
    import transformers

    directory = checkpoint(f"any-{model_type}")
    if find_verdict(directory) is None:
        assert (failed := prove(directory).failed) is None, f"{failed}"
    load: Any = transformers.AutoModelForImageTextToText.from_pretrained
    open_processor: Any = transformers.AutoProcessor.from_pretrained
    model = load(directory, dtype=torch.float32).eval()
    processor = open_processor(directory, backend="pil")
    found = {}
    for name, (text, seed) in TEXTS.items():
        inputs = processor(text=text, images=picture(seed), return_tensors="pt")
        settings = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}
        made = model.generate(**inputs, max_new_tokens=OUTPUTS, min_new_tokens=OUTPUTS, **settings)
        found[name] = made.sequences[0, -OUTPUTS:].tolist(), torch.cat(list(made.logits))
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("model_type", "method"), CELLS)
def test_tokens_and_logits_of_generate(model_type: str, method: str) -> None:
    own = own_answers(model_type)
    one, again, other, asked = requests()
    found = serve(
        checkpoint(f"any-{model_type}"),
        method,
        [[one], [again, other, asked]],
        rules=BatchRules(token_budget=7),
        pools={"image": 256, "kv": 512},
        image_block_size=3,
        kv_block_size=4,
    )
    for name, (tokens, logits) in own.items():
        assert found.tokens(name) == tokens, name
        assert float((found.logits(name) - logits).abs().max()) < WITHIN * float(logits.abs().max()), name
    assert own["one"][0] != own["other"][0] or not torch.allclose(own["one"][1], own["other"][1], atol=1e-2)
    keys = {name: work.media[0].content for name, work in found.works.items()}
    assert keys["one"] == keys["again"] != keys["other"]
    assert (keys["one"] == keys["asked"]) == (model_type == "blip-2"), "InstructBLIP's features depend on the text"
    assert found.outputs["again"].cached_tokens > 0


PADDING = "!"  # the padding token of Kosmos' tiny checkpoints, without which positions are counted


def padded_requests(padding: int) -> list[Request]:
    """One whose prompt has padding tokens, and one whose outputs are such tokens."""
    greedy, biased = Sampling(ignore_eos=True), Sampling(ignore_eos=True, logit_bias={padding: 100.0})
    return [
        Request(f"<image>{text}", images=[picture(1)], max_tokens=OUTPUTS, sampling=sampling, request_id=name)
        for name, text, sampling in (
            ("read", f"Who is{PADDING}{PADDING} there?", greedy),
            ("written", "Who is there?", biased),
        )
    ]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("model_type", ["kosmos-2", "kosmos-2.5"])
@pytest.mark.parametrize("method", ["EPD", "E+P+D"])
def test_padding_tokens_have_no_place_where_they_are_read_and_where_they_are_written(
    model_type: str, method: str
) -> None:
    directory = checkpoint(f"any-{model_type}")
    if find_verdict(directory) is None:
        assert (failed := prove(directory).failed) is None, f"{failed}"
    oracle = Oracle(directory)
    padding = oracle.inputs(padded_requests(0)[0])["input_ids"][0].tolist().count(0)
    assert padding == 2, "its id is 0"
    read, written = padded_requests(0)
    own = {"read": oracle.answer(read).logits, "written": oracle.logits_along(written, [0] * OUTPUTS)}
    rules = BatchRules(token_budget=7)
    found = serve(directory, method, [[read, written]], rules=rules, pools={"image": 256, "kv": 512})
    assert found.tokens("written") == [0] * OUTPUTS
    assert found.tokens("read") == own["read"].argmax(-1).tolist()
    for name, logits in own.items():
        assert float((found.logits(name) - logits).abs().max()) < WITHIN * float(logits.abs().max()), name


def count_read(processor: RequestProcessor, text: str) -> int:
    """Count the tokens of a text that the encoder reads beside its image."""
    made = processor.process(Request(f"<image>{text}", images=[picture(1)]))
    return int(made.inputs[0]["qformer_input_ids"].shape[-1])


@pytest.mark.xdist_group("front-instructblip")
def test_what_cannot_stand_in_front_is_refused() -> None:
    own_answers("instructblip")
    processor = RequestProcessor(checkpoint("any-instructblip"))
    try:
        with pytest.raises(BadMedia, match="one image a prompt"):
            processor.process(Request("<image><image> Compare", images=[picture(1), picture(2)]))
        with pytest.raises(BadMedia, match="write <image> first"):
            processor.process(Request("See <image>", images=[picture(1)]))
        with pytest.raises(RequestError, match="without an image"):
            processor.process(Request("Hello"))
        with pytest.raises(RequestError, match="special tokens"):
            processor.process(Request("<image>a</s>b<|im_end|>", images=[picture(1)], special_tokens=False))
        tokens = count_read(processor, "a red boat")
        processor.loaded.config.qformer_config.max_position_embeddings = tokens  # of a text that the context holds
        assert count_read(processor, "a red boat") == tokens
        with pytest.raises(BadMedia, match=rf"reads the text, of {tokens + 1} tokens, and takes {tokens}: shorten"):
            count_read(processor, "a red boat a")
    finally:
        processor.close()
