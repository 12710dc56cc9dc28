"""transformers: its continuous batching (``generate_batch``'s manager), or plain ``generate()``, the oracle.

Continuous batching of 5.23 takes token ids alone. Images are encoded here, one after another as requests come, and
their features stand behind ids beyond the vocabulary, which an embedding of ours looks up: nothing else is changed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, GenerationConfig

from trinity.bench.engines.wire import Message, Out, Wire, fresh, pictures, serve

TURN_S = 0.01  # for the manager's next token, before what comes from the client is looked at
PAGE = 256  # tokens of a KV block


class Model:
    """The whole model; its language model alone, to be batched; images to features."""

    def __init__(self, settings: Message) -> None:
        directory = Path(settings["checkpoint"])
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
        self.sees = hasattr(config, "vision_config")
        family: Any = AutoModelForImageTextToText if self.sees else AutoModelForCausalLM
        dtype = getattr(torch, settings["dtype"])
        self.whole = family.from_pretrained(directory, dtype=dtype, local_files_only=True).eval()
        if self.sees:
            # Not from the package root: some releases hide the class there unless torchvision is installed.
            from transformers.models.auto.image_processing_auto import AutoImageProcessor

            load: Any = AutoImageProcessor.from_pretrained
            self._images = load(directory, backend="pil", local_files_only=True)

    def pixels(self, request: Message) -> dict[str, Any]:
        if not request["images"]:
            return {}
        found = self._images(pictures(request), return_tensors="pt")["pixel_values"]
        return {"pixel_values": found.to(self.whole.dtype)}

    def features(self, request: Message) -> Any:
        """Rows of all visual tokens of a request, in order: [tokens, width]."""
        with torch.inference_mode():
            found = self.whole.model.get_image_features(**self.pixels(request))
        return torch.cat(list(getattr(found, "pooler_output", found)))

    def language(self) -> Any:
        """Its language model with its head, as ``generate_batch`` takes it; the weights are shared."""
        if not self.sees:
            return self.whole
        with torch.device("meta"):
            make: Any = AutoModelForCausalLM.from_config
            alone = make(self.whole.config.get_text_config(), dtype=self.whole.dtype)
        alone.model, alone.lm_head = self.whole.model.language_model, self.whole.lm_head
        return alone.eval()


class WithFeatures(torch.nn.Module):
    """An embedding in which ids from ``first`` on are rows of features, kept until their request has ended."""

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
        """The ids that stand for these rows."""
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


class Batching:
    """``generate_batch``'s manager, kept running; a token is handed on as soon as it is there."""

    def __init__(self, settings: Message) -> None:
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        self._model = Model(settings)
        alone = self._model.language()
        words = alone.get_input_embeddings()
        self._rows = WithFeatures(words, words.weight.shape[0])
        alone.set_input_embeddings(self._rows)
        never = greedy(max_new_tokens=settings["context"], eos_token_id=-1)
        rules = ContinuousBatchingConfig(
            num_blocks=settings["requests"] * (settings["context"] // PAGE + 1),
            max_batch_tokens=settings["tokens"],
            max_requests_per_batch=settings["requests"],
            allow_block_sharing=settings["caches"],
        )
        self._manager = alone.init_continuous_batching(generation_config=never, continuous_batching_config=rules)
        self._manager.start()
        self._held: dict[str, list[int]] = {}
        self._told: dict[int, int] = {}
        self.about = {"version": _version(), "engine": "generate_batch"}

    @property
    def busy(self) -> bool:
        return bool(self._held)

    def add(self, request: Message) -> None:
        ids, name = list(request["ids"]), str(request["id"])
        held = self._rows.put(self._model.features(request)) if request["images"] else []
        at = 0
        for first, count in request["spans"]:
            ids[first : first + count] = held[at : at + count]
            at += count
        self._held[name] = held
        self._manager.add_request(ids, request_id=name, max_new_tokens=request["tokens"], streaming=True)

    def step(self) -> Iterator[Out]:
        """Whatever tokens are there; waits for the first of them, a short while."""
        result = self._manager.get_result(timeout=TURN_S)
        while result is not None:
            tokens = fresh(self._told, int(result.request_id), result.generated_tokens)
            ended = result.is_finished()
            if ended:
                self._rows.give_back(self._held.pop(result.request_id))
            if tokens or ended:
                yield int(result.request_id), tokens, _end(result) if ended else ""
            result = self._manager.get_result(timeout=0)


def _end(result: Any) -> str:
    return f"error: {result.error}" if result.error else "length"


class Generate:
    """One request after another through the model's own ``generate()``: what tokens are right."""

    def __init__(self, settings: Message) -> None:
        self._model = Model(settings)
        self._waiting: deque[Message] = deque()
        self.about = {"version": _version(), "engine": "generate()"}

    @property
    def busy(self) -> bool:
        return bool(self._waiting)

    def add(self, request: Message) -> None:
        self._waiting.append(request)

    def step(self) -> Iterator[Out]:
        request = self._waiting.popleft()
        ids, count = torch.tensor([request["ids"]]), request["tokens"]
        never = greedy(max_new_tokens=count, min_new_tokens=count)
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **self._model.pixels(request)}
        with torch.inference_mode():
            found = self._model.whole.generate(**given, generation_config=never)
        yield request["id"], found[0, ids.shape[1] :].tolist(), "length"


def greedy(**options: Any) -> Any:
    make: Any = GenerationConfig
    return make(do_sample=False, pad_token_id=0, **options)


def _version() -> str:
    import transformers

    return transformers.__version__


def main(socket: int, settings: Message) -> None:
    torch.set_num_threads(settings["threads"])
    engine = Generate(settings) if settings["tokens"] == 0 else Batching(settings)
    serve(engine, Wire(socket))
