"""The reference of a proof: the whole model with its own processor, and what it gives its text model."""

from __future__ import annotations

import base64
import copy
import io
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trinity.errors import UnsupportedModel
from trinity.preprocess.checkpoint.libraries import how_to_install
from trinity.preprocess.checkpoint.tokenizer_files import load_tokenizer
from trinity.preprocess.loader import load_processor
from trinity.preprocess.text.clip_windows import ClipWindows
from trinity.stages.proof.prompts import ProofPrompt, one_image

_KEPT = {"bos_token_id", "pad_token_id", "cache_implementation"}  # defaults that ban, stop and choose nothing
PROOF_OUTPUTS = 4
SHORT_OUTPUTS = 2  # tokens of prompts other than the longest: the first of a prefill, the second of a decode


@dataclass(frozen=True)
class Expected:
    """Outcome of transformers' documented route for a prompt.

    - ``ids``: of the prompt. ``logits`` [outputs, vocabulary], ``tokens``: of ``generate()``.
    - ``embeds`` ([tokens, hidden]), ``positions`` ([axes, tokens]): what the text model was given; None if nothing.
    - ``inputs``: of the model, by name.
    - ``further``: what else the text model was given first, by its keyword: tensors, and tensors by layer.
    - ``text_writes``: the model's ``generate()`` ran that of its text model.
    """

    ids: list[int]
    logits: Tensor
    tokens: list[int]
    embeds: Tensor | None
    positions: Tensor | None
    inputs: dict[str, Any]
    further: dict[str, Any]
    text_writes: bool

    def find(self, *token_ids: int) -> Tensor:
        """Find the rows [tokens] of the prompt that have one of these tokens, as truth values.

        Where the processor gave a mask of an image's rows, those.
        """
        return find_media(self.inputs, token_ids)


class Reference:
    """The whole model in float32, its processor and its chat template."""

    def __init__(self, directory: Path, config: Any, model: Any) -> None:
        tokenizer = load_tokenizer(directory)
        self.processor = load_processor(directory, config, tokenizer)
        self.own_chats = isinstance(self.processor, ClipWindows)  # its own processor takes clips in chats alone
        if self.own_chats:
            self.processor = load_own_chats(directory)
        self.tokenizer, self.model, self.config = tokenizer, model, config
        drop_defaults(model)
        self.flat = False  # the processor takes the images of a prompt as one list, not nested by prompt
        self.audio_token = ""  # text of a clip, once it is found
        self.joined = False  # its chat template takes content as one string, in which a medium is its token
        self.in_front = False  # the processor puts an image in front of a text by itself

    @property
    def grids(self) -> Any:
        """The model's own way to compute positions of media, which asks for the kind of each token; None if none."""
        return getattr(self.model.base_model, "get_rope_index", None)

    @property
    def has_template(self) -> bool:
        """Tell if prompts are written as chats: not where an image is in front of a text."""
        return self.own_chats or (not self.in_front and bool(getattr(self.processor, "chat_template", None)))

    def list_markers(self, token: str) -> list[str]:
        """List what may stand for an image: the token, and the token between those that the chat template writes.

        Empty where the chat template does not write the token once for an image.
        """
        if not self.has_template:
            return [token]
        if self.explain_template(one_image(), token):
            return []
        if self.joined:
            return [token]
        around = self._write_chat(one_image(), token, add_generation_prompt=False).split(token)
        special = [*self.tokenizer.get_added_vocab(), ""]
        before = max((each for each in special if around[0].endswith(each)), key=len)
        after = max((each for each in special if around[1].startswith(each)), key=len)
        return list(dict.fromkeys((token, f"{before}{token}{after}")))

    def explain_template(self, prompt: ProofPrompt, token: str) -> str:
        """Say why the chat template writes no such token once for the one medium of ``prompt``; "" if it does.

        Content is given it as parts, and else as one string (``joined``).
        """
        refusals = []
        for self.joined in (False, True):
            try:
                written = self._write_chat(prompt, token, add_generation_prompt=False)
            except Exception as error:  # templates raise what they like
                refusals.append(f"{type(error).__name__}: {error!s:.200}")
                continue
            if written.count(token) == 1:
                return ""
            refusals.append("its chat template does not write it once for such a medium")
        self.joined = False
        return refusals[0]

    def _write_chat(self, prompt: ProofPrompt, token: str, **settings: Any) -> str:
        chat = [dict(message) for message in prompt.messages]
        if self.joined:
            tokens = {"image": token, "audio": self.audio_token or token}
            chat = [{**message, "content": _join_parts(message["content"], tokens)} for message in chat]
        return str(self.processor.apply_chat_template(chat, tokenize=False, **settings))

    def _make_joined(self, prompt: ProofPrompt, marker: str) -> dict[str, Any]:
        """Make inputs of a chat whose content is strings: the text that the template writes, with the media."""
        text = self._write_chat(prompt, marker, add_generation_prompt=True)
        if not (prompt.images or prompt.clips):
            return self._make_text_inputs(text)
        bos = self.tokenizer.bos_token
        written = {"add_special_tokens": False} if bos and text.startswith(bos) else {}
        return dict(self.processor(**self._media_keywords(text, prompt), **written, return_tensors="pt"))

    def explain_refusal(self, marker: str) -> str:
        """Say why the processor does not take a text with this marker for an image; "" if it does."""
        refusals = []
        for self.flat in (False, True):
            try:
                found = self.processor(**self._media_keywords(marker, one_image()), return_tensors="pt")
            except Exception as error:  # processors raise what they like
                refusals.append(f"{type(error).__name__}: {error!s:.200}")
                continue
            return "" if int(found["input_ids"].shape[-1]) > 1 else "it is not expanded"
        return refusals[0]

    def find_in_front(self, token: str) -> int | None:
        """Tell if the processor puts an image into a prompt that has none, whatever is there; the id it stands for.

        None where it does not: where it refuses such a text, or makes as much of one with the token.
        """
        made = [self._process_alone(text) for text in ("A boat", f"A boat{token}", "A red boat in a harbour")]
        if made[0] is None or made[2] is None:
            return None
        number, counts = self.tokenizer.convert_tokens_to_ids(token), [0, 0]
        for at, each in enumerate(made[:2]):
            counts[at] = 0 if each is None else each["input_ids"][0].tolist().count(number)
        if counts[0] == 0 or (made[1] is not None and counts[1] != counts[0] + 1):
            return None
        rows = find_rows(made[0])
        return number if rows is None else int(made[0]["input_ids"][0][rows][0])

    def _process_alone(self, text: str) -> dict[str, Any] | None:
        """Process a text and an image, which has no place in it; None if the processor refuses."""
        try:
            return dict(self.processor(text=[text], images=list(one_image().images), return_tensors="pt"))
        except Exception:  # processors raise what they like
            return None

    def _media_keywords(self, text: str, prompt: ProofPrompt) -> dict[str, Any]:
        """Make keywords of the processor for a prompt with media, its images in the form that it takes."""
        images = list(prompt.images) if self.flat else [list(prompt.images)]
        seen, heard = {"images": images} if prompt.images else {}, {"audio": list(prompt.clips)} if prompt.clips else {}
        return {"text": [text], **seen, **heard}

    def inputs(self, prompt: ProofPrompt, marker: str) -> dict[str, Any]:
        """Make a model's inputs in its dtype, float32, as transformers documents it."""
        made = self._make_inputs(prompt, marker)
        floating = {name for name, value in made.items() if isinstance(value, Tensor) and value.is_floating_point()}
        return {name: value.float() if name in floating else value for name, value in made.items()}

    def _make_inputs(self, prompt: ProofPrompt, marker: str) -> dict[str, Any]:
        """Make inputs by the chat template, or else from raw text."""
        if self.own_chats:
            return make_own_inputs(self.processor, prompt)
        if self.has_template and self.joined:
            return self._make_joined(prompt, marker)
        if self.has_template:
            chat = prompt.fill({"image": iter(prompt.images), "audio": iter(prompt.clips)})
            settings = {"tokenize": True, "return_dict": True, "return_tensors": "pt", "add_generation_prompt": True}
            told = self.grids is not None and not prompt.clips
            further = {"processor_kwargs": {"return_mm_token_type_ids": True}} if told else {}
            return dict(self.processor.apply_chat_template(chat, **settings, **further))
        if not (prompt.images or prompt.clips):
            return self._make_text_inputs(raw_text(prompt))
        if self.in_front and not prompt.clips:
            images, text = list(prompt.images), raw_text(prompt).removeprefix("<image>")
            return dict(self.processor(text=[text], images=images, return_tensors="pt"))
        text = raw_text(prompt).replace("<image>", marker).replace("<audio>", self.audio_token)
        return dict(self.processor(**self._media_keywords(text, prompt), return_tensors="pt"))

    def _make_text_inputs(self, text: str) -> dict[str, Any]:
        """Make inputs of a prompt without images; of a processor that takes none, by its tokenizer."""
        try:
            return dict(self.processor(text=[text], return_tensors="pt"))
        except ValueError:
            return dict(self.tokenizer([text], return_tensors="pt"))

    @torch.inference_mode()
    def expect(self, prompt: ProofPrompt, marker: str, language: Any, outputs: int = PROOF_OUTPUTS) -> Expected:
        """Run the model's own ``generate()`` on a prompt, and note what its text model is given first.

        Raises ``ValueError`` if that of a part runs which has not the config of its text.
        """
        inputs = self.inputs(prompt, marker)
        with _noted(language) as notes, _noted_writers(self.model) as writers:
            found = self.model.generate(
                **inputs,
                max_new_tokens=outputs,
                do_sample=False,
                return_dict_in_generate=True,
                output_logits=True,
            )
        first = notes[0] if notes else {}
        length = inputs["input_ids"].shape[1]
        embeds, positions = first.get("inputs_embeds", _place_beside(first, inputs)), first.get("position_ids")
        return Expected(
            ids=inputs["input_ids"][0].tolist(),
            logits=torch.cat(list(found.logits)).float(),
            tokens=found.sequences[0, -outputs:].tolist(),
            embeds=None if embeds is None or embeds.shape[1] != length else embeds[0],
            positions=None if positions is None or positions.shape[-1] != length else positions.reshape(-1, length),
            inputs=inputs,
            text_writes=self._is_text(writers),
            further={name: value for name, value in first.items() if name not in ("inputs_embeds", "position_ids")},
        )

    def _is_text(self, writers: list[Any]) -> bool:
        """Tell if the text model wrote the tokens, in place of the whole. Raises ``ValueError`` for another part."""
        text = self.config.get_text_config(decoder=True)
        if others := [type(each).__name__ for each in writers if each.config is not text and each.config != text]:
            raise ValueError(f"its generate() runs that of {others[0]}, which has other defaults than its text model")
        return bool(writers)


def drop_defaults(model: Any) -> None:
    """Have ``generate()`` of a model and of its parts follow no defaults of the checkpoint: no stops, nothing banned.

    What serves follows them by rules of its own, with tests of their own; here they would say other tokens than a trial
    does, or end before it.
    """
    from transformers import GenerationConfig

    make: Any = GenerationConfig
    plain = make().to_dict()
    for part in model.modules():
        if (own := getattr(part, "generation_config", None)) is not None:
            part.generation_config = found = copy.deepcopy(own)
            for name in plain.keys() - _KEPT:
                setattr(found, name, plain[name])
            found._from_model_config = False  # or it is made anew of the config


def find_rows(inputs: dict[str, Any]) -> Tensor | None:
    """Find the rows [tokens] of a prompt that features replace, where a mask of its processor says so; else None."""
    masks = (value for name, value in inputs.items() if name.endswith("_position_mask"))
    return next((mask[0] == 1 for mask in masks), None)


def find_media(inputs: dict[str, Any], token_ids: Collection[int]) -> Tensor:
    """Find the rows [tokens] of a prompt that features replace: by the mask of its processor, or else by their ids."""
    rows = find_rows(inputs)
    return rows if rows is not None else torch.tensor([each in token_ids for each in inputs["input_ids"][0].tolist()])


def _place_beside(given: dict[str, Any], inputs: dict[str, Any]) -> Tensor | None:
    """Place features that a text model is given beside ids where a mask says: [1, tokens, width], other rows 0."""
    rows = find_rows(inputs)
    if rows is None:
        return None
    floating = [each for each in given.values() if isinstance(each, Tensor) and each.is_floating_point()]
    beside = [each for each in floating if each.ndim == 3 and each.shape[:2] == (1, int(rows.sum()))]
    if len(beside) != 1:
        return None
    placed = beside[0].new_zeros(1, len(rows), beside[0].shape[-1])
    placed[0, rows] = beside[0][0]
    return placed


def _join_parts(parts: list[dict[str, Any]], tokens: dict[str, str]) -> str:
    return "".join(part["text"] if part["type"] == "text" else tokens[part["type"]] for part in parts)


def raw_text(prompt: ProofPrompt) -> str:
    """Write a prompt as text, with ``<image>`` and ``<audio>`` for its media, for models without a chat template."""
    parts = [part for message in prompt.messages for part in message["content"]]
    return " ".join(part["text"] if part["type"] == "text" else f"<{part['type']}>" for part in parts)


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(each) for key, each in value.items()}
    return value.clone() if isinstance(value, Tensor) else value


@contextmanager
def _noted_writers(model: Any) -> Iterator[list[Any]]:
    """Note the parts of ``model`` whose own ``generate()`` is run."""
    parts = [each for each in model.modules() if each is not model and hasattr(each, "generate")]
    found: list[Any] = []

    def note(part: Any, own: Any) -> Any:
        def generate(*given: Any, **named: Any) -> Any:
            found.append(part)
            return own(*given, **named)

        return generate

    for each in parts:
        each.generate = note(each, each.generate)
    try:
        yield found
    finally:
        for each in parts:
            del each.generate


@contextmanager
def _noted(language: Any) -> Iterator[list[dict[str, Any]]]:
    """Note what ``language`` is given, by name, for each of its calls."""
    notes: list[dict[str, Any]] = []

    def note(module: Any, given: Any, named: dict[str, Any]) -> None:
        embedded = given and isinstance(given[0], Tensor) and given[0].is_floating_point()
        every = {**({"inputs_embeds": given[0]} if embedded else {}), **named}
        notes.append({name: _copy(value) for name, value in every.items() if isinstance(value, (Tensor, dict))})

    hook = language.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield notes
    finally:
        hook.remove()


def load_own_chats(directory: Path) -> Any:
    """Load a processor with the tokenizer that writes its chats. Raises ``UnsupportedModel`` where that is not here."""
    from transformers import AutoProcessor

    load: Any = AutoProcessor.from_pretrained
    found = load(directory, local_files_only=True, trust_remote_code=False)
    if hasattr(found.tokenizer, "backend_tokenizer"):  # a plain one, which expands nothing
        raise UnsupportedModel(f"mistral-common writes its chats, and is not here: {how_to_install('mistral-common')}")
    return found


def make_own_inputs(processor: Any, prompt: ProofPrompt) -> dict[str, Any]:
    """Make inputs of a chat with such a processor: each clip as a file of float32 in base64."""
    rate = int(processor.feature_extractor.sampling_rate)
    files = (encode_clip(each, rate) for each in prompt.clips)
    return dict(processor.apply_chat_template(prompt.fill({"audio": files}, "base64")))


def encode_clip(samples: Any, rate: int) -> str:
    """Write float32 samples [samples] as a wav file in base64, to the bit."""
    sound: Any = import_module("soundfile")
    file = io.BytesIO()
    sound.write(file, samples, rate, format="WAV", subtype="FLOAT")
    return base64.b64encode(file.getvalue()).decode()
