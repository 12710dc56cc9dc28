"""One image a prompt, where what a processor makes of one depends on those beside it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.checkpoint_files import checkpoint
from support.stage_driver import picture
from trinity.errors import BadMedia
from trinity.preprocess.checkpoint.verdicts import MediaFacts, on_trial
from trinity.preprocess.processor import RequestProcessor
from trinity.request import Request


@pytest.mark.parametrize("single", [True, False])
def test_a_second_image_is_refused_before_either_is_read(single: bool) -> None:
    directory = checkpoint("any-emu3")
    facts = MediaFacts(
        language="text_model", image_token="<image>", image_token_id=_find_number(directory), single=single
    )
    with on_trial(directory, facts):
        processor = RequestProcessor(directory)
    try:
        assert len(processor.process(Request("A <image>", images=[picture(1)])).work.media) == 1
        two = Request("<image> or <image>", images=[picture(1), picture(2)], request_id="two")
        if not single:
            assert len(processor.process(two).work.media) == 2
            return
        with pytest.raises(
            BadMedia, match=r"takes one image a prompt, since .* beside it; 2 are given, so ask"
        ) as told:
            processor.process(Request("<image> or <image>", images=["no/such.png"] * 2, request_id="two"))
        assert told.value.request_id == "two"
    finally:
        processor.close()


def _find_number(directory: Path) -> int:
    added = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    return int(next(each["id"] for each in added if each["content"] == "<image>"))
