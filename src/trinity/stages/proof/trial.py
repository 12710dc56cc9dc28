"""This library's route in a proof: its request processor and its stages, over the whole model that is loaded anyway."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trinity.core.messages import Encode, Open, Prefill, Step, Work
from trinity.memory.block_memory import BlockMemory
from trinity.preprocess.checkpoint.verdicts import MediaFacts
from trinity.preprocess.media.media_kinds import kind_names
from trinity.preprocess.processor import ProcessedRequest, RequestProcessor
from trinity.stage_kinds import all_letters
from trinity.stages.attention.interface import PAGED_ATTENTION, find_attention_name, register_attention
from trinity.stages.attention.latent import watch_expansions
from trinity.stages.attention.row_counts import answer_counts
from trinity.stages.encode import EncodeStage
from trinity.stages.language import LanguageStage
from trinity.stages.models.checks import refuse_layers, set_attention
from trinity.stages.models.generic import GenericAdapter
from trinity.stages.models.indexers import watch_indexers
from trinity.stages.models.loaded_model import LoadedModel
from trinity.stages.models.partial_models import list_text_modules
from trinity.stages.models.state_probe import prepare_states
from trinity.stages.models.whole_forward import survey_text
from trinity.stages.proof.prompts import ProofPrompt
from trinity.stages.proof.reference import PROOF_OUTPUTS
from trinity.stages.proof.trial_cache import EncodedMedia, TrialCache

IMAGE_ROWS = 16
_SHORT = 1  # row of a chunk: some models run one row by other arithmetic (Nemotron-H)


@dataclass(frozen=True)
class Found:
    """Tokens and logits [outputs, vocabulary] of this library's route."""

    tokens: list[int]
    logits: Tensor


class TriedModel:
    """A checkpoint with facts that are to be proven.

    - ``model``: the whole. ``trial_cache``: what its trials share.
    - ``make_adapter``: (config, facts) -> the adapter on trial.
    """

    def __init__(
        self, directory: Path, model: Any, facts: MediaFacts, trial_cache: TrialCache, make_adapter: Any
    ) -> None:
        self.facts, self._trial_cache = facts, trial_cache
        trial_cache.open(facts)
        self.adapter: GenericAdapter = make_adapter(model.config, facts)
        refuse_layers(self.adapter)
        prepare_states(model, self.adapter)
        self.loaded = LoadedModel(
            *(directory, all_letters(), model.config, self.adapter, torch.float32, torch.device("cpu"), ""),
            vision=model,
            language=model,
        )
        if self.loaded.states is None:
            with self._paged():
                found = survey_text(model, self.adapter, self.loaded.device)
            self.loaded = replace(self.loaded, kv_row=found)

    @property
    def processor(self) -> RequestProcessor:
        """The request processor of these facts."""
        return self._trial_cache.open(self.facts)

    def process(self, prompt: ProofPrompt) -> ProcessedRequest:
        """Make ids, spans and encoder inputs of a prompt, item by item."""
        return self._trial_cache.process(self.facts, prompt)

    def encode(self, made: ProcessedRequest) -> EncodedMedia:
        """Encode all items without the text model, into blocks that lie scattered; once for equal facts."""
        key = self._trial_cache.key_of(self.facts, made)
        if key not in self._trial_cache.encoded:
            self._trial_cache.encoded[key] = self._encode(made)
        return self._trial_cache.encoded[key]

    def _encode(self, made: ProcessedRequest) -> EncodedMedia:
        counts = [-(-span.tokens // IMAGE_ROWS) for span in made.work.media]
        shape = self.loaded.image_shape(IMAGE_ROWS)
        if shape is None or not counts:
            return None, []
        memory = BlockMemory(shape, sum(counts))
        free = list(range(sum(counts)))
        blocks = [tuple(free.pop() for _ in range(count)) for count in counts]
        encodes = [
            Encode(made.work.request, number, span, blocks[number], made.inputs[number])
            for number, span in enumerate(made.work.media)
        ]
        with self._without_language():
            EncodeStage(self.loaded, memory).forward(Step(0, "joint", encodes=tuple(encodes)))
        return memory, blocks

    def features(self, made: ProcessedRequest) -> list[Tensor]:
        """Return the rows [tokens, width] of each item, as its blocks hold them."""
        memory, blocks = self.encode(made)
        if memory is None:
            return []
        return [
            torch.cat([memory.tensor[block] for block in mine])[: span.tokens].clone()
            for mine, span in zip(blocks, made.work.media, strict=True)
        ]

    def embed_placeholder(self) -> Tensor:
        """Embed the token that stands for an image: [1, hidden]."""
        embedding = self.adapter.language(self.loaded.language).get_input_embeddings()
        found: Tensor = embedding(torch.tensor([self.facts.image_token_id]))
        return found

    def positions(self, work: Work) -> np.ndarray:
        """Compute the rotary positions [axes, length] of a prompt."""
        ids = np.array(work.prompt, dtype=np.int64)
        kinds = np.zeros_like(ids)
        for kind, token in self.facts.media_tokens.items():
            kinds[ids == token] = 1 + kind_names().index(kind)
        found = self.adapter.positions(self.loaded.language, ids, work.media, kinds)
        return np.arange(len(ids))[None] + found.delta if found.prompt is None else found.prompt

    def run(self, made: ProcessedRequest, *, cut: bool, outputs: int = PROOF_OUTPUTS) -> Found:
        """Prefill, in chunks that cut through media or in one, decode to so many tokens, and note the logits."""
        memory, blocks = self.encode(made)
        kv = BlockMemory(self.loaded.kv_shape(), -(-(len(made.work.prompt) + PROOF_OUTPUTS) // 16))
        states, logits = self._open_states(), list[Tensor]()
        with self._paged():
            stage = LanguageStage(
                *(self.loaded, kv, memory),
                observe=lambda request, index, scores: logits.append(scores.clone()),
                states=states,
            )
            table = tuple(reversed(range(kv.blocks)))
            held = () if states is None else (states.blocks - 1,)
            stage.open(Open(work=made.work, blocks=table, images=tuple(blocks), state=held))
            tokens = self._steps(stage, made, self._list_stops(made, cut), outputs)
            stage.close(made.work.request)
        return Found(tokens, torch.stack(logits).float())

    def _open_states(self) -> BlockMemory | None:
        """Make blocks of states for a model whose layers keep some, which begin with what is not its own."""
        shape = self.loaded.state_shape()
        if shape is None:
            return None
        memory = BlockMemory(shape, 2)
        memory.tensor.fill_(7)
        return memory

    def _steps(self, stage: LanguageStage, made: ProcessedRequest, stops: list[int], outputs: int) -> list[int]:
        name, start, tokens = made.work.request, 0, list[int]()
        for stop in stops:
            asked = Prefill(name, start, stop - start, stop == stops[-1])
            tokens += [one.token for one in stage.forward(Step(1, "joint", prefills=(asked,))).values()]
            start = stop
        while len(tokens) < outputs:
            tokens.append(stage.forward(Step(2, "joint", decodes=(name,)))[name].token)
        return tokens

    def _list_stops(self, made: ProcessedRequest, cut: bool) -> list[int]:
        """List where chunks end: in the middle of each medium, or of a text, and once more a row behind.

        They are few, since each reads all weights.
        """
        end = len(made.work.prompt)
        middles = [span.offset + (span.tokens + 1) // 2 for span in made.work.media] or [end // 2]
        wanted = [*middles, middles[0] + _SHORT] if cut else []
        return sorted({end, *(self._stop(made, each) for each in wanted if 0 < each < end)})

    def _stop(self, made: ProcessedRequest, stop: int) -> int:
        """Move the end of a chunk behind the image that it would cut, if that may not be cut."""
        uncut = [span.uncut for span in made.work.media]
        return max([end for start, end in uncut if start < stop < end], default=stop)

    @contextmanager
    def _paged(self) -> Iterator[None]:
        """Have the text model use paged attention."""
        register_attention()
        language = self.adapter.language(self.loaded.language)
        answer_counts(language)
        watch_expansions(language)
        watch_indexers(language)
        self.adapter.mark_layers(self.loaded.language)
        own = find_attention_name(language.config)
        set_attention(self.loaded.language, self.adapter, PAGED_ATTENTION)
        try:
            yield
        finally:
            language.set_attn_implementation(own)

    @contextmanager
    def _without_language(self) -> Iterator[None]:
        """Take the text model away, as an encoder's instance has none."""
        held = [
            (owner, name, getattr(owner, name)) for owner, name in list_text_modules(self.loaded.vision, self.adapter)
        ]
        for owner, name, _ in held:
            setattr(owner, name, None)
        try:
            yield
        finally:
            for owner, name, module in held:
                setattr(owner, name, module)
