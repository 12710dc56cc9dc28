"""Clips of sound for tests: made on the spot, as arrays and as files."""

from __future__ import annotations

import io

import numpy as np
import soundfile  # type: ignore[import-untyped, import-not-found, unused-ignore]

RATE = 16000


def clip(seed: int, seconds: float = 0.7, rate: int = RATE) -> np.ndarray:
    """Three gliding tones and a little noise, float32 [samples]."""
    draw, at = np.random.default_rng(seed), np.arange(int(seconds * rate)) / rate
    tones = [np.sin(2 * np.pi * pitch * at * (1 + 0.2 * at)) for pitch in draw.uniform(150, 900, 3)]
    sound: np.ndarray = (0.1 * np.sum(tones, axis=0) + 0.01 * draw.standard_normal(len(at))).astype(np.float32)
    return sound


def encoded(samples: np.ndarray, rate: int = RATE, form: str = "WAV", subtype: str = "PCM_16") -> bytes:
    """A file of samples [n] or [channels, n]."""
    file = io.BytesIO()
    soundfile.write(file, samples.T, rate, format=form, subtype=subtype)
    return file.getvalue()
