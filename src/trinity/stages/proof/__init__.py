"""The proof of a multimodal checkpoint: the route of this library against transformers' own, the whole model loaded."""

from trinity.stages.proof.prove import PROOFS, prove
from trinity.stages.proof.prove_audio import prove_audio

PROOFS["audio"] = prove_audio

__all__ = ["prove"]
