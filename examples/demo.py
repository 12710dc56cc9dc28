"""Serve photographs under every disaggregation method, and prove the tokens equal to transformers' generate().

python examples/demo.py                      a tiny random LLaVA, built here, offline
python examples/demo.py --model DIR          your own checkpoint
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two spinning threads on two busy cores cost four times the time

import msgspec

import trinity
from trinity.preprocess.processor import RequestProcessor
from trinity.remote.supervisor import kept_launcher
from trinity.testing.oracle import Oracle

PHOTOS = sorted((Path(__file__).parent / "photos").glob("*.jpg"))
QUESTIONS = ("What is in this photo?", "Describe the scene.", "Which colours do you see?", "What happens here?")
METHODS = ("EPD", "EP+D", "ED+P", "E+P+D")
TEXT_METHODS = ("PD", "P+D")  # of a model that takes no images
IN_PROCESSES = ("E+P+D", "ED+P")  # these again, each instance in a process of its own
COLUMNS = ("method", "TTFT ms", "ITL ms", "image moves", "KV moves", "in cache", "MiB moved", "equal to generate()")
TRANSFERS = ("transport", "blocks of", "transfers", "pieces", "MiB", "median ms", "GB/s")
NEEDS = {"shm": "mmap", "nixl": "nixl_cu13", "ucx": "ucxx"}  # the module that each transport needs
SCHEMES = tuple(scheme for scheme, module in NEEDS.items() if find_spec(module))
NOISE = "The weights are random, so that the text is noise; that it is the same noise is what this shows."


def requests(multimodal: bool, max_tokens: int, sampling: trinity.Sampling) -> list[trinity.Request]:
    """One request per photograph and one about all of them; or the questions alone."""
    if multimodal:
        asked = [(f"<image>\n{question}", [photo]) for photo, question in zip(PHOTOS, QUESTIONS, strict=False)]
        asked.append(("<image>" * len(PHOTOS) + "\nWhat do these have in common?", PHOTOS))
    else:
        asked = [(question.replace("photo", "sentence"), []) for question in QUESTIONS]
    return [trinity.Request(text, images=photos, max_tokens=max_tokens, sampling=sampling) for text, photos in asked]


async def show(pipe: trinity.Pipeline, request: trinity.Request) -> trinity.Output:
    """Stream one answer to the terminal."""
    about = ", ".join(photo.name for photo in request.images) or request.prompt
    async with pipe.stream(request) as tokens:
        print(f"  {about}: ", end="")
        async for token in tokens:
            print(token.text.replace("\n", " "), end="", flush=True)
        print()
        return tokens.output


async def serve(
    model: Path, method: str, asked: list[trinity.Request], shown: int, **settings: Any
) -> list[trinity.Output]:
    """All requests at once, batched and interleaved by the stages; one of them is streamed for you to see."""
    asked = [msgspec.structs.replace(request, request_id=f"{request.request_id}.{method}") for request in asked]
    async with trinity.Pipeline(model, placement=method, dtype="float32", **settings) as pipe:
        processes = {name: f" (process {instance.process})" for name, instance in pipe.processes.items()}
        print(f"\n{method}: instances {', '.join(each.name + processes.get(each.name, '') for each in pipe.instances)}")
        answers = [(show if index == shown else trinity.Pipeline.complete)(pipe, r) for index, r in enumerate(asked)]
        return list(await asyncio.gather(*answers))


async def serve_in_processes(
    model: Path, asked: list[trinity.Request], methods: tuple[str, ...]
) -> dict[str, list[trinity.Output]]:
    """The same requests, each instance in a process of its own, over every transport that runs here."""
    served = {}
    async with kept_launcher():
        for scheme in SCHEMES:
            for method in methods:
                settings = {"hosting": "process", "connector": scheme}
                served[f"{method}@{scheme}"] = await serve(model, method, asked, -1, **settings)
    return served


def row(method: str, outputs: list[trinity.Output], wanted: list[list[int]]) -> tuple[str, ...]:
    """One line of the table."""
    moved = [record for output in outputs for record in output.transfers]
    pulled = [record["kind"] for record in moved if record["outcome"] == "pulled"]
    equal = sum(output.token_ids == ids for output, ids in zip(outputs, wanted, strict=True))
    return (
        method,
        f"{median(output.ttft_s or 0.0 for output in outputs) * 1e3:.1f}",
        f"{median([gap for output in outputs for gap in output.itl_s] or [0.0]) * 1e3:.2f}",
        str(pulled.count("image")),
        str(pulled.count("kv")),
        str(len(moved) - len(pulled)),
        f"{sum(record['bytes'] for record in moved) / 2**20:.2f}",
        f"{equal} of {len(outputs)}",
    )


def table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in [columns, *rows]
    )


def transfers(outputs: list[trinity.Output]) -> list[tuple[str, ...]]:
    """One line per transport and kind of block."""
    pulled = [record for output in outputs for record in output.transfers if record["outcome"] == "pulled"]
    lines: list[tuple[str, ...]] = []
    for scheme, kind in sorted({(record["scheme"], record["kind"]) for record in pulled}):
        these = [each for each in pulled if (each["scheme"], each["kind"]) == (scheme, kind)]
        moved, seconds = sum(each["bytes"] for each in these), sum(each["seconds"] for each in these)
        middle = f"{median(each['seconds'] for each in these) * 1e3:.3f}"
        pieces = str(sum(each["pieces"] for each in these))
        lines.append(
            (scheme, kind, str(len(these)), pieces, f"{moved / 2**20:.2f}", middle, f"{moved / seconds / 1e9:.2f}")
        )
    return lines


async def run(model: Path, max_tokens: int, random_weights: bool) -> bool:
    multimodal = (await asyncio.to_thread(RequestProcessor, model)).multimodal
    asked = requests(multimodal, max_tokens, trinity.Sampling(ignore_eos=random_weights))
    about = f"about {len(PHOTOS)} photographs" if multimodal else "of text alone"
    print(f"{len(asked)} requests {about}; first the model's own generate() in float32 ...")
    wanted = await asyncio.to_thread(lambda: Oracle(model).generate_all(asked))
    methods = METHODS if multimodal else TEXT_METHODS
    served = {method: await serve(model, method, asked, shown) for shown, method in enumerate(methods)}
    served |= await serve_in_processes(model, asked, IN_PROCESSES if multimodal else TEXT_METHODS[1:])
    print(f"\n{NOISE}\n" if random_weights else "")
    print(table(COLUMNS, [row(method, outputs, wanted) for method, outputs in served.items()]))
    print("\n" + table(TRANSFERS, transfers([output for outputs in served.values() for output in outputs])))
    return all([output.token_ids for output in outputs] == wanted for outputs in served.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a checkpoint directory in transformers' format")
    parser.add_argument("--max-tokens", type=int, default=48)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="trinity-demo-") as folder:
        from transformers.utils import logging

        from trinity.testing.checkpoints import build_checkpoint

        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        model = given.model or build_checkpoint("llava", Path(folder))
        try:
            equal = asyncio.run(run(model, given.max_tokens, random_weights=given.model is None))
        except trinity.TrinityError as error:
            parser.exit(2, f"demo: {error}\n")
    print("\nEvery token equals generate()." if equal else "\nTOKENS DIFFER from generate().")
    raise SystemExit(0 if equal else 1)


if __name__ == "__main__":
    main()
