"""Runs a proof: each part of this library's route against the model's own, from the prompt to its greedy tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from trinity.errors import TrinityError
from trinity.preprocess.checkpoint.config_file import read_config
from trinity.preprocess.checkpoint.verdicts import MediaFacts, ProofPart, ProofVerdict, keep_verdict
from trinity.stages.models.generic import FEATURE_WAYS, GenericAdapter
from trinity.stages.models.own_draws import own_draws
from trinity.stages.proof.prompts import (
    ProofPrompt,
    ask_about,
    image_beside,
    long_question,
    one_image,
    square_beside,
    text_alone,
    three_images,
)
from trinity.stages.proof.reference import SHORT_OUTPUTS, Expected
from trinity.stages.proof.subject import TOLERANCE, Differs, Subject, relative_error
from trinity.stages.proof.trial import Found, TriedModel

LEAST_CHANGE = 50 * TOLERANCE  # of logits by another image: less would be too little to see a fault by
_SAME = TOLERANCE / 20  # of features in another batch
_NO_VIDEOS = "a proof has no videos; those of listed types serve (docs/models.md)"

Proof = Callable[[Subject, MediaFacts], Iterator[tuple[ProofPart, MediaFacts]]]


@own_draws()
def prove(directory: Path, make_adapter: Any = GenericAdapter) -> ProofVerdict:
    """Load a multimodal checkpoint whole, run every part of its proof, and keep the verdict.

    ``make_adapter`` (``GenericAdapter``): (config, facts) -> the adapter on trial; with another the verdict is not
    kept. torch's random state stays as it was. Raises ``ConfigError`` and what transformers raises where the checkpoint
    cannot be loaded at all.
    """
    begun = loaded = time.monotonic()
    parts, serves = list[ProofPart](), list[str]()
    facts, subject = MediaFacts(), None
    try:
        subject = Subject.load(directory, make_adapter)
        loaded = time.monotonic()
        facts = _prove_kinds(subject, parts)
        serves = [kind for kind in subject.kinds if kind not in facts.refused]
    except Differs as error:
        parts.append(ProofPart(error.name, False, error.said))
    finally:
        if subject is not None:
            subject.close()
    verdict = ProofVerdict(
        model_type=str(read_config(directory).model_type),
        parts=tuple(parts),
        serves=tuple(serves),
        facts=facts,
        load_s=loaded - begun,
        proof_s=time.monotonic() - loaded,
    )
    if make_adapter is GenericAdapter:
        keep_verdict(directory, verdict)
    return verdict


def _prove_kinds(subject: Subject, parts: list[ProofPart]) -> MediaFacts:
    """Prove each kind of prompt by itself and note its parts; the facts, with the kinds that differ as ``refused``.

    Raises ``Differs``, of the kind of media that differed first, where none agrees.
    """
    facts, differing = MediaFacts(), dict[str, Differs]()
    for kind in subject.kinds:
        if kind == "text" and not facts.media_tokens:
            break
        tried = facts
        try:
            for part, found in PROOFS[kind](subject, facts):
                parts.append(part)
                tried = found
        except Differs as error:
            differing[kind] = error
        else:
            facts = tried
    if not facts.media_tokens:
        raise next(iter(differing.values()))
    refused = {kind: str(error) for kind, error in differing.items()}
    parts.extend(ProofPart(kind, False, why, spared=True) for kind, why in refused.items())
    unproven = {"video": _NO_VIDEOS} if subject.takes_unlisted_videos else {}
    return msgspec.structs.replace(facts, refused=refused | unproven)


def _prove_images(subject: Subject, _: MediaFacts) -> Iterator[tuple[ProofPart, MediaFacts]]:
    """Prove images, and find the facts on the way."""
    prompts = (one_image(), three_images() if subject.takes_several else long_question())
    expected = [subject.expect(prompts[0], outputs=SHORT_OUTPUTS), subject.expect(prompts[1])]
    other = subject.expect(one_image(seed=1), outputs=1)
    facts = subject.guess_facts(expected[0])
    count = int(expected[0].find(facts.image_token_id).sum())
    yield ProofPart("processor", True, f"loads, and expands an image to {count} tokens"), facts
    facts = _find_features(subject, facts, prompts[0], expected[0])
    causal = _has_causal_encoder(subject)
    if not (facts.in_front or causal):
        facts = _find_joined(subject, facts, (expected[0], other))
    why = _refuses_several(subject, facts, prompts[1], expected[1])
    if not why and subject.takes_several and causal:
        why = _refuses_several(subject, facts, square_beside(), subject.expect(square_beside(), outputs=1))
    if why:
        yield ProofPart("several images", False, why, spared=True), facts
        facts, prompts = msgspec.structs.replace(facts, single=True), (prompts[0], long_question())
        expected[1] = subject.expect(prompts[1])
    trial = open_tried(subject, facts)
    for prompt, wanted in zip(prompts, expected, strict=True):
        yield from ((part, facts) for part in prove_inputs(trial, prompt, wanted))
    facts, *parts = _prove_attention(subject, facts, prompts, expected)
    for part in parts:
        yield part, facts
    if facts.skipped >= 0:
        yield _prove_skipped(subject, facts), facts
    yield prove_control("image", other, expected[0]), facts


def _has_causal_encoder(subject: Subject) -> bool:
    """Tell if attention of an encoder is causal where it is given no mask, which is left out where it hides nothing.

    So what it makes of an image may depend on whether another in the same call has padding (Phi-4-multimodal).
    """
    base = subject.model.base_model
    if subject.language_name:
        text = set(subject.language.modules())
        return any(getattr(each, "is_causal", False) for each in base.modules() if each not in text)
    towers = [getattr(base, name) for name in subject.towers]
    return any(getattr(each, "is_causal", False) for tower in towers for each in tower.modules())


def _refuses_several(subject: Subject, facts: MediaFacts, prompt: ProofPrompt, expected: Expected) -> str:
    """Say why a prompt has but one image: the model's own features of each alone are others; "" if they are not."""
    if not subject.takes_several or expected.embeds is None:
        return ""
    trial = open_tried(subject, facts)
    try:
        _prove_ids(trial, prompt, expected)
        _prove_features(trial, prompt, expected)
    except Differs as error:
        if error.name == "features":
            alone = [subject.expect(ask_about(each), outputs=1) for each in prompt.images]
            change = relative_error(_own_features(facts, [expected]), _own_features(facts, alone))
            return f"its own features of an image differ by {change:.2g} beside others" if change > TOLERANCE else ""
    return ""


def _prove_text(subject: Subject, facts: MediaFacts) -> Iterator[tuple[ProofPart, MediaFacts]]:
    yield prove_logits(subject, facts, text_alone(), subject.expected_text), facts


PROOFS: dict[str, Proof] = {"image": _prove_images, "text": _prove_text}
"""Kinds of input, each with its proof: parts in order with the facts so far, or ``Differs``.

What the processor does not take is left out (``Subject.kinds``). The first one that agrees finds the facts.
"""


def prove_inputs(trial: TriedModel, prompt: ProofPrompt, expected: Expected) -> Iterator[ProofPart]:
    """Prove what the text model is given for a prompt: ids, features of media, positions."""
    yield _prove_ids(trial, prompt, expected)
    yield _prove_features(trial, prompt, expected)
    yield _prove_positions(trial, prompt, expected)


def open_tried(subject: Subject, facts: MediaFacts) -> TriedModel:
    """Open a trial of these facts. Raises ``Differs`` where this library refuses the model."""
    try:
        return TriedModel(subject.directory, subject.model, facts, subject.trial_cache, subject.make_adapter)
    except TrinityError as error:
        raise Differs("layers or processor", f"not served: {error!s:.400}") from error


def _run(name: str, run: Callable[[], Any]) -> Any:
    """Run a part of this library's route; what it raises is what differs."""
    try:
        return run()
    except Differs:
        raise
    except Exception as error:
        raise Differs(name, f"this library's route fails ({type(error).__name__}: {error!s:.300})") from error


def _prove_ids(trial: TriedModel, prompt: ProofPrompt, expected: Expected) -> ProofPart:
    name = "prompt ids"
    ids = list(_run(name, lambda: trial.process(prompt)).work.prompt)
    if ids != expected.ids:
        at = next((i for i, pair in enumerate(zip(ids, expected.ids, strict=False)) if pair[0] != pair[1]), "the end")
        raise Differs(name, f"{len(ids)} tokens for {prompt.name}, and {len(expected.ids)} by its own; first at {at}")
    return ProofPart(name, True, f"{len(ids)} tokens for {prompt.name}, all equal")


def _prove_features(trial: TriedModel, prompt: ProofPrompt, expected: Expected) -> ProofPart:
    name = "features"
    made = trial.process(prompt)
    rows = torch.cat(_run(name, lambda: trial.features(made)))
    if expected.embeds is None:
        return ProofPart(name, True, f"{len(rows)} rows for {prompt.name}; compared by their logits alone")
    own = expected.embeds[expected.find(*trial.facts.media_tokens.values())]
    if trial.facts.added:
        own = own - trial.embed_placeholder()
    error = relative_error(rows[:, : own.shape[-1]], own)
    if error > TOLERANCE:
        raise Differs(name, f"{len(rows)} rows for {prompt.name} are {error:.2g} off")
    return ProofPart(name, True, f"{len(rows)} rows for {prompt.name}, {error:.1g} off at most")


def _find_features(subject: Subject, facts: MediaFacts, prompt: ProofPrompt, expected: Expected) -> MediaFacts:
    """Find out what makes the features of an image that the text model is given; the usual way if nothing does."""
    for codes, added, way in product((False, True), (False, True), FEATURE_WAYS):
        tried = msgspec.structs.replace(facts, features=way, added=added, embeds_codes=codes)
        trial = open_tried(subject, tried)
        try:
            _prove_features(trial, prompt, expected)
        except Exception:  # what a processor or a model raises is found again, and said, by the proof of that part
            continue
        return tried
    return facts


def _prove_positions(trial: TriedModel, prompt: ProofPrompt, expected: Expected) -> ProofPart:
    name = "positions"
    work = trial.process(prompt).work
    found = torch.from_numpy(_run(name, lambda: trial.positions(work)))
    if expected.positions is None:
        return ProofPart(name, True, "the model names none; compared by its logits alone")
    own = expected.positions[-found.shape[0] :]  # some put the text's own in front
    if own.shape != found.shape or not torch.equal(own.long(), found.long()):
        raise Differs(name, f"rotary positions of {prompt.name} differ in {found.shape[0]} axes")
    return ProofPart(name, True, f"{found.shape[0]} axes for {prompt.name}, up to {int(found.max())}, all equal")


def _prove_attention(
    subject: Subject, facts: MediaFacts, prompts: Sequence[ProofPrompt], expected: Sequence[Expected]
) -> tuple[MediaFacts, ProofPart, ProofPart]:
    """Find which attention among an image's tokens, and which head, the model has, and prove its logits with them.

    One prefill of the first prompt tells; where several choices pass it, the second prompt in chunks does.
    """
    errors, failed = list[float](), list[Differs]()
    for choice in subject.list_choices():
        tried = msgspec.structs.replace(facts, **choice)
        first, error = _try_choice(subject, tried, prompts[0], expected[0])
        errors.append(first)
        if errors[-1] > TOLERANCE:
            continue
        try:
            return tried, *_prove_choice(subject, tried, prompts, expected, error)
        except Differs as differs:
            failed.append(differs)
    if failed:
        raise failed[0]
    said = f"logits of one prefill are {errors[0]:.2g} off with causal images, {errors[-1]:.2g} with both directions"
    raise Differs("attention among an image's tokens", said)


def _try_choice(subject: Subject, facts: MediaFacts, prompt: ProofPrompt, expected: Expected) -> tuple[float, float]:
    """Measure the logits of one prefill; infinite where a choice but the usual one does not run."""
    try:
        return measure_logits(subject, facts, prompt, expected)
    except Differs:
        usual = subject.list_choices()[0]
        if all(getattr(facts, name) == value for name, value in usual.items()):
            raise
        return float("inf"), float("inf")


def _prove_choice(
    subject: Subject, facts: MediaFacts, prompts: Sequence[ProofPrompt], expected: Sequence[Expected], error: float
) -> tuple[ProofPart, ProofPart]:
    """Prove a choice with which the first prompt's logits were ``error`` off, decodes included."""
    part = prove_logits(subject, facts, prompts[1], expected[1])
    if error > TOLERANCE:
        raise Differs("logits of decodes", f"{error:.2g} off for {prompts[0].name}")
    said = f"{_name_attention(facts)}; logits of one prefill of {prompts[0].name} {error:.1g} off"
    return ProofPart("attention", True, said), part


def _prove_skipped(subject: Subject, facts: MediaFacts) -> ProofPart:
    """Prove that positions leave a padding token out, and that the text model has those of the longest text."""
    prompt = image_beside(f"Who is{subject.reference.tokenizer.convert_ids_to_tokens(facts.skipped)} there?")
    expected = subject.expect(prompt, outputs=SHORT_OUTPUTS)
    if facts.skipped not in expected.ids:
        raise Differs("positions", f"no text has the padding token {facts.skipped}, without which they are counted")
    length = open_tried(subject, facts).processor.context_length
    try:
        subject.run_at(length - 1 + facts.first)
    except Exception as error:
        said = (
            f"it has none for the last of {length} tokens ({error!s:.100}); lower max_position_embeddings in its config"
        )
        raise Differs("positions", said) from error
    return prove_logits(subject, facts, prompt, expected)


def measure_logits(subject: Subject, facts: MediaFacts, prompt: ProofPrompt, expected: Expected) -> tuple[float, float]:
    """Return the relative error of the logits of one prefill, and that with its decodes."""
    found, error = _run_trial(subject, facts, prompt, expected, cut=False)
    return relative_error(found.logits[0], expected.logits[0]), error


def _name_attention(facts: MediaFacts) -> str:
    if facts.whole_prompt:
        return "in both directions among all tokens of a prompt with an image"
    if facts.together:
        return "in both directions among all tokens of all images of a prompt"
    way = "in both directions" if facts.whole_media else "causal"
    return f"among an image's tokens {way}" + ", in layers with a window alone" * facts.whole_windows


def _run_trial(
    subject: Subject, facts: MediaFacts, prompt: ProofPrompt, expected: Expected, *, cut: bool
) -> tuple[Found, float]:
    """Run a prompt by this library's route; what it gives, and the relative error of its logits."""
    trial = open_tried(subject, facts)
    found = _run("logits", lambda: trial.run(trial.process(prompt), cut=cut, outputs=len(expected.tokens)))
    return found, relative_error(found.logits, expected.logits)


def prove_logits(subject: Subject, facts: MediaFacts, prompt: ProofPrompt, expected: Expected) -> ProofPart:
    """Prove the logits and greedy tokens of a prompt in chunks that cut through its media.

    A text model whose states do not go on with several tokens at once, or with one, is tried in its other ways.
    """
    found, error = _run_trial(subject, facts, prompt, expected, cut=True)
    while error > TOLERANCE and _run("logits", subject.run_otherwise):
        found, error = _run_trial(subject, facts, prompt, expected, cut=True)
    if error > TOLERANCE:
        chunks = "chunks" + " that cut its media" * bool(prompt.images or prompt.clips)
        raise Differs("logits under chunking", f"{error:.2g} off for {prompt.name} in {chunks}")
    if found.tokens != expected.tokens:
        raise Differs("greedy tokens", f"{found.tokens} for {prompt.name}, and {expected.tokens} by its own generate()")
    said = f"{prompt.name} in chunks, {len(found.tokens)} tokens decoded: {error:.1g} off, tokens equal"
    return ProofPart("logits", True, said)


def _find_joined(subject: Subject, facts: MediaFacts, alone: Sequence[Expected]) -> MediaFacts:
    """Find out whether two images of one size give the same features in one batch as each ``alone`` by its own.

    Not asked of those that stand in front of a prompt, one in each, which are encoded each by itself: beside them may
    be its text. Nor of those of a causal encoder.
    """
    prompt = ProofPrompt("two images", three_images().messages[-1:], (*one_image().images, *one_image(seed=1).images))
    joined = msgspec.structs.replace(facts, joined=True)
    try:
        found = _encode_all(subject, joined, prompt)
        if relative_error(found, _own_features(facts, alone)) <= _SAME:
            return joined
        same = relative_error(found, _encode_all(subject, facts, prompt)) <= _SAME  # tiled otherwise than alone
    except Exception:  # what a model says to a batch that it cannot take
        return facts
    return joined if same else facts


def _encode_all(subject: Subject, facts: MediaFacts, prompt: ProofPrompt) -> Tensor:
    trial = open_tried(subject, facts)
    return torch.cat(trial.features(trial.process(prompt)))


def _own_features(facts: MediaFacts, expected: Sequence[Expected]) -> Tensor:
    """Return the rows that the text model was given for images; none where it was not seen what it was given."""
    rows = [each.embeds[each.find(facts.image_token_id)] for each in expected if each.embeds is not None]
    return torch.cat(rows) if rows else torch.empty(0)


def prove_control(medium: str, other: Expected, expected: Expected) -> ProofPart:
    """Prove that another ``medium`` ("image") gives other logits: else equal ones would prove nothing."""
    change = relative_error(other.logits[0], expected.logits[0])
    if change < LEAST_CHANGE:
        said = f"another {medium} changes the model's own logits by {change:.1g} only: nothing is proven"
        raise Differs("control", said)
    return ProofPart("control", True, f"another {medium} changes the logits by {change:.1g}")
