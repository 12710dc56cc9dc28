"""Parts of models whose output head lies within their text model, itself a causal one."""

from __future__ import annotations

import pytest

from support.checkpoint_files import checkpoint
from trinity.preprocess.checkpoint.config_file import read_config
from trinity.preprocess.checkpoint.verdicts import MediaFacts
from trinity.stages.models.base import find_head
from trinity.stages.models.generic import GenericAdapter
from trinity.stages.models.partial_models import find_model_class, make_partial_class

FACTS = MediaFacts(language="language_model")


@pytest.mark.parametrize("name", ["nemotron_h_omni", "qwen3_vl_moe"])
def test_the_language_part_has_the_head_and_the_vision_part_has_the_towers(name: str) -> None:
    config = read_config(checkpoint(f"any-{name}"))
    whole, adapter = find_model_class(config), GenericAdapter(config, FACTS)
    language, vision = (
        make_partial_class(whole, adapter, part)._from_config(config) for part in ("language", "vision")
    )
    inside = [child for child, module in language.base_model.named_children() if module is not None]
    assert inside == ["language_model"]
    assert find_head(language).weight.shape[0] == config.get_text_config().vocab_size
    left = {name for name, _ in vision.named_parameters()}
    assert left
    assert not any("language_model" in name or "lm_head" in name for name in left)
