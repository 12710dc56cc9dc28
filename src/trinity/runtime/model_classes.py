"""Steps before the weights of a checkpoint are loaded: its classes are imported, and its files identified."""

from __future__ import annotations

from pathlib import Path


def import_model_classes(model: Path) -> None:
    """Import the modules of a checkpoint's classes, which takes seconds. Raises whatever is wrong with it.

    transformers' table of renamed weights, too, whose patterns take as long to compile as the rest of a small load.
    """
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    from trinity.preprocess.checkpoint.config_file import read_config
    from trinity.stages.models.partial_models import find_model_class

    config = read_config(model)
    find_model_class(config)
    for name in config.sub_configs:
        MODEL_MAPPING.get(type(getattr(config, name)), None)
    table = getattr(transformers, "conversion_mapping", None)  # no promise of theirs
    compile_table = getattr(table, "get_checkpoint_conversion_mapping", lambda model_type: None)
    compile_table(config.model_type)


def fingerprint_model(model: Path, dtype: str) -> str:
    """Return the fingerprint of an instance that would load these files in this dtype. Raises ``ConfigError``."""
    from trinity.stages.models.loader import fingerprint_checkpoint

    return fingerprint_checkpoint(model, dtype)
