"""Serve a video clip and a spoken sentence under several methods, and compare every token with ``generate()``.

python examples/demo_media.py               drawn frames and a synthesised voice, over every transport that runs here
python examples/demo_media.py --over shm    processes over this transport alone

The models are small and random, of Qwen2-VL's and Qwen2-Audio's architecture: their words mean nothing. What is shown
is that media move between instances as they should: the tokens are those of the model's own ``generate()``, and another
clip or sentence gives others.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import os
import tempfile
import wave
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two spinning threads on two busy cores cost four times the time

import numpy as np

import trinity
from trinity.demo import draw_shapes
from trinity.remote.supervision.process_config import kept_launcher
from trinity.testing.checkpoints import build_checkpoint
from trinity.testing.oracle import Oracle

METHODS = ("EPD", "EP+D", "E+P+D")
NEEDS = {"shm": "mmap", "nixl": "nixl_cu13", "ucx": "ucxx"}  # the module that each transport needs
SCHEMES = tuple(scheme for scheme, module in NEEDS.items() if find_spec(module))
OUTPUTS = 24
FRAMES, SIDE = 12, 84
RATE = 16_000
"""Samples a second of what ``speak`` makes."""
# Means of the first three formants of 33 men, in Hz (Peterson and Barney, 1952, table II).
FORMANTS: dict[str, tuple[int, int, int]] = {
    "ee": (270, 2290, 3010),
    "i": (390, 1990, 2550),
    "e": (530, 1840, 2480),
    "a": (660, 1720, 2410),
    "ah": (730, 1090, 2440),
    "aw": (570, 840, 2410),
    "u": (440, 1020, 2240),
    "oo": (300, 870, 2240),
    "uh": (640, 1190, 2390),
    "er": (490, 1350, 1690),
}
_WIDTHS = (60.0, 90.0, 150.0)  # of the formants, in Hz
_LOUDEST, _LOWEST_HZ, _HIGHEST_HZ = 0.5, 90.0, 130.0  # the voice falls, as at the end of a sentence


class Case(NamedTuple):
    """One kind of media: what is shown, of which architecture the model is, and two requests that differ in it."""

    title: str
    architecture: str
    asked: trinity.Request
    control: trinity.Request


def draw_clip(names: Sequence[str]) -> trinity.Clip:
    """Draw a clip of 12 frames, 2 a second: one shape that goes from corner to corner."""
    corners = ("top left", "top right", "bottom right", "bottom left")
    shown = [draw_shapes({corners[index % 4]: names[index // 4 % len(names)]}) for index in range(FRAMES)]
    return trinity.Clip(np.stack([np.asarray(each.resize((SIDE, SIDE))) for each in shown]), fps=2.0)


def speak(vowels: Sequence[str], each_s: float = 0.16) -> np.ndarray:
    """Speak vowels one into the next: float32 [samples] within -0.5 to 0.5, ``RATE`` a second.

    ``vowels``: keys of ``FORMANTS``. "How are you" is ah oo ah er ee oo. Raises ``KeyError`` for another one.
    """
    count = int(RATE * each_s) * len(vowels)
    places = np.linspace(0, len(vowels) - 1, count)
    pitch = np.linspace(_HIGHEST_HZ, _LOWEST_HZ, count)
    phase = 2 * np.pi * np.cumsum(pitch) / RATE
    table = np.array([FORMANTS[each] for each in vowels], dtype=np.float64)
    tracks = np.stack([np.interp(places, np.arange(len(vowels)), track) for track in table.T])
    voice = np.zeros(count)
    for harmonic in range(1, int(RATE / 2 / _HIGHEST_HZ)):
        voice += _loudness(harmonic * pitch, tracks) / harmonic * np.sin(harmonic * phase)
    fade = np.minimum(1.0, np.minimum(np.arange(count), np.arange(count)[::-1]) / (0.02 * RATE))
    spoken: np.ndarray = (voice / np.abs(voice).max() * _LOUDEST * fade).astype(np.float32)
    return spoken


def _loudness(frequency: np.ndarray, tracks: np.ndarray) -> np.ndarray:
    """Sum what each formant lets through of a frequency: [samples]."""
    shares = [1 / (1 + ((frequency - track) / width) ** 2) for track, width in zip(tracks, _WIDTHS, strict=True)]
    summed: np.ndarray = np.sum(shares, axis=0)
    return summed


def ask(words: str, media: trinity.Media) -> trinity.Request:
    return trinity.Request(words, media=[media], max_tokens=OUTPUTS, sampling=trinity.Sampling(ignore_eos=True))


def clip_case() -> Case:
    words = "<video>\nWhere does the shape go?"
    clips = [draw_clip(names) for names in (["red circle"], ["red circle", "blue square"])]
    asked, control = (ask(words, trinity.Media("video", each)) for each in clips)
    return Case(f"A clip of {FRAMES} drawn frames", "qwen2_vl", asked, control)


def write_wav(samples: np.ndarray) -> bytes:
    """Encode samples as a wav file of 16 bits."""
    file = io.BytesIO()
    with wave.open(file, "wb") as written:
        written.setnchannels(1)
        written.setsampwidth(2)
        written.setframerate(RATE)
        written.writeframes((samples * 32767).astype("<i2").tobytes())
    return file.getvalue()


def speech_case() -> Case:
    spoken = {"How are you?": "ah oo ah er ee oo", "Are you here?": "ah er ee oo ee er"}
    files = [write_wav(speak(sounds.split())) for sounds in spoken.values()]
    asked, control = (ask("<audio>\nWhat is said?", trinity.Media("audio", each)) for each in files)
    seconds = (len(files[0]) - 44) / 2 / RATE
    return Case(f'A sentence of {seconds:.1f} s, "{next(iter(spoken))}"', "qwen2_audio", asked, control)


async def serve(model: Path, method: str, case: Case, **settings: object) -> list[trinity.Output]:
    """Serve the request and its control."""
    async with trinity.Pipeline(model, placement=method, dtype="float32", **settings) as pipe:  # type: ignore[arg-type]
        return list(await asyncio.gather(pipe.complete(case.asked), pipe.complete(case.control)))


async def serve_everywhere(model: Path, case: Case, schemes: Sequence[str]) -> dict[str, list[trinity.Output]]:
    """Serve it by every method in threads, and with each instance in a process of its own over each transport."""
    served = {method: await serve(model, method, case) for method in METHODS}
    async with kept_launcher():
        for scheme in schemes:
            settings = {"hosting": "process", "connector": scheme}
            served[f"E+P+D@{scheme}"] = await serve(model, "E+P+D", case, **settings)
    return served


async def show(case: Case, folder: Path, schemes: Sequence[str]) -> bool:
    """Print what was served; True if every token is that of generate(), and the control has others."""
    model = await asyncio.to_thread(build_checkpoint, case.architecture, folder / case.architecture)
    oracle = await asyncio.to_thread(Oracle, model)
    wanted = [await asyncio.to_thread(oracle.generate, each) for each in (case.asked, case.control)]
    print(f"\n{case.title}, to a random model of type {case.architecture}: its own generate(), then trinity.")
    same = True
    for method, outputs in (await serve_everywhere(model, case, schemes)).items():
        equal = sum(output.token_ids == ids for output, ids in zip(outputs, wanted, strict=True))
        moved = sum(record["bytes"] for output in outputs for record in output.transfers) / 2**20
        prompt = f"{outputs[0].prompt_tokens} prompt tokens, {outputs[0].media_tokens} of them media"
        print(f"  {method:12} {prompt}, {moved:.2f} MiB moved, {equal} of 2 equal")
        same = same and equal == 2
    differs = wanted[0] != wanted[1]
    print(f"  Another one in its place gives {'other' if differs else 'THE SAME'} tokens.")
    return same and differs


async def run(cases: Sequence[Case], schemes: Sequence[str]) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        return all([await show(case, Path(folder), schemes) for case in cases])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--over", nargs="*", choices=SCHEMES, default=SCHEMES, help="transports between processes")
    schemes = parser.parse_args().over
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    equal = asyncio.run(run([clip_case(), speech_case()], schemes))
    print("\nEvery token equals generate()." if equal else "\nTOKENS DIFFER, or the media were not seen.")
    raise SystemExit(0 if equal else 1)


if __name__ == "__main__":
    main()
