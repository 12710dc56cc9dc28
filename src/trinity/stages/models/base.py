"""ModelAdapter: the facts that trinity needs about a family of unmodified transformers models.

The class is both the interface and the default. It fits every model that follows transformers' conventions (LLaVA,
InternVL, the Qwen-VL models with three rotary axes and deepstack, Llama, Mistral, and most text models). A family that
differs overrides only the methods that differ; ``registry`` says how to register it.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from trinity.core.messages import MediaSpan
from trinity.errors import StageError, UnsupportedModel
from trinity.preprocess.media.media_kinds import kind_names
from trinity.stage_kinds import ENCODE
from trinity.stages.attention.kv_rows import KvRow
from trinity.stages.attention.latent import find_index_width, find_latent_width

MediaInputs = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class RotaryPositions:
    """Positions of a prompt: int64 [axes, length]; None for index + ``delta``, which later tokens get in any case."""

    prompt: np.ndarray | None = None
    delta: int = 0


class ModelAdapter:
    """Adapter of one model family; one object serves one ``LoadedModel``.

    - ``config``: the checkpoint's config.
    - ``language_names``: attribute names under which a multimodal model may keep its text model. All other parts belong
      to the encode stage.
    - ``whole_media`` (False): a run of placeholders attends to itself in both directions, so that no chunk may cut it.
    - ``whole_prompt`` (False): so do all tokens of a prompt with media.
    - ``together`` (none): ids of tokens that all see each other so in a prompt, whatever media they are of.
    - ``added_to`` (None): placeholder to whose embedding features are added; None: they take its place.
    - ``embeds_codes`` (False): an encoder embeds codes by the text model's embedding, which an E then holds, too.
    """

    language_names: ClassVar[tuple[str, ...]] = ("language_model", "text_model")
    whole_media: ClassVar[bool] = False
    whole_prompt: ClassVar[bool] = False
    together: ClassVar[tuple[int, ...]] = ()
    added_to: ClassVar[int | None] = None
    embeds_codes: ClassVar[bool] = False

    def __init__(self, config: Any) -> None:
        self.config = config
        self.text_config = config.get_text_config(decoder=True)

    # ------------------------------------------------------------ config

    @property
    def multimodal(self) -> bool:
        return self.text_config is not self.config and bool(self.media_tokens)

    @property
    def media_tokens(self) -> dict[str, int]:
        """Placeholder token id of each kind of media."""
        found = {kind: getattr(self.config, f"{kind}_token_id", None) for kind in kind_names()}
        return {kind: token for kind, token in found.items() if token is not None}

    @property
    def placeholder_ids(self) -> frozenset[int]:
        """Ids of all placeholders that the config names: alone, the model's own forward may treat them in its way."""
        named = (getattr(self.config, f"{kind}_token_id", None) for kind in kind_names())
        return frozenset([*self.media_tokens.values(), *(number for number in named if isinstance(number, int))])

    @property
    def deepstack(self) -> int:
        """Number of further parts of hidden size in a feature row, one for each of the first layers (Qwen3-VL)."""
        vision = getattr(self.config, "vision_config", None)
        return len(getattr(vision, "deepstack_visual_indexes", None) or ())

    @property
    def axes(self) -> int:
        """Number of axes of a rotary position: 1, or with M-RoPE one for each of its sections, mostly 3."""
        rope = getattr(self.text_config, "rope_parameters", None) or {}
        nested = (each for each in rope.values() if isinstance(each, dict))  # by kind of layer
        sections = [each["mrope_section"] for each in (rope, *nested) if each.get("mrope_section")]
        return len(sections[0]) if self.multimodal and sections else 1

    @property
    def kv_heads(self) -> tuple[int, int]:
        """Number of KV heads and their width."""
        text = self.text_config
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        return heads, getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads

    @property
    def kv_row(self) -> KvRow:
        """Row of a token in one layer of the KV cache, by the config: keys and values, or a latent row."""
        return self.latent_row or KvRow(2, *self.kv_heads)

    @property
    def latent_row(self) -> KvRow | None:
        """The row of latent attention, with the key of an indexer where one chooses tokens; None without it."""
        widths = find_latent_width(self.text_config)
        return None if widths is None else KvRow(1, 1, sum(widths) + find_index_width(self.text_config))

    @property
    def reads_types(self) -> bool:
        """Tell if the text model reads the types of tokens, which no CUDA graph may keep."""
        return False

    @property
    def flat(self) -> bool:
        """Tell if the base is the text model itself, with encoders among its children."""
        return False

    @property
    def vision_states(self) -> int | Sequence[int] | None:
        """Hidden states of ``vision_tower`` that features are made of; None if they need its other outputs."""
        return None

    # ------------------------------------------------------------ parts of the model

    def language_name(self, model: Any) -> str | None:
        """Return the name of the text model within ``model.base_model``; None if that is the text model itself.

        Raises ``UnsupportedModel`` if there is none of ``language_names``.
        """
        if not self.multimodal:
            return None
        for name in self.language_names:
            if hasattr(model.base_model, name):
                return name
        raise UnsupportedModel(
            f"{type(model).__name__} keeps its text model under none of {', '.join(self.language_names)}: "
            "write a ModelAdapter that sets language_names"
        )

    def language(self, model: Any) -> Any:
        """Return the text model: embeddings in, hidden states out."""
        name = self.language_name(model)
        return model.base_model if name is None else getattr(model.base_model, name)

    def text_alone(self, model: Any) -> Any:
        """Return the part that takes text without media and gives logits: the model, where it needs none."""
        return model

    def text_children(self, model: Any) -> list[str]:
        """List the children of ``model.base_model`` that are the text model, or parts of it."""
        name = self.language_name(model)
        return [] if name is None else [name]

    # ------------------------------------------------------------ encode

    def encode(self, model: Any, kind: str, items: Sequence[MediaInputs], counts: Sequence[int]) -> list[Tensor]:
        """Compute features [counts[i], width] of each item, batched if the items' shapes allow it.

        ``kind`` is "image", "video" or "audio". Raises ``StageError`` if the model gives another number of rows than
        the prompt has placeholders, ``UnsupportedModel`` if it takes no such media.
        """
        # InternVL and SmolVLM show the frames of a video as images.
        as_images = kind == "video" and all("pixel_values" in item for item in items)
        name = f"get_{'image' if as_images else kind}_features"
        method = getattr(model.base_model, name, None)
        if method is None:
            raise UnsupportedModel(f"{type(model).__name__} has no {name}: it takes no {kind}")
        accepted = inspect.signature(method).parameters
        found: dict[int, Tensor] = {}
        for chosen, alone in self.collate(items):
            wanted = [counts[i] for i in chosen]
            joined, times = self._with_company(items[chosen[0]], alone) if sum(wanted) == 1 else (alone, 1)
            output = method(**{name: value for name, value in joined.items() if name in accepted}, return_dict=True)
            rows = self.feature_rows(output)
            if len(rows) != sum(wanted) * times:
                raise StageError(
                    f"the model gives {len(rows)} {kind} features for {sum(wanted)} placeholders", stage=ENCODE.letter
                )
            found.update(zip(chosen, torch.split(rows[: sum(wanted)], wanted), strict=True))
        return [found[i] for i in range(len(items))]

    def _with_company(self, item: MediaInputs, alone: dict[str, Tensor]) -> tuple[dict[str, Tensor], int]:
        """Join an item of one feature with itself, where items are joined at all. Returns the inputs, and its times.

        A feature that is alone loses its axis in some models' code (``squeeze`` in Mistral 3), and in company does not.
        """
        groups = list(self.collate([item, item]))
        return (groups[0][1], 2) if len(groups) == 1 else (alone, 1)

    def collate(self, items: Sequence[MediaInputs]) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
        """Yield groups of items to encode together: their indices and their joined inputs."""
        for chosen in group_alike(items, lambda name, value: value.shape[1:]):
            yield chosen, join_inputs([items[i] for i in chosen])

    def feature_rows(self, output: Any) -> Tensor:
        """Convert the output of ``get_*_features`` to [rows of all items, hidden * (1 + deepstack)]."""
        parts = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]
        return torch.cat([flatten_features(part) for part in parts], dim=-1)

    # ------------------------------------------------------------ prefill and decode

    def positions(
        self, model: Any, prompt: np.ndarray, spans: Sequence[MediaSpan], kinds: np.ndarray
    ) -> RotaryPositions:
        """Compute a prompt's rotary positions; ``kinds`` [length]: 0 for text, else 1 + index in ``kind_names()``."""
        if self.axes == 1 or not spans:
            return RotaryPositions()
        grids: dict[str, list[Any]] = defaultdict(list)
        for span in spans:
            for name, value in span.meta.items():
                grids[name] += value if isinstance(value, list) and isinstance(value[0], list) else [value]
        method = model.base_model.get_rope_index
        accepted = inspect.signature(method).parameters
        given = {name: torch.tensor(values) for name, values in grids.items() if name in accepted}
        types = torch.from_numpy(kinds)[None]
        found, _ = method(torch.from_numpy(prompt)[None], mm_token_type_ids=types, **given)
        # generate() goes on from the last position; the model's own delta begins behind the largest, which a video's
        # last frame may have.
        return RotaryPositions(found[:, 0].numpy(), int(found[:, 0, -1].max()) + 1 - len(prompt))

    def language_inputs(self, further: Tensor, at: Tensor, total: int) -> dict[str, Any]:
        """Make keywords of the text model from feature columns beyond the first hidden size.

        - ``further``: [rows, hidden * deepstack].
        - ``at`` ([rows]): indices of these rows among the batch's ``total`` rows, ascending.
        """
        if not self.deepstack:
            return {}
        mask = torch.zeros((1, total), dtype=torch.bool, device=at.device)
        mask[0, at] = True
        return {"visual_pos_masks": mask, "deepstack_visual_embeds": list(further.chunk(self.deepstack, -1))}

    def place(self, ids: Tensor, media: Tensor, places: Tensor) -> Tensor:
        """Correct positions ``places`` [..., rows] where a token's id says that it has none; see ``token_inputs``."""
        return places

    def token_inputs(self, text: Any, ids: Tensor, media: Tensor, written: Tensor | None = None) -> dict[str, Any]:
        """Make keywords of the text model ``text`` that depend on token ids, not on embeddings alone (Gemma 4).

        - ``ids``, ``media`` ([rows]): of the batch's tokens; which of them are placeholders, whose ids are 0.
        - ``written`` ([rows], None): which of them the model wrote itself; given where ``reads_types``.
        """
        return {}

    def mark_layers(self, model: Any) -> None:
        """Mark the layers of a text model that attend in another way than the others (``CAUSAL_LAYER``)."""

    def head(self, model: Any, hidden: Tensor) -> Tensor:
        """Compute logits [rows, vocabulary] of hidden states [rows, hidden], as the model's own forward does."""
        return scale_logits(find_head(model)(hidden), self.config)


def find_head(model: Any) -> Any:
    """Find the output head of a model: its own, or that of the causal model which is its text model; None without."""
    if (own := model.get_output_embeddings()) is not None:
        return own
    text = model.get_decoder()
    return None if text is model or not hasattr(text, "get_output_embeddings") else text.get_output_embeddings()


HEAD_FIELDS = ("logit_scale", "logits_scaling", "final_logit_softcapping")  # Cohere, Granite, Gemma 2


def scale_logits(logits: Tensor, config: Any) -> Tensor:
    """Apply the factor, divisor and soft cap of logits that a config names."""
    factor, divisor, cap = (getattr(config, name, None) for name in HEAD_FIELDS)
    if factor is not None:
        logits = logits * factor
    if divisor is not None:
        logits = logits / divisor
    return logits if cap is None else torch.tanh(logits / cap) * cap


def group_alike(items: Sequence[MediaInputs], shape: Any) -> list[list[int]]:
    """Group the indices of items whose inputs have equal names and equal ``shape(name, value)``."""
    groups: dict[Any, list[int]] = defaultdict(list)
    for index, item in enumerate(items):
        groups[tuple((name, *shape(name, item[name])) for name in sorted(item))].append(index)
    return list(groups.values())


def join_inputs(
    items: Sequence[MediaInputs], axis: int = 0, axes: Mapping[str, int] | None = None
) -> dict[str, Tensor]:
    """Join the items' inputs, each along ``axes[name]`` or else ``axis``."""
    return {name: torch.cat([item[name] for item in items], (axes or {}).get(name, axis)) for name in items[0]}


def flatten_features(features: Any) -> Tensor:
    """Flatten a tensor, or nested lists and tuples of tensors, to [rows, hidden]."""
    if isinstance(features, Tensor):
        return features.reshape(-1, features.shape[-1])
    return torch.cat([flatten_features(part) for part in features])
