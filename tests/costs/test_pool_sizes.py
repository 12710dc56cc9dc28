"""Pools from a memory budget, hand-computed; EPDServe's tables 2, 3 and 8; what memory there is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity.costs.pool_sizes import (
    Capacity,
    ModelMemory,
    available_memory,
    capacity,
    check_available,
    fits_beside,
    format_size,
    size_pools,
)
from trinity.errors import ConfigError

# ---------------------------------------------------------------- pools


@pytest.mark.parametrize(
    ("roles", "expected"),
    [
        ("E", {"image": 900 // 7}),
        ("D", {"kv": 900 // 30}),
        ("P", {"image": 25, "kv": (900 - 25 * 7) // 30}),
        ("EP", {"image": 25, "kv": 24}),
        ("ED", {"image": 25, "kv": 24}),
        ("PD", {"image": 25, "kv": 24}),
        ("EPD", {"image": 25, "kv": 24}),
    ],
)
def test_each_role_has_its_pools(roles: str, expected: dict[str, int]) -> None:
    assert size_pools(roles, 1000, 100, 7, 30, image_share=0.2) == expected


def test_a_tenth_is_for_images_unless_said_otherwise() -> None:
    assert size_pools("EPD", 10_000, 0, 1, 1) == {"image": 1000, "kv": 9000}


@pytest.mark.parametrize("roles", ["P", "D", "PD"])
def test_a_text_only_model_has_no_image_pool(roles: str) -> None:
    assert size_pools(roles, 1000, 100, None, 30) == {"kv": 30}


def test_an_instance_that_would_hold_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="roles E would hold no block"):
        size_pools("E", 1000, 100, None, 30)


def test_each_pool_has_a_block_where_two_fit() -> None:
    assert size_pools("P", 150, 10, 100, 40) == {"image": 1, "kv": 1}  # a tenth would be no image block at all
    assert size_pools("P", 150, 10, 40, 100, image_share=0.9) == {"image": 1, "kv": 1}


def test_what_is_missing_is_said() -> None:
    mib = 1 << 20
    with pytest.raises(ConfigError, match=r"needs 10\.00 MiB for weights and 3\.00 MiB.*5\.00 MiB are missing"):
        size_pools("EP", 8 * mib, 10 * mib, mib, 2 * mib)
    with pytest.raises(ConfigError, match=r"1 B are missing"):
        size_pools("D", 139, 100, None, 40)


@pytest.mark.parametrize("roles", ["", "X", "EPDX", "e"])
def test_roles_are_letters(roles: str) -> None:
    with pytest.raises(ConfigError, match="letters of EPD"):
        size_pools(roles, 1000, 0, 1, 1)


@pytest.mark.parametrize("share", [0.0, 1.0, -0.5])
def test_a_share_is_a_share(share: float) -> None:
    with pytest.raises(ConfigError, match="image_share"):
        size_pools("P", 1000, 0, 1, 1, image_share=share)


@given(
    st.sampled_from(["E", "P", "D", "EP", "ED", "PD", "EPD"]),
    st.integers(0, 10_000),
    st.integers(0, 5_000),
    st.integers(1, 500),
    st.integers(1, 500),
    st.floats(0.01, 0.99),
)
def test_pools_fit_and_leave_less_than_a_block(
    roles: str, memory: int, weights: int, image: int, kv: int, share: float
) -> None:
    try:
        pools = size_pools(roles, memory, weights, image, kv, image_share=share)
    except ConfigError:
        least = image * (roles != "D") + kv * (roles != "E")
        assert weights + least > memory
        return
    used = weights + pools.get("image", 0) * image + pools.get("kv", 0) * kv
    assert all(count >= 1 for count in pools.values())
    assert 0 <= memory - used < (image if roles == "E" else kv)


# ---------------------------------------------------------------- capacity, by hand

SMALL = ModelMemory(
    vision_bytes=100,
    language_bytes=1000,
    image_tokens=10,
    feature_bytes=2,
    kv_bytes=4,
    encode_bytes=180,
    prefill_bytes=3,
    text_tokens=5,
)


def test_an_encode_instance_has_all_its_memory_for_images() -> None:
    # 2,100 − 100 = 2,000 free; an image takes 180 + 10 · 2 = 200
    assert capacity("E", SMALL, 2100, images=3) == Capacity(10, 3, 0, 0.0)


def test_a_prefill_instance() -> None:
    # 6,000 free, 4,800 of it KV: 1,200 tokens; an image takes 10 · (2 + 3) = 50 of the other 1,200 and 10 tokens
    held = capacity("P", SMALL, 7000, images=4)
    assert held.images_per_request == 24
    assert held.batch == 6
    assert held.kv_tokens == 1200
    assert held.kv_share == pytest.approx(1 - 4 * 50 / 6000)


def test_a_decode_instance_is_bounded_by_its_kv_cache() -> None:
    # 600 free: 150 tokens; a request of 4 images has 45
    assert capacity("D", SMALL, 1600, images=4) == Capacity(14, 3, 150, 1.0)


def test_a_whole_instance_has_both_weights_and_the_larger_working_memory() -> None:
    # 5,000 free, 4,000 of it KV; an image takes 20 + max(180, 30) = 200 of the other 1,000
    held = capacity("EPD", SMALL, 6100, images=2)
    assert held == Capacity(5, 2, 1000, 4600 / 5000)
    assert capacity("EP", SMALL, 6100, images=2) == held


def test_the_kv_cache_can_be_the_bound() -> None:
    # 100 free, 8 of it KV: 2 tokens, less than the text
    assert capacity("P", SMALL, 1100, images=1, kv_share=0.08) == Capacity(0, 0, 2, 0.5)


@pytest.mark.parametrize(("context", "most"), [(44, 3), (45, 4), (54, 4)])
def test_the_context_is_a_bound(context: int, most: int) -> None:
    short = msgspec.structs.replace(SMALL, context=context)
    for roles in ("E", "P"):
        assert capacity(roles, short, 100_000).images_per_request == most
        assert capacity(roles, short, 100_000, images=most).batch > 0
        beyond = capacity(roles, short, 100_000, images=most + 1)
        assert (beyond.batch, beyond.kv_share) == (0, 0.0)


@pytest.mark.parametrize("roles", ["E", "P", "D", "EPD"])
def test_weights_that_do_not_fit_hold_nothing(roles: str) -> None:
    assert capacity(roles, SMALL, 50) == Capacity(0, 0, 0, 0.0)


def test_text_only_requests() -> None:
    assert capacity("P", SMALL, 7000, images=0).batch == 1200 // 5


# ---------------------------------------------------------------- capacity, against the paper

A100 = 82 * 10**9  # appendix E.1
CONTEXT = 32_768


def minicpm(encode_and_feature_bytes: float, prefill: float = 0.0) -> ModelMemory:
    """MiniCPM-V 2.6 in fp16 (appendix E.2): 0.4 and 7.6 billion parameters; 64 tokens for each of up to 10 slices."""
    features = 640 * 7168
    return ModelMemory(
        vision_bytes=800_000_000,
        language_bytes=15_200_000_000,
        image_tokens=640,
        feature_bytes=7168,
        kv_bytes=57_344,
        encode_bytes=int(encode_and_feature_bytes) - features,
        prefill_bytes=int(prefill) // 640,
        text_tokens=22,
        context=CONTEXT,
    )


@pytest.mark.parametrize(("encode", "whole"), [(490, 77), (165, 26), (49, 7)])
def test_table_2_follows_from_what_an_encode_instance_holds(encode: int, whole: int) -> None:
    """From the images that E holds: those of the undivided instance, and the batches of 10 images (table 3)."""
    per_image = (A100 - 0.8e9) / (encode + 0.5)
    model = minicpm(per_image)
    wide = msgspec.structs.replace(model, context=None)
    assert capacity("E", wide, A100).images_per_request == encode
    together = capacity("EP", wide, A100)
    assert together.images_per_request == pytest.approx(whole, abs=2)
    assert capacity("E", wide, A100).batch == encode // 10
    assert together.batch == whole // 10


@pytest.mark.parametrize(("images", "whole", "split"), [(5, 86, 99), (10, 74, 97), (20, 49, 95), (40, 0, 92)])
def test_table_8_share_of_the_kv_cache(images: int, whole: int, split: int) -> None:
    model = minicpm((A100 - 0.8e9) / 49.5, prefill=0.14e9)
    assert 100 * capacity("EP", model, A100, images=images).kv_share == pytest.approx(whole, abs=2)
    assert 100 * capacity("P", model, A100, images=images).kv_share == pytest.approx(split, abs=1)


def test_table_8_out_of_context() -> None:
    model = minicpm((A100 - 0.8e9) / 49.5, prefill=0.14e9)
    assert capacity("P", model, A100, images=80).kv_share == 0.0


# ---------------------------------------------------------------- what there is


def system(tmp_path: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": "MemTotal: 9000 kB\nMemAvailable:    5000 kB\n", **files}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


FREE = 5000 * 1024


def test_without_a_cgroup_the_system_decides(tmp_path: Path) -> None:
    assert available_memory(system(tmp_path, {})) == FREE


@pytest.mark.parametrize("base", ["sys/fs/cgroup", "sys/fs/cgroup/unified"])
def test_cgroup_v2(tmp_path: Path, base: str) -> None:
    files = {"proc/self/cgroup": "0::/a/b\n", f"{base}/a/b/memory.max": "3000000\n"}
    files[f"{base}/a/b/memory.current"] = "1000000\n"
    assert available_memory(system(tmp_path, files)) == 2_000_000
    files[f"{base}/a/b/memory.stat"] = "anon 5\ninactive_file 400000\n"
    assert available_memory(system(tmp_path, files)) == 2_400_000


def test_the_tightest_cgroup_above_counts(tmp_path: Path) -> None:
    base = "sys/fs/cgroup"
    files = {"proc/self/cgroup": "0::/a/b\n", f"{base}/a/b/memory.max": "max\n", f"{base}/a/b/memory.current": "5\n"}
    files |= {f"{base}/a/memory.max": "900000\n", f"{base}/a/memory.current": "100000\n"}
    files |= {f"{base}/memory.max": "2000000\n", f"{base}/memory.current": "100000\n"}
    assert available_memory(system(tmp_path, files)) == 800_000


def test_inside_a_container_only_the_top_is_there(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/host/path\n", "sys/fs/cgroup/memory.max": "700000\n"}
    files["sys/fs/cgroup/memory.current"] = "100000\n"
    assert available_memory(system(tmp_path, files)) == 600_000


def test_cgroup_v1(tmp_path: Path) -> None:
    base = "sys/fs/cgroup/memory/job"
    files = {"proc/self/cgroup": "9:cpu:/x\n4:hugetlb,memory:/job\n", f"{base}/memory.limit_in_bytes": "3000000\n"}
    files |= {f"{base}/memory.usage_in_bytes": "2500000\n", f"{base}/memory.stat": "total_inactive_file 100000\n"}
    assert available_memory(system(tmp_path, files)) == 600_000
    files[f"{base}/memory.limit_in_bytes"] = "9223372036854771712\n"
    assert available_memory(system(tmp_path, files)) == FREE


def test_usage_above_the_limit_leaves_nothing(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "10\n", "sys/fs/cgroup/memory.current": "20\n"}
    assert available_memory(system(tmp_path, files)) == 0


def test_a_system_that_says_nothing(tmp_path: Path) -> None:
    assert available_memory(tmp_path) > 1 << 20


def test_this_machine() -> None:
    assert 1 << 20 < available_memory() < 1 << 50


def test_more_than_there_is_is_refused() -> None:
    check_available(100, "the KV pool", 100)
    with pytest.raises(
        ConfigError, match=r"the KV pool needs 2\.00 KiB, but 1\.00 KiB are available: 1\.00 KiB are missing"
    ):
        check_available(2048, "the KV pool", 1024)
    with pytest.raises(ConfigError, match="TiB"):
        check_available(1 << 60, "everything")


@pytest.mark.parametrize(
    ("device", "weights", "fits"),
    [("cpu", 50, True), ("cpu", 51, False), ("cpu:0", 0, True), ("cuda", 1, False), ("cuda:1", 0, False)],
)
def test_weights_are_there_twice_on_a_cpu_with_room(device: str, weights: int, fits: bool) -> None:
    assert fits_beside(device, weights, 100) is fits


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (3 << 30, "3.00 GiB"), (5 << 50, "5120.00 TiB")],
)
def test_sizes_are_readable(size: int, text: Any) -> None:
    assert format_size(size) == text
