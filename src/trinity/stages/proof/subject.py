"""The subject of a proof: a checkpoint loaded whole, and what its structure tells of its media."""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trinity.preprocess.checkpoint.config_file import read_config
from trinity.preprocess.checkpoint.libraries import explain_library
from trinity.preprocess.checkpoint.verdicts import MEDIA, MediaFacts
from trinity.preprocess.media.audio_kind import find_extractor
from trinity.preprocess.media.media_kinds import kind_names
from trinity.preprocess.media.media_markup import VIDEO_TEXT
from trinity.stages.models.base import HEAD_FIELDS, ModelAdapter, find_head
from trinity.stages.models.generic import FORWARD, below_head, find_text
from trinity.stages.models.load_bar import quiet
from trinity.stages.models.own_logits import explain_no_numbers, set_aside
from trinity.stages.models.partial_models import find_model_class, list_towers, load_whole
from trinity.stages.models.states import StateLayout
from trinity.stages.models.unneeded_weights import list_needed
from trinity.stages.proof.prompts import ProofPrompt, image_beside, one_image, text_alone, three_images
from trinity.stages.proof.reference import PROOF_OUTPUTS, SHORT_OUTPUTS, Expected, Reference, find_media
from trinity.stages.proof.trial_cache import TrialCache

TOLERANCE = 2e-4  # of logits and features, relative to the largest; float32 is exact to about 1e-6
_TOKEN_NAMES = ("image_token", "image_placeholder_token", "boi_token", "image_start_token", "img_token")
_CROSS_ATTENTION = re.compile(r"cross_?att")
_TOWERS = re.compile(r"qformer|vision|visual|tower|projector|resampler|perceiver|connector|image_encoder|aligner")
_ORDINARY = {"input_ids", "attention_mask", "cache_position", "visual_pos_masks"}  # of a text model, for each token
_COUNTS = "create_position_ids_from_input_ids"  # method of modules that do as fairseq does
_KINDS = "mm_token_type_ids"  # of a processor, for each token: 0 for text, or the kind of medium that it is of
_PLACEHOLDERS = ("image_token_id", "image_token_index", "media_placeholder_token_id")


class Differs(Exception):
    """A part of a proof does not agree: its name, and in words what differs."""

    def __init__(self, name: str, said: str) -> None:
        super().__init__(f"{name}: {said}")
        self.name, self.said = name, said


@dataclass
class Subject:
    """A checkpoint on trial: where it lies, the whole model in float32, and the adapters' class."""

    directory: Path
    model: Any
    make_adapter: Any
    _front_id: int | None = None
    _together: tuple[int, ...] = ()

    @classmethod
    def load(cls, directory: Path, make_adapter: Any) -> Subject:
        """Load the whole model in float32, all in this process. Raises ``Differs`` if it lacks weights.

        Raises ``ConfigError`` if its files have no room for the weights of its config.
        """
        config = read_config(directory)
        kind = find_model_class(config)
        refuse_structure(config, kind)
        try:
            with quiet():
                model, report = load_whole(kind, directory, config=config, dtype=torch.float32)
        except ImportError as error:
            raise Differs("libraries", f"its class asks for one that is not installed: {error!s:.160}") from error
        except RuntimeError as error:
            if "mismatch" not in str(error):  # of memory, perhaps, which says nothing of the checkpoint
                raise
            raise Differs("weights", "some have other shapes than the model of this config") from error
        subject, other = cls(directory, model.eval().requires_grad_(False), make_adapter), report["mismatched_keys"]
        if lacking := sorted([*map(str, other), *subject.list_needed(report["missing_keys"])]):
            subject.close()
            raise Differs("weights", f"the files lack {len(lacking)} of them, among them {', '.join(lacking[:3])}")
        return subject

    def list_needed(self, names: Collection[str]) -> list[str]:
        """List those of the tensors ``names``, which the files lack, on which tokens may depend: all of a text model's.

        The others are of a tower, and the model's own logits of prompts with images are the same without them.
        """
        if not names:
            return []
        try:
            text = find_text(self.model, self.language_name) if self.language_name else self.model
            of_text = {id(each) for part in (text, find_head(self.model)) for each in part.parameters()}
            places = dict(self.model.named_parameters(remove_duplicate=False))
            if any(name not in places or id(places[name]) in of_text for name in names):
                return sorted(names)
            self.expect(one_image(), outputs=1)
        except Differs:
            return sorted(names)
        prompts = (one_image(), three_images()) if self.takes_several else (one_image(),)
        return list_needed(self.model, names, lambda: [self.expect(each, outputs=1).logits for each in prompts])

    def close(self) -> None:
        """End the threads of processors that were opened."""
        if "trial_cache" in self.__dict__:
            self.trial_cache.close()

    @property
    def config(self) -> Any:
        return self.model.config

    @cached_property
    def reference(self) -> Reference:
        """The model's own route. Raises ``Differs`` if its processor does not load."""
        try:
            found = Reference(self.directory, self.config, self.model)
        except Exception as error:
            how = explain_library(error)
            said = f"it cannot be loaded here ({type(error).__name__}: {error!s:.300})" + f"; {how}" * bool(how)
            raise Differs("processor", said) from error
        if attending := _find_cross_attention(self.model.base_model):
            said = f"it reads images by cross attention ({attending}), and keys and values of images are no blocks here"
            raise Differs("text model", said)
        if found.processor is None or not (
            hasattr(found.processor, "image_processor") or find_extractor(found.processor)
        ):
            raise Differs("processor", "it has no image processor, and no feature extractor of audio")
        return found

    @cached_property
    def trial_cache(self) -> TrialCache:
        """Things that the trials of this checkpoint share."""
        return TrialCache(self.directory, self.reference.has_template)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of input that its processor takes."""
        processor = self.reference.processor
        sees, hears = hasattr(processor, "image_processor"), find_extractor(processor) is not None
        return ("image",) * sees + ("audio",) * hears + ("text",)

    @property
    def takes_unlisted_videos(self) -> bool:
        """Tell if its processor takes videos, and its type is none of those whose videos the tests compare."""
        return hasattr(self.reference.processor, "video_processor") and self.config.model_type not in VIDEO_TEXT

    @property
    def image_token(self) -> str:
        """Placeholder of an image in a prompt, which the processor expands. Raises ``Differs``."""
        return self.image_markup[0]

    @cached_property
    def image_markup(self) -> tuple[str, str]:
        """Placeholder of an image, and its marker: the placeholder with what must stand around. Raises ``Differs``."""
        refusals = {}
        for token in self._image_tokens():
            if (number := self.reference.find_in_front(token)) is not None:
                self.reference.in_front, self._front_id = True, number
                return token, token
            markers = self.reference.list_markers(token)
            refusals[token] = "" if markers else "its chat template does not write it once for an image"
            for marker in markers:
                refusals[token] = self.reference.explain_refusal(marker)
                if not refusals[token]:
                    return token, marker
        said = "; ".join(f"{token}: {why}" for token, why in refusals.items())
        raise Differs("placeholder", f"no token stands for an image in its processor ({said})")

    @property
    def takes_several(self) -> bool:
        """Tell if a prompt may have several images. Raises ``Differs``."""
        return bool(self.image_markup) and not self.reference.in_front

    def _image_tokens(self) -> list[str]:
        """List texts that may stand for an image, likely ones first."""
        found = []
        for holder in (self.reference.processor, self.reference.tokenizer):
            found += [getattr(holder, name, None) for name in _TOKEN_NAMES]
        number = self._config_placeholder()
        found.append(None if number is None else self.reference.tokenizer.convert_ids_to_tokens(number))
        return list(dict.fromkeys(str(each) for each in [*found, "<image>"] if each is not None))

    def _config_placeholder(self) -> int | None:
        found = (getattr(self.config, name, None) for name in _PLACEHOLDERS)
        return next((number for number in found if isinstance(number, int) and number >= 0), None)

    def find_placeholder(self, ids: list[int]) -> int:
        """Find the token id whose rows features replace, in the ids of a prompt with an image. Raises ``Differs``."""
        named = [self._front_id, self._config_placeholder(), getattr(self.reference.processor, "image_token_id", None)]
        token = getattr(self.reference.processor, "image_token", None)
        named += [
            self.reference.tokenizer.convert_tokens_to_ids(str(each)) for each in (token, self.image_token) if each
        ]
        for number in named:
            if isinstance(number, int) and number in ids:
                return number
        raise Differs("placeholder", f"none of the tokens {named} that stand for images is in the prompt's ids")

    @cached_property
    def language_name(self) -> str:
        """Name of the text model within the model's base; "" if that is the text model itself. Raises ``Differs``."""
        base = self.model.base_model
        children = dict(base.named_children())
        decoder = self.model.get_decoder()
        for name, child in children.items():
            if child is decoder or name in ModelAdapter.language_names:
                return str(name)
        for name, child in children.items():
            if decoder is not None and any(each is decoder for each in child.modules()):
                return str(name)
        if decoder is base is not self.model and self.towers:
            return ""
        parts = ", ".join(children)
        raise Differs("text model", f"it is no part of its own of {type(base).__name__}, whose parts are {parts}")

    @cached_property
    def towers(self) -> tuple[str, ...]:
        """Children of the model's base that its forward does not call for embeddings. Raises ``Differs``."""
        try:
            return list_towers(self.model.base_model)
        except Exception as error:  # models raise what they like
            raise Differs("text model", f"it takes no embeddings ({type(error).__name__}: {error!s:.200})") from error

    @property
    def language(self) -> Any:
        """The text model below its head."""
        return below_head(find_text(self.model, self.language_name))

    @property
    def _noted(self) -> Any:
        """Module that is given embeddings: the text model, or the first layer of a base that is that itself."""
        if self.language_name:
            return self.language
        children = [child for name, child in self.language.named_children() if name not in self.towers]
        return next((child[0] for child in children if isinstance(child, torch.nn.ModuleList)), self.language)

    def expect(self, prompt: ProofPrompt, outputs: int = PROOF_OUTPUTS) -> Expected:
        """Run the model's own route to so many tokens. Raises ``Differs`` if it does not run, or to no numbers."""
        try:
            marker = self.image_markup[1] if prompt.images else ""
            found = self.reference.expect(prompt, marker, self._noted, outputs)
            if said := explain_no_numbers(found.logits, self.model):
                raise Differs("model's own logits", said)
            return found
        except Differs:
            raise
        except Exception as error:
            said = f"its own generate() fails on the prompt with {prompt.name} ({type(error).__name__}: {error!s:.300})"
            raise Differs("model's own route", said) from error

    @cached_property
    def expected_text(self) -> Expected:
        """The model's own route of the prompt without media. Raises ``Differs`` if it does not run at all."""
        return self.expect(text_alone(), SHORT_OUTPUTS)

    def run_at(self, place: int) -> None:
        """Run a token of the text model at this position. Raises what that raises beyond a table of positions."""
        embeds = self.language.get_input_embeddings()(torch.zeros((1, 1), dtype=torch.int64))
        self.language(inputs_embeds=embeds, position_ids=torch.full((1, 1), place), use_cache=False)

    def run_otherwise(self) -> bool:
        """Have chunks behind others run in the next way (``StateLayout.run_otherwise``); False if there is none."""
        states: StateLayout | None = getattr(self.model, "trinity_states", None)
        width = self.config.get_text_config(decoder=True).hidden_size
        return states is not None and states.run_otherwise(self.model, width)

    def guess_facts(self, expected: Expected, placeholder: dict[str, Any] | None = None) -> MediaFacts:
        """Derive facts from the structure and from a prompt with one medium.

        ``placeholder`` (that of images): the facts that name it.
        """
        named = placeholder or {
            "image_token_id": self.find_placeholder(expected.ids),
            "image_token": self.image_token,
            "image_marker": self._special_marker(),
            "in_front": self.reference.in_front,
        }
        first = axes = 0
        if expected.positions is not None:
            axes = min(3, expected.positions.shape[0])  # a fourth is mostly the text's own, and else in the config
            first = int(expected.positions[0, 0]) if axes == 1 else 0
        media = [named[name] for name in named if name.endswith("_token_id")]
        self._together = self._find_together(expected, media)
        return MediaFacts(
            language=self.language_name,
            towers=() if self.language_name else self.towers,
            **named,
            **_find_layers(expected),
            token_types=self._find_types(expected, media),
            head=self._heads()[0],
            text_writes=expected.text_writes,
            first=first,
            axes=axes,
        )

    def _find_types(self, expected: Expected, media: list[int]) -> dict[str, dict[int, int]]:
        """Find types of tokens that the text model is told, by keyword and id. Raises ``Differs`` if ids do not do.

        ``media``: ids of placeholders.
        """
        named = inspect.signature(self.language.forward).parameters
        found: dict[str, dict[int, int]] = {}
        for name, value in expected.further.items():
            if name not in named or name in _ORDINARY or not _is_whole(value, len(expected.ids)) or _is_mask(value):
                continue
            found[name] = _pair_types(name, expected.inputs, value, media)
        return {name: {**kinds, **self._find_further_types(name, expected.ids, media)} for name, kinds in found.items()}

    def _find_together(self, expected: Expected, media: list[int]) -> tuple[int, ...]:
        """Find the tokens that the processor says to be of an image; none if it says nothing."""
        types = expected.inputs.get(_KINDS)
        if types is None:
            return ()
        try:
            found = _pair_types(_KINDS, expected.inputs, types, media)
            found = {**self._find_further_types(_KINDS, expected.ids, media), **found}
        except Differs:
            return ()
        return tuple(sorted({*media, *(each for each in found if each >= 0 and found[each] == found.get(MEDIA))}))

    def _find_further_types(self, name: str, known: list[int], placeholders: list[int]) -> dict[int, int]:
        """Find types of special tokens that are not among the ``known`` ids: the text beside an image may have them.

        Raises ``Differs`` if the processor tells none, or tells several of one id.
        """
        media = {getattr(self.config, f"{kind}_token_id", None) for kind in kind_names()}
        vocabulary = self.reference.tokenizer.get_added_vocab().items()
        marks = {self.image_token, *(getattr(self.reference.processor, f"{kind}_token", None) for kind in kind_names())}
        others = [each for each, number in vocabulary if each not in marks and number not in media | {*known}]
        try:
            made = self.reference.inputs(image_beside(" ".join(others)), self.image_markup[1])
            return _pair_types(name, made, made[name], placeholders)
        except Differs:
            raise
        except Exception as error:  # processors raise what they like
            problem = f"{name} of its special tokens is not told ({type(error).__name__}: {error!s:.200})"
            raise Differs("text model", problem) from error

    def _special_marker(self) -> str:
        token, marker = self.image_markup
        return "" if marker == token else marker

    def _heads(self) -> list[str]:
        text = self.config.get_text_config(decoder=True)
        parts = (("config", self.config), ("text", text))
        named = [name for name, part in parts if any(getattr(part, each, None) for each in HEAD_FIELDS)]
        return [*named, "none", FORWARD] if named else ["config", FORWARD]

    def list_choices(self) -> list[dict[str, Any]]:
        """List what may be tried for attention between an image's tokens and for the head, likely ones first."""
        kinds = getattr(self.config.get_text_config(decoder=True), "layer_types", None) or ()
        ways: list[dict[str, Any]] = [{"whole_media": False}, {"whole_media": True}]
        if {"full_attention", "sliding_attention"} <= set(kinds):
            ways.append({"whole_media": True, "whole_windows": True})
        ways.append({"whole_media": True, "whole_prompt": True})
        if self._together:
            ways.append({"whole_media": True, "together": self._together})
        heads = [{"head": head} for head in self._heads()]
        return [{**place, **way, **head} for place in self._list_places() for way in ways for head in heads]

    def _list_places(self) -> list[dict[str, int]]:
        """List how its text model may count positions: as it is told, or by itself from behind a padding token's id."""
        counting = (each for each in self.language.modules() if hasattr(each, _COUNTS))
        found = {int(each.padding_idx) for each in counting}
        return [{}, *({"first": each + 1, "skipped": each} for each in sorted(found))]


def refuse_structure(config: Any, kind: Any) -> None:
    """Raise ``Differs`` for a model that no pair of prefill and decode can be: by its config and its class ``kind``."""
    if config.is_encoder_decoder:
        raise Differs("text model", "it is an encoder-decoder, and keys and values of an encoder are no blocks here")
    if not kind.can_generate():
        raise Differs("model's own route", f"its class {kind.__name__} has no generate(): it writes no text")


def _find_cross_attention(base: Any) -> str:
    """Find the name of a module by which the text reads images beside its own tokens; "" if there is none."""
    for name, _ in base.named_modules():
        if _CROSS_ATTENTION.search(name) and not _TOWERS.search(name):
            return str(name)
    return ""


def _is_whole(value: Any, length: int) -> bool:
    return isinstance(value, Tensor) and value.numel() == length and not value.is_floating_point()


def _find_layers(expected: Expected) -> dict[str, Any]:
    """Find the layers to which features are added, and the text model's keywords for that; {} if there are none."""
    for name, value in expected.further.items():
        if isinstance(value, dict) and value and all(isinstance(key, int) for key in value):
            masks = [
                each for each, mask in expected.further.items() if _is_whole(mask, len(expected.ids)) and _is_mask(mask)
            ]
            if len(masks) != 1:
                raise Differs("text model", f"it is given {name} by layer, and no mask tells for which tokens")
            return {"layers": tuple(value), "layer_names": (masks[0], name)}
    return {}


def _pair_types(name: str, inputs: dict[str, Any], types: Tensor, media: list[int]) -> dict[int, int]:
    """Pair ids of a prompt with the types of its tokens, where these are not 0. Raises ``Differs`` if ids do not do."""
    ids = inputs["input_ids"][0].masked_fill(find_media(inputs, media), MEDIA)
    pairs = set(zip(ids.tolist(), types.flatten().tolist(), strict=True))
    if len(pairs) != len({number for number, _ in pairs}):
        raise Differs("text model", f"{name} is not the same for all tokens of one id")
    return {number: kind for number, kind in sorted(pairs) if kind}


def _is_mask(value: Tensor) -> bool:
    return value.dtype == torch.bool


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference relative to the largest value; infinite where a value is not finite."""
    if found.shape != expected.shape:
        return float("inf")
    found, expected = set_aside(found.float(), expected.float())
    off = (found - expected).abs().max() / expected.abs().max().clamp(min=1e-6)
    return float(off.nan_to_num(torch.inf))
