"""CacheConfig, ProcessConfig, SearchConfig: odd values are refused at once, by a typed error that says more."""

from __future__ import annotations

from typing import Any

import pytest

import trinity
from trinity.errors import ConfigError


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"image_block_size": 0}, "image_block_size is a whole number of at least 1, got 0"),
        ({"kv_block_size": "16"}, "kv_block_size is a whole number of at least 1, got '16'"),
        ({"kv_block_size": 1.5}, "kv_block_size is a whole number"),
        ({"kv_block_size": True}, "kv_block_size is a whole number"),
        ({"memory_bytes": -5}, "memory_bytes is a whole number of at least 1 or None, got -5"),
        ({"pools": {"kv": -1}}, "pools is a mapping of a text to a whole number of at least 0 or None, got {'kv': -1}"),
        ({"pools": {"nope": 3}}, "unknown kind of block 'nope'; known: image, kv"),
        ({"pools": [("kv", 3)]}, "pools is a mapping of a text to a whole number"),
    ],
)
def test_sizes_of_caches(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        trinity.CacheConfig(**fields)


@pytest.mark.parametrize("seconds", [-1, float("nan"), "20", None])
def test_a_launcher_that_waits_for_no_time(seconds: Any) -> None:
    with pytest.raises(ConfigError, match=r"launcher_waits_s is (a number|.*: give seconds, 0 to wait for no)"):
        trinity.ProcessConfig(launcher_waits_s=seconds)


@pytest.mark.parametrize("silence_s", [0, 1.9, -3, float("nan"), "20", None])
def test_a_silence_that_is_too_short_or_no_number(silence_s: Any) -> None:
    with pytest.raises(ConfigError, match=r"silence_s is (a number|.*: instances speak every second, give 2)"):
        trinity.ProcessConfig(silence_s=silence_s)


def test_a_secret_is_not_shown() -> None:
    assert "hidden" not in repr(trinity.ProcessConfig(secret="hidden" * 8))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"strategy": "guess"}, "unknown strategy 'guess'; known: bayesian, exhaustive, paper, race"),
        ({"split": "fair"}, "unknown split 'fair'; known: largest_remainder, minimax"),
        ({"seeds": -1}, "seeds is a whole number of at least 0, got -1"),
        ({"seeds": 1.5}, "seeds is a whole number of at least 0"),
        ({"least_requests": 0}, "least_requests is a whole number of at least 1"),
        ({"seed": "a"}, "seed is a whole number"),
        ({"space": None}, "space is a Space"),
    ],
)
def test_a_search(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        trinity.SearchConfig(**fields)


def test_what_is_given_is_kept() -> None:
    cache = trinity.CacheConfig(pools={"image": 0, "kv": 7}, memory_bytes=1, image_block_size=1, kv_block_size=2)
    assert (cache.pools, cache.memory_bytes, cache.image_block_size, cache.kv_block_size) == (
        {"image": 0, "kv": 7},
        1,
        1,
        2,
    )
    assert trinity.ProcessConfig(silence_s=2).silence_s == 2
    assert trinity.SearchConfig("paper", seeds=0).strategy == "paper"
