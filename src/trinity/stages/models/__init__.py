"""Models: adapters over unmodified transformers models, and loading of the parts that a role needs."""

from trinity.stages.models.base import MediaInputs, ModelAdapter, RotaryPositions
from trinity.stages.models.loaded_model import LoadedModel
from trinity.stages.models.loader import load_model
from trinity.stages.models.registry import find_adapter, known_models, register_adapter

__all__ = [
    "LoadedModel",
    "MediaInputs",
    "ModelAdapter",
    "RotaryPositions",
    "find_adapter",
    "known_models",
    "load_model",
    "register_adapter",
]
