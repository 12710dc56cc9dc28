"""What a request's media must be, before one is read."""

from __future__ import annotations

import pytest

from support.checkpoint_files import checkpoint
from trinity.errors import RequestError
from trinity.preprocess.checkpoint import read_config
from trinity.preprocess.processor import RequestProcessor
from trinity.preprocess.verdicts import MediaFacts, on_trial
from trinity.request import Request


@pytest.mark.parametrize("text_alone", [True, False])
def test_a_prompt_without_an_image_is_refused_where_the_processor_takes_none(text_alone: bool) -> None:
    directory = checkpoint("any-vipllava")
    number = int(read_config(directory).image_token_id)
    with on_trial(directory, MediaFacts(image_token_id=number, image_token="<image>", text_alone=text_alone)):
        processor = RequestProcessor(directory)
    try:
        request = Request(prompt="What is this?", max_tokens=2)
        if text_alone:
            assert processor.process(request).work.prompt
        else:
            with pytest.raises(RequestError, match="takes no prompt without an image"):
                processor.process(request)
    finally:
        processor.close()
