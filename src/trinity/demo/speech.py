"""Speech made on the spot: vowels by their formants, for demos and tests that need a voice and no recording."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

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
