"""OpenVINO GenAI's continuous batching, stepped in this process; the checkpoint is exported by optimum-intel."""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trinity.bench.engines.vision_keys import rename_vision_keys
from trinity.bench.engines.wire import ServerWire, TokenUpdate, WireMessage, decode_images, serve_engine

PRECISIONS = {"float32": "f32", "bfloat16": "bf16"}
OPENVINO_BLOCK = 32  # tokens of a KV block on a CPU


def export_checkpoint(source: Path, target: Path) -> Path:
    """Export the checkpoint to OpenVINO's format with float32 weights, once; returns ``target``."""
    if not target.exists():
        export: Any = importlib.import_module("optimum.exporters.openvino")
        config: Any = importlib.import_module("optimum.intel").OVConfig
        scratch = target.with_name(f"{target.name}.{os.getpid()}.part")
        known = rename_vision_keys(source, scratch.with_suffix(".keys"))
        weights = config(dtype="fp32")
        export.main_export(str(known), scratch, task="image-text-to-text", ov_config=weights, convert_tokenizer=True)
        shutil.copy(source / "preprocessor_config.json", scratch)
        shutil.rmtree(known)
        scratch.rename(target)
    return target


def device_properties(settings: WireMessage) -> dict[str, Any]:
    """Properties of OpenVINO's CPU plug-in: precision, the same for the KV cache, and threads.

    With one thread in bfloat16 it crashes (SIGFPE, 2026.4.1, on a CPU with AMX): it then chooses its threads itself.
    """
    precision = PRECISIONS[settings["dtype"]]
    chosen: dict[str, Any] = {"INFERENCE_PRECISION_HINT": precision, "KV_CACHE_PRECISION": precision}
    if settings["threads"] > 1 or precision == "f32":
        chosen["INFERENCE_NUM_THREADS"] = settings["threads"]
    return chosen


class OpenVinoEngine:
    def __init__(self, settings: WireMessage) -> None:
        model = export_checkpoint(Path(settings["checkpoint"]), Path(settings["prepared"]))
        self._genai: Any = importlib.import_module("openvino_genai")
        self._tensor: Any = importlib.import_module("openvino").Tensor
        rules = self._genai.SchedulerConfig()
        rules.max_num_batched_tokens, rules.max_num_seqs = settings["tokens"], settings["requests"]
        rules.num_kv_blocks = settings["requests"] * (settings["context"] // OPENVINO_BLOCK + 1)
        rules.dynamic_split_fuse, rules.enable_prefix_caching = True, settings["caches"]
        chosen = device_properties(settings)
        self._pipe = self._genai.ContinuousBatchingPipeline(str(model), rules, "CPU", properties=chosen)
        self._running: dict[int, Any] = {}
        self.about = {"version": self._genai.__version__, "engine": "OpenVINO GenAI", "properties": chosen}

    @property
    def busy(self) -> bool:
        return bool(self._running)

    def add(self, request: WireMessage) -> None:
        numpy: Any = importlib.import_module("numpy")
        greedy = self._genai.GenerationConfig()
        greedy.max_new_tokens, greedy.ignore_eos, greedy.do_sample = request["tokens"], True, False
        greedy.apply_chat_template = False
        images = [self._tensor(numpy.asarray(each)) for each in decode_images(request)]
        self._running[request["id"]] = self._pipe.add_request(
            request["id"], request["text"], images=images, generation_config=greedy
        )

    def step(self) -> Iterator[TokenUpdate]:
        self._pipe.step()
        for number, handle in list(self._running.items()):
            status = handle.get_status().name
            ended = status != "RUNNING"
            tokens: list[int] = []
            while handle.can_read():
                tokens += [token for each in handle.read().values() for token in each.generated_ids]
            if ended:
                del self._running[number]
            if tokens or ended:
                yield number, tokens, {"RUNNING": "", "FINISHED": "length"}.get(status, f"error: {status}")


def main(socket: int, settings: WireMessage) -> None:
    serve_engine(OpenVinoEngine(settings), ServerWire(socket))
