"""The proof of audio: clips of odd lengths by this library's route, against transformers' own processor and model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import torch

from trinity.preprocess.checkpoint.verdicts import MediaFacts, ProofPart
from trinity.preprocess.media.audio_kind import find_extractor
from trinity.stages.proof.prompts import ProofPrompt, image_and_clip, one_clip, two_clips
from trinity.stages.proof.prove import (
    measure_logits,
    open_tried,
    prove_control,
    prove_inputs,
    prove_logits,
)
from trinity.stages.proof.reference import SHORT_OUTPUTS, Expected, Reference
from trinity.stages.proof.subject import TOLERANCE, Differs, Subject, relative_error

_LONG_S = 2.317  # of the long clip beyond what a processor pads to: an odd number of frames
_MOST_TOKENS = 4  # that a clip may need to have, before the model takes it
_SEEN_IN = ("audio_token_id", "audio_token_index")


def prove_audio(subject: Subject, facts: MediaFacts) -> Iterator[tuple[ProofPart, MediaFacts]]:
    """Prove clips: one, a long one, two in a prompt where the processor takes them, and one beside an image."""
    rate = int(find_extractor(subject.reference.processor).sampling_rate)
    facts, part = _find_token(subject, facts, rate)
    yield part, facts
    first = one_clip(rate)
    expected = subject.expect(first, outputs=SHORT_OUTPUTS)
    _refuse_noise(subject, first, expected)
    placed = {"audio_token_id": _find_id(subject, expected), "audio_token": subject.reference.audio_token}
    heard = facts.media_tokens.keys() - {"audio"}
    facts = msgspec.structs.replace(facts, **placed) if heard else subject.guess_facts(expected, placed)
    prompts, part = _list_prompts(subject, facts, rate)
    yield part, facts
    wanted = [expected, *map(subject.expect, prompts[1:])]
    if heard:
        facts = _find_beside(subject, facts, prompts[-1], wanted[-1])
    trial = open_tried(subject, facts)
    for prompt, own in zip(prompts, wanted, strict=True):
        yield from ((part, facts) for part in prove_inputs(trial, prompt, own))
    if not heard:
        facts, part = _find_head(subject, facts, first, expected)
        yield part, facts
    for prompt, own in zip(prompts, wanted, strict=True):
        yield prove_logits(subject, facts, prompt, own), facts
    yield prove_control("clip", subject.expect(one_clip(rate, seed=1), outputs=1), expected), facts
    facts, part = _find_least(subject, facts, rate)
    yield part, facts


def _find_token(subject: Subject, facts: MediaFacts, rate: int) -> tuple[MediaFacts, ProofPart]:
    """Find the text that stands for a clip in a prompt, which the processor expands."""
    refusals = {}
    for token in _list_tokens(subject):
        refusals[token] = _explain_refusal(subject.reference, token, rate)
        if not refusals[token]:
            subject.reference.audio_token = token
            return facts, ProofPart("processor", True, f"loads, and expands {token} for a clip")
    said = "; ".join(f"{token}: {why}" for token, why in refusals.items())
    raise Differs("placeholder", f"no token stands for a clip in its processor ({said})")


def _list_tokens(subject: Subject) -> list[str]:
    """List texts that may stand for a clip, likely ones first."""
    processor, tokenizer = subject.reference.processor, subject.reference.tokenizer
    found = [getattr(holder, "audio_token", None) for holder in (processor, tokenizer)]
    numbers = [number for number in _named_ids(subject) if number is not None]
    found += [tokenizer.convert_ids_to_tokens(number) for number in numbers]
    return list(dict.fromkeys(str(each) for each in [*found, "<audio>"] if each is not None))


def _named_ids(subject: Subject) -> list[int | None]:
    found = [getattr(subject.config, name, None) for name in _SEEN_IN]
    return [number if isinstance(number, int) and number >= 0 else None for number in found]


def _explain_refusal(reference: Reference, token: str, rate: int) -> str:
    """Say why the processor does not take a text with this token for a clip; "" if it does."""
    prompt = one_clip(rate)
    if reference.own_chats:
        return _explain_own_refusal(reference, token, prompt)
    if reference.has_template and (why := reference.explain_template(prompt, token)):
        return why
    try:
        found = reference.processor(text=[token], audio=list(prompt.clips), return_tensors="pt")
    except Exception as error:  # processors raise what they like
        return f"{type(error).__name__}: {error!s:.200}"
    return "" if int(found["input_ids"].shape[-1]) > 1 else "it is not expanded"


def _explain_own_refusal(reference: Reference, token: str, prompt: ProofPrompt) -> str:
    """Say why the processor puts no such tokens for a clip into a chat; "" if it does."""
    try:
        ids = reference.inputs(prompt, "")["input_ids"][0].tolist()
    except Exception as error:  # processors raise what they like
        return f"{type(error).__name__}: {error!s:.200}"
    return "" if reference.tokenizer.convert_tokens_to_ids(token) in ids else "it is not in its chats"


def _find_id(subject: Subject, expected: Expected) -> int:
    """Find the token id whose rows features replace. Raises ``Differs``."""
    reference = subject.reference
    named = [*_named_ids(subject), reference.tokenizer.convert_tokens_to_ids(reference.audio_token)]
    for number in named:
        if number is not None and number in expected.ids:
            return int(number)
    raise Differs("placeholder", f"none of the tokens {named} that stand for audio is in the prompt's ids")


def _refuse_noise(subject: Subject, prompt: ProofPrompt, expected: Expected) -> None:
    """Raise ``Differs`` for a model that draws something at random: nothing could be equal to its own route."""
    change = relative_error(subject.expect(prompt, outputs=1).logits[0], expected.logits[0])
    if change > TOLERANCE:
        said = "it draws at random as it encodes: its own logits are others from one run to the next"
        raise Differs("model's own route", said)


def _list_prompts(subject: Subject, facts: MediaFacts, rate: int) -> tuple[list[ProofPrompt], ProofPart]:
    """List the prompts that this processor takes, and say which."""
    reader: Any = open_tried(subject, facts).processor.readers["audio"]
    long = one_clip(rate, 3, reader.window_samples / rate + _LONG_S)
    found, said = [one_clip(rate), long], "several clips in a prompt"
    alone = reader.alone_because
    if alone:
        said = f"one clip in a prompt: {alone}"
    else:
        found.append(two_clips(rate))
    if "image" in facts.media_tokens:
        found.append(image_and_clip(rate))
    return found, ProofPart("clips", True, said)


def _find_beside(subject: Subject, facts: MediaFacts, prompt: ProofPrompt, expected: Expected) -> MediaFacts:
    """Find the input of an image by which a clip beside it becomes something else; the facts as they are for none."""
    names = [name for name, value in expected.inputs.items() if torch.is_tensor(value) and value.is_floating_point()]
    for name in ("", *names):
        tried = msgspec.structs.replace(facts, beside=name)
        try:
            _ = [*prove_inputs(open_tried(subject, tried), prompt, expected)]
        except Exception:  # what a model raises is found again, and said, by the proof of that part
            continue
        return tried
    return facts


def _find_head(
    subject: Subject, facts: MediaFacts, prompt: ProofPrompt, expected: Expected
) -> tuple[MediaFacts, ProofPart]:
    """Find which head the model has, by the logits of one prefill; tokens of a clip never see later ones."""
    errors = list[float]()
    for choice in subject.list_choices():
        if choice["whole_media"]:
            continue
        tried = msgspec.structs.replace(facts, **choice)
        errors.append(measure_logits(subject, tried, prompt, expected)[0])
        if errors[-1] <= TOLERANCE:
            said = f"causal among a clip's tokens; logits of one prefill of {prompt.name} {errors[-1]:.1g} off"
            return tried, ProofPart("attention", True, said)
    raise Differs("attention among a clip's tokens", f"logits of one prefill are {errors[0]:.2g} off")


def _find_least(subject: Subject, facts: MediaFacts, rate: int) -> tuple[MediaFacts, ProofPart]:
    """Find the fewest tokens of a clip that the model's own ``generate()`` takes, by the shortest clips of so many."""
    refusals = list[str]()
    for tokens in range(1, _MOST_TOKENS + 1):
        tried = msgspec.structs.replace(facts, clip_tokens=tokens)
        reader: Any = open_tried(subject, tried).processor.readers["audio"]
        least = reader.least_samples
        try:
            subject.expect(one_clip(rate, seconds=(least + 0.5) / rate), outputs=SHORT_OUTPUTS)
        except Differs as error:
            refusals.append(error.said)
            continue
        return tried, ProofPart("least", True, f"a clip has at least {least} samples, {least / rate:.3f} s")
    raise Differs("least length", f"clips of up to {_MOST_TOKENS} tokens fail: {refusals[0]}")
