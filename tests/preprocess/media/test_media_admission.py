"""What a request's media must be, before one is read."""

from __future__ import annotations

import pytest

from support.checkpoint_files import checkpoint
from trinity.errors import BadMedia, RequestError
from trinity.preprocess.checkpoint.config_file import read_config
from trinity.preprocess.checkpoint.verdicts import MediaFacts, on_trial
from trinity.preprocess.processor import RequestProcessor
from trinity.request import Media, Request


@pytest.mark.parametrize("refused", [{}, {"text": "logits under chunking: 1.4 off"}])
def test_a_prompt_without_an_image_is_rejected_where_text_is_not_proven(refused: dict[str, str]) -> None:
    directory = checkpoint("any-vipllava")
    number = int(read_config(directory).image_token_id)
    with on_trial(directory, MediaFacts(image_token_id=number, image_token="<image>", refused=refused)):
        processor = RequestProcessor(directory)
    try:
        request = Request(prompt="What is this?", max_tokens=2)
        if not refused:
            assert processor.process(request).work.prompt
        else:
            said = r"takes no prompt without an image: logits under chunking: 1\.4 off; give an image"
            with pytest.raises(RequestError, match=said):
                processor.process(request)
    finally:
        processor.close()


def test_a_kind_that_is_not_proven_is_rejected_with_what_differed() -> None:
    directory = checkpoint("any-vipllava")
    number = int(read_config(directory).image_token_id)
    facts = MediaFacts(image_token_id=number, image_token="<image>", refused={"audio": "features: 3 rows are 0.5 off"})
    with on_trial(directory, facts):
        processor = RequestProcessor(directory)
    try:
        asked = Request(prompt="<audio> What is this?", media=[Media("audio", b"no clip")], max_tokens=2)
        with pytest.raises(BadMedia, match=r"kind 'audio' here: features: 3 rows are 0\.5 off; it takes image"):
            processor.process(asked)
    finally:
        processor.close()
