"""The phases of a request on an instance: which follow which, and the span that the time in each belongs to.

A request is NEW while the event that brings it is handled, then in one of its phases, then GONE, and nothing of it is
left but a tombstone. ``MOVES`` has every step that there is from one to the next, with its occasion, and
``State.move`` is the only way to take one: what the table lacks it refuses, and it keeps the queues, the batches and
the counts, of which each phase has one (``COVERED`` none). To add a phase, add its rows here, its span below and its
place in ``State``; ``python tools/draw_phases.py`` then draws the table anew in docs/phases.md.

To end is no phase, for it takes as long as steps and pulls in flight do. A request that is ``ending`` has left its
place, but the time still belongs to its phase, and its blocks still arrive. Its only move is to GONE, from wherever
it stands (``ENDED``).
"""

from __future__ import annotations

from enum import Enum


class Phase(Enum):
    """Place of a request on this instance."""

    NEW = "has just come"
    IMAGE_QUEUE = "waits to be encoded"
    ENCODING = "its media are being encoded"
    COLLECTING = "its features are being copied for its reader"
    IMAGE_OFFER = "waits for image blocks to pull into"
    COVERED = "waits for its source to commit, as cached KV covers its media"
    IMAGE_PULL = "its features are on their way"
    KV_QUEUE = "waits for prefill"
    MIGRATED_QUEUE = "waits for prefill, ahead of new arrivals"
    PREEMPTED_QUEUE = "waits for prefill, ahead of all others, to be recomputed"
    PREFILLING = "its prompt is being prefilled"
    KV_OFFER = "waits for KV blocks to pull into"
    KV_PULL = "its KV is on its way"
    DECODING = "decodes"
    MOVING = "goes on elsewhere, once no step has a row of it and its KV is there"
    GONE = "is not here any more"

    __hash__ = object.__hash__  # Enum's own is a Python function, and a move looks up six times


ENDED = "ended: cancelled, failed or complete"
TAKEN = "an idle sibling takes it, or it ended"
PASSED_ON = "its source offers it to a sibling that has room, or it ended"

MOVES: dict[Phase, dict[Phase, str]] = {
    Phase.NEW: {
        Phase.IMAGE_QUEUE: "its media are to be encoded here",
        Phase.ENCODING: "other instances have all its features: they are offered as they are",
        Phase.KV_QUEUE: "no feature is needed, or all are cached here",
        Phase.PREEMPTED_QUEUE: "the same, of one that was preempted elsewhere",
        Phase.IMAGE_OFFER: "its features are offered by another instance",
        Phase.COVERED: "its features are offered, and cached KV covers them",
        Phase.KV_OFFER: "its KV is offered by another instance",
        Phase.GONE: "too large for this instance, or passed on to an encoder",
    },
    Phase.IMAGE_QUEUE: {
        Phase.ENCODING: "admitted: it has its image blocks, or helpers have all its features",
        Phase.GONE: TAKEN,
    },
    Phase.ENCODING: {
        Phase.KV_QUEUE: "all features are ready, and prefill is here",
        Phase.PREEMPTED_QUEUE: "the same, of one that was preempted",
        Phase.COLLECTING: "all features are ready, and it is an encode-only request",
        Phase.GONE: "its features are committed to another instance, or it ended",
    },
    Phase.COLLECTING: {
        Phase.GONE: "its features are copied, or it ended",
    },
    Phase.IMAGE_OFFER: {
        Phase.IMAGE_PULL: "it has its image blocks",
        Phase.GONE: PASSED_ON,
    },
    Phase.COVERED: {
        Phase.MIGRATED_QUEUE: "its source has committed",
        Phase.PREEMPTED_QUEUE: "the same, of one that was preempted elsewhere",
        Phase.GONE: ENDED,
    },
    Phase.IMAGE_PULL: {
        Phase.MIGRATED_QUEUE: "all features are here",
        Phase.PREEMPTED_QUEUE: "the same, of one that was preempted elsewhere",
        Phase.GONE: ENDED,
    },
    Phase.KV_QUEUE: {
        Phase.PREFILLING: "admitted: it has its KV blocks",
        Phase.IMAGE_QUEUE: "the cached KV that covered its media was evicted, and encode is here",
        Phase.GONE: "that was evicted and it is passed on to an encoder, an idle sibling takes it, or it ended",
    },
    Phase.MIGRATED_QUEUE: {
        Phase.PREFILLING: "admitted: it has its KV blocks",
        Phase.IMAGE_OFFER: "the cached KV that covered its media was evicted: it pulls them after all",
        Phase.GONE: ENDED,
    },
    Phase.PREEMPTED_QUEUE: {
        Phase.PREFILLING: "admitted: it has its KV blocks",
        Phase.PREEMPTED_QUEUE: "the cached KV that covered its media was evicted, but its features are cached",
        Phase.IMAGE_QUEUE: "that was evicted: its media are encoded again",
        Phase.IMAGE_OFFER: "that was evicted: it pulls them after all",
        Phase.GONE: "that was evicted and it is passed on to an encoder, or it ended",
    },
    Phase.PREFILLING: {
        Phase.DECODING: "it has its first token, and decode is here",
        Phase.PREEMPTED_QUEUE: "preempted: its features are here or not needed",
        Phase.GONE: "its KV is committed to another instance, or it ended",
    },
    Phase.KV_OFFER: {
        Phase.KV_PULL: "it has its KV blocks",
        Phase.GONE: PASSED_ON,
    },
    Phase.KV_PULL: {
        Phase.DECODING: "all of its KV is here",
        Phase.GONE: ENDED,
    },
    Phase.DECODING: {
        Phase.PREEMPTED_QUEUE: "preempted: its features are cached or not needed",
        Phase.IMAGE_QUEUE: "preempted: its media are encoded again",
        Phase.MOVING: "another instance is to go on with it",
        Phase.GONE: ENDED,
    },
    Phase.MOVING: {
        Phase.DECODING: "that instance refused it, could not pull its KV or was lost",
        Phase.GONE: "it is committed to that instance, or it ended",
    },
    Phase.GONE: {},
}

# Two counts of requests spare a decode step the look at eight places (``State.waiting_offers``, ``before_decode``).
OFFERED = frozenset({Phase.IMAGE_OFFER, Phase.KV_OFFER})
QUEUED = frozenset({Phase.IMAGE_QUEUE, Phase.KV_QUEUE, Phase.MIGRATED_QUEUE, Phase.PREEMPTED_QUEUE})
BEFORE_DECODE = QUEUED | {Phase.ENCODING, Phase.PREFILLING}

# The span of TriInfer's figure 11 that the time in each phase belongs to.
SPAN = {
    Phase.NEW: "encode_queue",
    Phase.IMAGE_QUEUE: "encode_queue",
    Phase.ENCODING: "encode",
    Phase.COLLECTING: "encode",
    Phase.IMAGE_OFFER: "ep_migration",
    Phase.COVERED: "ep_migration",
    Phase.IMAGE_PULL: "ep_migration",
    Phase.KV_QUEUE: "prefill_queue",
    Phase.MIGRATED_QUEUE: "prefill_queue",
    Phase.PREEMPTED_QUEUE: "prefill_queue",
    Phase.PREFILLING: "prefill",
    Phase.KV_OFFER: "pd_migration",
    Phase.KV_PULL: "pd_migration",
    Phase.DECODING: "decode",
    Phase.MOVING: "pd_migration",
}
