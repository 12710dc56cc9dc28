"""Sweep of random models, chats and pipelines against transformers' own chat route and ``generate()``.

``make test-exact`` runs it. Of each architecture random shapes are drawn, with random weights; a pipeline of a random
placement, transport, budgets and pools serves chats of up to three images and turns, at random times; each output's
tokens are compared with those of ``apply_chat_template(messages, tokenize=True, return_dict=True)`` and
``generate(do_sample=False)`` on the same files. Nothing of trinity's tests or of its oracle is used for the comparison.

Two logits nearer than ``TIE`` are one choice that rounding makes: such a token is counted, and what follows is not
compared. A wrong token ends the sweep with status 1 and the seed that brings it back.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TIE = 1e-4  # of the distance between the two best logits, in units of their standard deviation
REQUESTS = 24  # of one pipeline
PLACEMENTS = ("EPD", "2EPD", "EP+D", "ED+P", "PD+E", "1E1P1D", "2E1P2D", "2ED1P", "1E2PD", "1EP1ED1PD")
TEXT_PLACEMENTS = ("PD", "2PD", "1P1D", "2P1D", "1P2D")
WORDS = ("cats", "of", "a", "river", "says", "that", "nobody", "knows", "why", "green", "seven", "moons", "at", "night")
MODES = ("RGB", "RGB", "RGB key", "RGBA", "LA", "L", "L key", "P key", "P alphas", "I;16", "1", "CMYK")  # of a picture
FORMS = ("path", "bytes", "data URI", "object")  # of its source
TURNS: dict[int, Callable[[Any], Any]] = {  # what an EXIF orientation asks a viewer to do
    1: lambda rows: rows,
    2: lambda rows: rows[:, ::-1],
    3: lambda rows: rows[::-1, ::-1],
    4: lambda rows: rows[::-1],
    5: lambda rows: rows.swapaxes(0, 1),
    6: lambda rows: rows[::-1].swapaxes(0, 1),
    7: lambda rows: rows[::-1, ::-1].swapaxes(0, 1),
    8: lambda rows: rows[:, ::-1].swapaxes(0, 1),
}


@dataclass
class Tally:
    """Counts of a sweep: outputs and tokens compared, ties, and how many each architecture had."""

    requests: int = 0
    tokens: int = 0
    ties: int = 0
    wrong: int = 0
    kinds: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Picture:
    """An image as a request has it, and ``shown``, the RGB image that a viewer shows of it."""

    source: Any
    shown: Any


@dataclass(frozen=True)
class Chat:
    """One request: ``messages`` with a ``Picture`` in each image part, and the tokens asked for."""

    messages: list[dict[str, Any]]
    max_tokens: int
    ignore_eos: bool
    delay_s: float


def draw_checkpoint(name: str, folder: Path, rng: random.Random) -> Path:
    """Write a checkpoint of architecture ``name`` with a random shape and random weights, in float32."""
    import torch
    import transformers

    from trinity.testing.checkpoints import build_checkpoint

    directory = build_checkpoint(name, folder / name, seed=rng.randrange(1 << 30))
    config = json.loads((directory / "config.json").read_text())
    text = config.get("text_config", config)
    heads = text["num_attention_heads"]
    text["num_hidden_layers"] = rng.randint(1, 4)
    text["num_key_value_heads"] = rng.choice([each for each in (1, 2, 4) if heads % each == 0])
    text["intermediate_size"] = 16 * rng.randint(2, 12)
    text["rms_norm_eps"] = rng.choice([1e-6, 1e-5, 1e-3])
    text.pop("layer_types", None)
    (directory / "config.json").write_text(json.dumps(config))
    made = transformers.AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    kind = getattr(transformers, config["architectures"][0])
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(rng.randrange(1 << 30))
        model = kind(made).float().eval()
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.copy_(torch.randn_like(parameter) * 1.6 / (parameter.numel() / parameter.shape[0]) ** 0.5)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
        model.get_input_embeddings().weight.normal_(0.0, 0.5)
    model.generation_config.eos_token_id = made.get_text_config().eos_token_id
    model.save_pretrained(directory)
    return directory


def draw_picture(rng: random.Random, folder: Path) -> Picture:
    """Draw a picture of a random mode, size and orientation, as a file, bytes, a data: URI, an object or an array.

    Few seeds, so that pictures come again: with the same pixels, or with those and another transparency.
    """
    from PIL import Image

    size, mode = (rng.choice((28, 56, 60, 97, 130)), rng.choice((28, 56, 75, 112))), rng.choice(MODES)
    stored, shown, saved = draw_samples(rng, mode, size)
    if mode in ("RGB", "RGBA", "L", "I;16") and rng.random() < 0.2:
        return Picture(stored, Image.fromarray(shown))
    image = stored if isinstance(stored, Image.Image) else Image.fromarray(stored)
    turn = 1 if mode == "CMYK" else rng.randint(1, 8)  # Pillow 13 garbles a TIFF of these that is turned by 90 degrees
    exif = Image.Exif()
    exif[0x0112] = turn
    file = io.BytesIO()
    image.save(file, "TIFF" if mode == "CMYK" else "PNG", exif=exif, **saved)
    picture = Image.fromarray(TURNS[turn](shown).copy())
    form = rng.choice(FORMS)
    if form == "path":
        path = folder / f"{rng.randrange(1 << 60)}.image"
        path.write_bytes(file.getvalue())
        return Picture(str(path), picture)
    if form == "data URI":
        return Picture(f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}", picture)
    return Picture(file.getvalue() if form == "bytes" else Image.open(file), picture)


def draw_samples(rng: random.Random, mode: str, size: tuple[int, int]) -> tuple[Any, Any, dict[str, Any]]:
    """Draw an array, or an image of PIL's, with the colours that it shows [height, width, 3] and how to save it."""
    import numpy as np
    from PIL import Image

    noise = np.random.default_rng(rng.randrange(3)).integers(0, 256, (size[1], size[0], 4), dtype=np.uint8)
    if mode.startswith("P"):
        palette, alphas = noise.reshape(-1, 4)[:16, :3], np.full((16, 1), 255, np.uint8)
        chosen = rng.randrange(16)
        alphas[chosen] = 0
        if mode == "P alphas":
            alphas = noise.reshape(-1, 4)[:16, 3:]
        image = Image.fromarray(noise[..., 3] % 16).copy()
        image.putpalette(palette.tobytes())
        key = alphas.tobytes() if mode == "P alphas" else chosen
        return image, lay_on_white(np.hstack([palette, alphas])[noise[..., 3] % 16]), {"transparency": key}
    grey = noise[..., :1]
    if mode == "I;16":
        wide = grey[..., 0].astype(np.uint16) << 8 | noise[..., 1]
        return wide, grey.repeat(3, 2), {}
    if mode == "1":
        return Image.fromarray(noise[..., 0] > 127), np.where(grey > 127, 255, 0).astype(np.uint8).repeat(3, 2), {}
    if mode == "CMYK":
        image = Image.fromarray(noise, "CMYK")
        return image, np.asarray(image.convert("RGB")), {}
    if mode == "LA":
        pair = noise[..., [0, 3]]
        return Image.fromarray(pair, "LA"), lay_on_white(noise[..., [0, 0, 0, 3]]), {}
    if mode == "RGBA":
        return noise, lay_on_white(noise), {}
    colours = grey.repeat(3, 2) if mode.startswith("L") else noise[..., :3].copy()
    keyed = {}
    stored = colours[..., 0] if mode.startswith("L") else colours
    if mode.endswith("key"):
        hidden = (colours == colours[0, 0]).all(2, keepdims=True)
        keyed = {"transparency": int(colours[0, 0, 0]) if mode == "L key" else tuple(map(int, colours[0, 0]))}
        return Image.fromarray(stored), np.where(hidden, np.uint8(255), colours), keyed
    return stored, colours, keyed


def lay_on_white(colours: Any) -> Any:
    """Lay bytes [height, width, 4] on white, as transformers does."""
    from PIL import Image
    from transformers.image_transforms import convert_to_rgb

    return convert_to_rgb(Image.fromarray(colours), return_numpy=True)


def draw_chat(rng: random.Random, multimodal: bool, folder: Path) -> Chat:
    """Draw a chat of one to three turns, with up to three images in all."""
    left = rng.choice((0, 1, 1, 2, 3)) if multimodal else 0
    messages: list[dict[str, Any]] = []
    for turn in range(rng.randint(1, 3)):
        if turn:
            messages.append({"role": "assistant", "content": [{"type": "text", "text": _words(rng)}]})
        parts: list[dict[str, Any]] = [{"type": "text", "text": _words(rng)}]
        for _ in range(rng.randint(0, left)):
            left -= 1
            parts.insert(rng.randint(0, len(parts)), {"type": "image", "image": draw_picture(rng, folder)})
        messages.append({"role": "user", "content": parts})
    return Chat(messages, rng.randint(1, 20), rng.random() < 0.7, rng.random() * 0.3)


def _words(rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(1, 25)))


class Reference:
    """transformers alone: its processor or tokenizer, its chat template, its model."""

    def __init__(self, directory: Path, multimodal: bool) -> None:
        import torch
        import transformers

        where: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
        auto: Any = transformers.AutoModelForImageTextToText if multimodal else transformers.AutoModelForCausalLM
        self.model = auto.from_pretrained(directory, dtype=torch.float32, **where).eval()
        self.processor = self._processor(directory, multimodal, where)

    @staticmethod
    def _processor(directory: Path, multimodal: bool, where: dict[str, Any]) -> Any:
        import transformers

        tokenizer_class: Any = transformers.AutoTokenizer
        if not multimodal:
            return tokenizer_class.from_pretrained(directory, **where)
        processor_class: Any = transformers.AutoProcessor
        try:
            return processor_class.from_pretrained(directory, backend="pil", **where)
        except (ImportError, ValueError):  # videos need torchvision: its parts are put together without them
            from trinity.preprocess.loader import load_processor

            config = transformers.AutoConfig.from_pretrained(directory, **where)
            return load_processor(directory, config, tokenizer_class.from_pretrained(directory, **where))

    def generate(self, chat: Chat) -> tuple[list[int], list[float]]:
        """Return the output's tokens, and for each the distance between the two best logits in standard deviations."""
        import torch

        settings = {"tokenize": True, "return_dict": True, "return_tensors": "pt", "add_generation_prompt": True}
        inputs = self.processor.apply_chat_template(list(map(_show_images, chat.messages)), **settings)
        more: dict[str, Any] = {"eos_token_id": None} if chat.ignore_eos else {}
        with torch.inference_mode():
            found = self.model.generate(
                **inputs,
                do_sample=False,
                max_new_tokens=chat.max_tokens,
                return_dict_in_generate=True,
                output_logits=True,
                pad_token_id=0,
                **more,
            )
        logits = torch.cat(list(found.logits)).float()
        best = logits.topk(2).values
        apart = ((best[:, 0] - best[:, 1]) / logits.std(dim=1)).tolist()
        return found.sequences[0, inputs["input_ids"].shape[1] :].tolist(), apart


def _show_images(message: dict[str, Any]) -> dict[str, Any]:
    """Put what a viewer shows in the place of each picture."""
    parts = [{**part, "image": part["image"].shown} if "image" in part else part for part in message["content"]]
    return {**message, "content": parts}


def draw_options(rng: random.Random, multimodal: bool, processes: bool) -> dict[str, Any]:
    """Draw a pipeline's placement, transport, budgets and pools."""
    options: dict[str, Any] = {
        "placement": rng.choice(PLACEMENTS if multimodal else TEXT_PLACEMENTS),
        "hosting": "process" if processes else "thread",
        "connector": rng.choice(("shm", "auto", "nixl")) if processes else "inproc",
        "token_budget": rng.choice((7, 23, 64, 512)),
        "image_budget": rng.choice((1, 4)),
        "reservation": rng.choice(("full", "optimistic")),
        "depth": rng.choice((1, 2)),
        "prefix_cache": rng.random() < 0.5,
    }
    if multimodal:
        options["image_cache"] = rng.random() < 0.5
    return options


async def serve(directory: Path, chats: Sequence[Chat], options: dict[str, Any]) -> list[Any]:
    """Serve the chats, each after its delay; outputs in order."""
    import trinity

    cache = trinity.CacheConfig(pools={"image": 64, "kv": 192}, kv_block_size=8, image_block_size=64)

    async def one(pipe: trinity.Pipeline, chat: Chat) -> Any:
        await asyncio.sleep(chat.delay_s)
        messages, images = split_images(chat.messages)
        request = trinity.Request(
            messages=messages,
            images=images,
            max_tokens=chat.max_tokens,
            sampling=trinity.Sampling(ignore_eos=chat.ignore_eos, temperature=0.0, repetition_penalty=1.0),
        )
        return await pipe.complete(request)

    async with trinity.Pipeline(directory, dtype="float32", cache=cache, **options) as pipe:
        return await asyncio.gather(*(one(pipe, chat) for chat in chats))


def split_images(messages: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[Any]]:
    """Split a chat into messages whose image parts are bare, as trinity takes them, and the images in order."""
    images: list[Any] = []
    bare = []
    for message in messages:
        images += [part["image"].source for part in message["content"] if part["type"] == "image"]
        parts = [{"type": "image"} if part["type"] == "image" else part for part in message["content"]]
        bare.append({**message, "content": parts})
    return bare, images


def compare(served: list[int], wanted: list[int], apart: list[float]) -> str:
    """Return "equal", "tie" where they part at a choice that rounding makes, else "wrong"."""
    if served == wanted:
        return "equal"
    at = next((n for n, pair in enumerate(zip(served, wanted, strict=False)) if pair[0] != pair[1]), None)
    return "tie" if at is not None and apart[at] < TIE else "wrong"


def sweep_once(name: str, seed: int, tally: Tally, processes: bool) -> None:
    """Draw a checkpoint, chats and a pipeline of ``seed``; serve, compare, count."""
    from trinity.preprocess.checkpoint.model_types import PROVEN

    rng, folder = random.Random(seed), Path(tempfile.mkdtemp(prefix="trinity-exact-"))
    try:
        multimodal = name in PROVEN
        directory = draw_checkpoint(name, folder, rng)
        chats = [draw_chat(rng, multimodal, folder) for _ in range(REQUESTS)]
        options = draw_options(rng, multimodal, processes)
        reference = Reference(directory, multimodal)
        outputs = asyncio.run(serve(directory, chats, options))
        for number, (chat, output) in enumerate(zip(chats, outputs, strict=True)):
            wanted, apart = reference.generate(chat)
            found = compare(list(output.token_ids), wanted, apart)
            tally.requests, tally.tokens = tally.requests + 1, tally.tokens + len(wanted)
            tally.ties += found == "tie"
            tally.kinds[name] += 1
            if found == "wrong":
                tally.wrong += 1
                print(
                    f"WRONG {name} seed {seed} request {number} {options}: {output.token_ids} for {wanted}", flush=True
                )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main(argv: Sequence[str] | None = None) -> int:
    from transformers.utils import logging

    from trinity.testing.checkpoints import ARCHITECTURES

    transformers_logging: Any = logging
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=3000, help="to compare at least")
    parser.add_argument("--seed", type=int, default=None, help="of the first model; printed, drawn where not given")
    parser.add_argument("--only", nargs="*", default=[], help="architectures")
    parser.add_argument("--processes", type=int, default=8, help="every how many models in processes; 0: none")
    asked = parser.parse_args(argv)
    seed = asked.seed if asked.seed is not None else random.SystemRandom().randrange(1 << 30)
    transformers_logging.disable_progress_bar()
    names, tally, started = asked.only or list(ARCHITECTURES), Tally(), time.monotonic()
    print(f"first seed {seed}: --seed {seed} brings the same models", flush=True)
    for number in range(1 << 30):
        if tally.requests >= asked.requests or tally.wrong:
            break
        name = names[(seed + number) % len(names)]
        in_processes = bool(asked.processes) and number % asked.processes == asked.processes - 1
        sweep_once(name, seed + number, tally, in_processes)
        print(f"{tally.requests} requests, {tally.tokens} tokens, {tally.ties} ties, {tally.wrong} wrong", flush=True)
    counts = ", ".join(f"{name} {count}" for name, count in sorted(tally.kinds.items()))
    print(f"{tally.requests} requests in {time.monotonic() - started:.0f} s ({counts}): {tally.wrong} wrong")
    return 1 if tally.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
