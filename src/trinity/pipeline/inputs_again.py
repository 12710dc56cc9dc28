"""Makes the inputs of a request's media once more: they were not kept, and the instance that had them is lost."""

from __future__ import annotations

from trinity.core.frontend.messages import Prepared
from trinity.core.messages import Failure
from trinity.errors import RequestError, TrinityError
from trinity.preprocess.processor import RequestProcessor
from trinity.request import Request


async def prepare_again(request: Request, life: str, processor: RequestProcessor) -> Prepared:
    """Prepare a request once more for this life of it, off the loop.

    Only its inputs are taken: its tokens and its seed stay as they are. A file or an address may have other
    content by now: ``Prepared.contents`` tells. Raises nothing.
    """
    try:
        made = await processor.aprocess(request)
    except TrinityError as error:
        kind = type(error).__name__ if isinstance(error, RequestError) else "RequestError"
        text = f"an instance was lost with the request, and its media cannot be read once more: {error}"
        return Prepared(life, failure=Failure(kind, text))
    contents = tuple(span.content for span in made.work.media)
    return Prepared(life, made.inputs, contents, input_bytes=made.input_bytes)
