"""The phases of a request on an instance, and the span that the time in each belongs to."""

from __future__ import annotations

from enum import Enum


class Phase(Enum):
    """Where a request stands on this instance."""

    IMAGE_QUEUE = "waits to be encoded"
    ENCODING = "its media are being encoded"
    IMAGE_OFFER = "waits for image blocks to pull into"
    IMAGE_PULL = "its features are on their way"
    KV_QUEUE = "waits for prefill"
    PREFILLING = "its prompt is being prefilled"
    KV_OFFER = "waits for KV blocks to pull into"
    KV_PULL = "its KV is on its way"
    DECODING = "decodes"


# The span of TriInfer's figure 11 that the time in each phase belongs to.
SPAN = {
    Phase.IMAGE_QUEUE: "encode_queue",
    Phase.ENCODING: "encode",
    Phase.IMAGE_OFFER: "ep_migration",
    Phase.IMAGE_PULL: "ep_migration",
    Phase.KV_QUEUE: "prefill_queue",
    Phase.PREFILLING: "prefill",
    Phase.KV_OFFER: "pd_migration",
    Phase.KV_PULL: "pd_migration",
    Phase.DECODING: "decode",
}
