"""Models: adapters over unmodified transformers models, and the loading of the parts that a role needs."""

from trinity.stages.models.base import Inputs, ModelAdapter, Positions
from trinity.stages.models.loaded import LoadedModel
from trinity.stages.models.loading import load_model
from trinity.stages.models.registry import adapter_for, known_models, register_adapter

__all__ = [
    "Inputs",
    "LoadedModel",
    "ModelAdapter",
    "Positions",
    "adapter_for",
    "known_models",
    "load_model",
    "register_adapter",
]
