"""Serve with transformers: continuous batching (``generate_batch``'s manager), or ``generate()`` as the oracle.

Continuous batching of 5.23 takes token ids only. Images are encoded here, one after another as requests come. Ids
beyond the vocabulary stand for their features, which our embedding looks up: nothing else is changed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, GenerationConfig

from trinity.bench.engines.wire import (
    ServerWire,
    TokenUpdate,
    WireMessage,
    decode_images,
    serve_engine,
    take_new_tokens,
)

TOKEN_WAIT_S = 0.01  # wait for the manager's next token, before the client's next requests are read
PAGE_TOKENS = 256  # tokens of a KV block


class TransformersModel:
    """The whole model, its language model for batching, and its image encoder."""

    def __init__(self, settings: WireMessage) -> None:
        directory = Path(settings["checkpoint"])
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        self.takes_images = hasattr(config, "vision_config")
        family: Any = AutoModelForImageTextToText if self.takes_images else AutoModelForCausalLM
        dtype = getattr(torch, settings["dtype"])
        self.whole = family.from_pretrained(
            directory, dtype=dtype, local_files_only=True, trust_remote_code=False
        ).eval()
        if self.takes_images:
            # Not from the package root: some releases hide the class there unless torchvision is installed.
            from transformers.models.auto.image_processing_auto import AutoImageProcessor

            load: Any = AutoImageProcessor.from_pretrained
            self._images = load(directory, backend="pil", local_files_only=True, trust_remote_code=False)

    def pixels(self, request: WireMessage) -> dict[str, Any]:
        if not request["images"]:
            return {}
        found = self._images(decode_images(request), return_tensors="pt")["pixel_values"]
        return {"pixel_values": found.to(self.whole.dtype)}

    def features(self, request: WireMessage) -> Any:
        """Encode a request's images: rows of all its visual tokens, in order, [tokens, width]."""
        with torch.inference_mode():
            found = self.whole.model.get_image_features(**self.pixels(request))
        return torch.cat(list(getattr(found, "pooler_output", found)))

    def language(self) -> Any:
        """Return the language model with its head, as ``generate_batch`` takes it; the weights are shared."""
        if not self.takes_images:
            return self.whole
        with torch.device("meta"):
            make: Any = AutoModelForCausalLM.from_config
            alone = make(self.whole.config.get_text_config(), dtype=self.whole.dtype)
        alone.model, alone.lm_head = self.whole.model.language_model, self.whole.lm_head
        return alone.eval()


class FeatureEmbedding(torch.nn.Module):
    """An embedding whose ids from ``first`` on are rows of features, kept until their request ends."""

    def __init__(self, words: Any, first: int) -> None:
        super().__init__()
        self.words, self.first = words, first
        self.rows = words.weight.new_zeros(0, words.weight.shape[1])
        self._free: list[int] = []

    def forward(self, ids: Any) -> Any:
        found = self.words(ids.clamp(max=self.first - 1))
        seen = ids >= self.first
        if bool(seen.any()):
            found[seen] = self.rows[ids[seen].long() - self.first]
        return found

    def put(self, features: Any) -> list[int]:
        """Store rows of features [tokens, width]; returns the ids that stand for them."""
        lacking = len(features) - len(self._free)
        if lacking > 0:
            held = len(self.rows)
            self.rows = torch.cat([self.rows, self.rows.new_zeros(lacking, self.rows.shape[1])])
            self._free += range(held, held + lacking)
        taken, self._free = self._free[: len(features)], self._free[len(features) :]
        self.rows[taken] = features.to(self.rows.dtype)
        return [self.first + each for each in taken]

    def give_back(self, ids: list[int]) -> None:
        self._free += [each - self.first for each in ids]


class BatchingEngine:
    """``generate_batch``'s manager, kept running; each token is passed on as soon as it exists."""

    def __init__(self, settings: WireMessage) -> None:
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        self._model = TransformersModel(settings)
        alone = self._model.language()
        words = alone.get_input_embeddings()
        self._rows = FeatureEmbedding(words, words.weight.shape[0])
        alone.set_input_embeddings(self._rows)
        config = greedy_config(max_new_tokens=settings["context"], eos_token_id=-1)
        rules = ContinuousBatchingConfig(
            num_blocks=settings["requests"] * (settings["context"] // PAGE_TOKENS + 1),
            max_batch_tokens=settings["tokens"],
            max_requests_per_batch=settings["requests"],
            allow_block_sharing=settings["caches"],
        )
        self._manager = alone.init_continuous_batching(generation_config=config, continuous_batching_config=rules)
        self._manager.start()
        self._held: dict[str, list[int]] = {}
        self._sent: dict[int, int] = {}
        self.about = {"version": _version(), "engine": "generate_batch"}

    @property
    def busy(self) -> bool:
        return bool(self._held)

    def add(self, request: WireMessage) -> None:
        ids, name = list(request["ids"]), str(request["id"])
        held = self._rows.put(self._model.features(request)) if request["images"] else []
        at = 0
        for first, count in request["spans"]:
            ids[first : first + count] = held[at : at + count]
            at += count
        self._held[name] = held
        self._manager.add_request(ids, request_id=name, max_new_tokens=request["tokens"], streaming=True)

    def step(self) -> Iterator[TokenUpdate]:
        """Yield the tokens that exist now; wait up to ``TOKEN_WAIT_S`` for the first."""
        result = self._manager.get_result(timeout=TOKEN_WAIT_S)
        while result is not None:
            tokens = take_new_tokens(self._sent, int(result.request_id), result.generated_tokens)
            ended = result.is_finished()
            if ended:
                self._rows.give_back(self._held.pop(result.request_id))
            if tokens or ended:
                yield int(result.request_id), tokens, _end(result) if ended else ""
            result = self._manager.get_result(timeout=0)


def _end(result: Any) -> str:
    return f"error: {result.error}" if result.error else "length"


class GenerateEngine:
    """One request after another through the model's own ``generate()``: the reference tokens."""

    def __init__(self, settings: WireMessage) -> None:
        self._model = TransformersModel(settings)
        self._waiting: deque[WireMessage] = deque()
        self.about = {"version": _version(), "engine": "generate()"}

    @property
    def busy(self) -> bool:
        return bool(self._waiting)

    def add(self, request: WireMessage) -> None:
        self._waiting.append(request)

    def step(self) -> Iterator[TokenUpdate]:
        request = self._waiting.popleft()
        ids, count = torch.tensor([request["ids"]]), request["tokens"]
        config = greedy_config(max_new_tokens=count, min_new_tokens=count)
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **self._model.pixels(request)}
        with torch.inference_mode():
            found = self._model.whole.generate(**given, generation_config=config)
        yield request["id"], found[0, ids.shape[1] :].tolist(), "length"


def greedy_config(**options: Any) -> Any:
    make: Any = GenerationConfig
    return make(do_sample=False, pad_token_id=0, **options)


def _version() -> str:
    import transformers

    return transformers.__version__


def main(socket: int, settings: WireMessage) -> None:
    torch.set_num_threads(settings["threads"])
    engine = GenerateEngine(settings) if settings["tokens"] == 0 else BatchingEngine(settings)
    serve_engine(engine, ServerWire(socket))
