"""The proof of a multimodal checkpoint: the route of this library against transformers' own, the whole model loaded."""

from trinity.stages.proof.prove import prove

__all__ = ["prove"]
