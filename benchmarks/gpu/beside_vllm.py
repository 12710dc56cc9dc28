"""vLLM on the same checkpoint and the same prompts of text, in a process of its own, where it is installed.

python benchmarks/gpu/beside_vllm.py reads a line of JSON from stdin and prints one line: seconds of each round.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MISSING = "vLLM is not installed here"
END_S = 240.0
SHARE = 0.85  # of the GPU's memory


def is_installed() -> bool:
    return importlib.util.find_spec("vllm") is not None


def generate_with_vllm(
    model: Path, dtype: str, ids: Sequence[Sequence[int]], outputs: int, rounds: int
) -> dict[str, Any]:
    """Generate for all prompts at once, ``rounds`` times after one to warm up.

    Returns the seconds of each round, the tokens of the last and vLLM's version. Raises ``RuntimeError`` where vLLM is
    not installed, fails or takes longer than ``END_S``.
    """
    if not is_installed():
        raise RuntimeError(MISSING)
    asked = {"model": str(model), "dtype": dtype, "ids": list(map(list, ids)), "outputs": outputs, "rounds": rounds}
    command = [sys.executable, __file__]
    try:
        done = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, timeout=END_S)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"vLLM took longer than {END_S:.0f} s") from error
    if done.returncode:
        raise RuntimeError(f"vLLM failed: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def serve(asked: dict[str, Any]) -> dict[str, Any]:
    """Load and generate, with vLLM's own CUDA graphs and no prefix cache."""
    vllm: Any = importlib.import_module("vllm")
    longest = max(map(len, asked["ids"])) + asked["outputs"]
    engine = vllm.LLM(
        model=asked["model"],
        dtype=asked["dtype"],
        max_model_len=longest + 16,
        max_num_seqs=len(asked["ids"]),
        enable_prefix_caching=False,
        gpu_memory_utilization=SHARE,
        seed=0,
    )
    greedy = vllm.SamplingParams(temperature=0, max_tokens=asked["outputs"], ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": each} for each in asked["ids"]]
    seconds: list[float] = []
    for _ in range(asked["rounds"] + 1):
        started = time.perf_counter()
        made = engine.generate(prompts, greedy, use_tqdm=False)
        seconds.append(time.perf_counter() - started)
    tokens = [list(each.outputs[0].token_ids) for each in made]
    return {"seconds": seconds[1:], "tokens": tokens, "version": vllm.__version__}


if __name__ == "__main__":
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    print(json.dumps(serve(json.loads(sys.stdin.readline()))), flush=True)
