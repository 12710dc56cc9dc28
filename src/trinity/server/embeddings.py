"""Embeddings of images as OpenAI's clients read them: a vector an input, where the model's class pools an image to one.

An image comes in ``messages`` in place of ``input``, as vLLM has it. Nothing is pooled, cut or normalized here.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from trinity.errors import RequestError
from trinity.pipeline import Pipeline
from trinity.preprocess.text.prompt import take_media
from trinity.preprocess.text.prompt_problem import PromptProblem
from trinity.request import Request
from trinity.server.error_table import ApiError
from trinity.server.fields import make_request, new_id, read_fields, refuse_fields
from trinity.server.protocol import encode_json

if TYPE_CHECKING:
    from trinity.pipeline.features import Features

UNSERVED_FIELDS: dict[str, tuple[Any, ...]] = {
    "dimensions": (),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "normalize": (False,),
}
"""Fields of embeddings that would change the vector, with the values that leave it as it is."""


class EmbeddingBody(msgspec.Struct, kw_only=True):
    """Body of an embedding: OpenAI's, with vLLM's ``messages``."""

    model: str | None = None
    input: Any = None
    messages: list[dict[str, Any]] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None
    deadline_s: float | None = None


class Embedding(msgspec.Struct, kw_only=True):
    """The vector of one input: numbers, or little-endian float32 in base64."""

    embedding: list[float] | str
    index: int = 0
    object: str = "embedding"


class EmbeddingUsage(msgspec.Struct):
    """Visual tokens that were encoded."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(msgspec.Struct, kw_only=True):
    """The response of /v1/embeddings."""

    id: str
    created: int
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage
    object: str = "list"


def read_embedding_body(body: Mapping[str, Any]) -> EmbeddingBody:
    """Read the body of an embedding. Raises ``RequestError`` that names the field at fault."""
    refuse_fields(body, UNSERVED_FIELDS)
    return read_fields(body, EmbeddingBody)


def make_embedding_request(asked: EmbeddingBody) -> Request:
    """Make the request of an image. Raises ``RequestError`` for text, which no encode stage embeds, and for several."""
    if asked.messages is None or asked.input not in (None, "", []):
        raise RequestError("input is text, and images alone are embedded here; send messages with one image, no input")
    request = make_request(
        messages=asked.messages,
        request_id=new_id("embd"),
        deadline_s=asked.deadline_s,
        cache_salt=asked.cache_salt or "",
        template_kwargs=asked.chat_template_kwargs or {},
    )
    with suppress(PromptProblem):  # which the pipeline tells, as of any request
        count = len(take_media(request).all_media())
        if count > 1:
            raise RequestError(f"one vector is that of one image, and the input has {count}; send them apart")
    return request


def check_pooling(pipe: Pipeline, name: str) -> None:
    """Raise ``ApiError`` 400 where the model's class pools no image to one vector."""
    if not pipe.processor.pools_images:
        kind = pipe.processor.model_type
        text = (
            f"model {name!r} ({kind}) has no embeddings: its class defines no pooling of an image's features, "
            "and none is made up here; the rows themselves are given by pipe.features() in a program"
        )
        raise ApiError(400, "no_pooling", text, "model")


def write_embedding(found: Features, asked: EmbeddingBody, name: str) -> bytes:
    """Write the response: the one row of its one image."""
    [rows] = found.rows
    vector = rows.reshape(-1).float().numpy()
    coded = base64.b64encode(vector.astype("<f4").tobytes()).decode() if asked.encoding_format == "base64" else None
    made = EmbeddingList(
        id=found.request_id,
        created=int(time.time()),
        model=name,
        data=[Embedding(embedding=vector.tolist() if coded is None else coded)],
        usage=EmbeddingUsage(found.media_tokens, found.media_tokens),
    )
    return encode_json(made)
