"""A device's memory divided among tenants: by count and by role, never more than there is, the same for all who ask."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity.costs.device_memory import (
    CONTEXT_BYTES,
    DeviceTenant,
    free_when_loaded,
    group_by_device,
    pool_weight,
    share_of_pools,
)

ROLES = st.sampled_from(["E", "P", "D", "EP", "ED", "PD", "EPD"])


def test_one_alone_gets_four_fifths() -> None:
    assert share_of_pools(1000, "EPD", []) == 800


def test_equal_roles_get_equal_shares() -> None:
    assert share_of_pools(1000, "D", ["D", "PD", "ED"]) == 200


def test_an_encoder_needs_least_and_a_decoder_most() -> None:
    of = {roles: share_of_pools(16_000, roles, [each for each in "EPD" if each != roles]) for roles in "EPD"}
    assert of == {"E": 800, "P": 4000, "D": 8000}
    assert pool_weight("EP") == pool_weight("P")


def test_what_users_have_set_is_taken_off_first() -> None:
    assert share_of_pools(1000, "D", ["D"], fixed_bytes=300) == 250
    assert share_of_pools(1000, "D", ["D"], fixed_bytes=900) == 0


@given(st.lists(ROLES, min_size=1, max_size=9), st.integers(0, 1 << 40), st.integers(0, 1 << 38))
def test_shares_never_add_up_to_more_than_there_is(roles: list[str], free: int, fixed: int) -> None:
    shares = [share_of_pools(free, each, roles[:n] + roles[n + 1 :], fixed) for n, each in enumerate(roles)]
    assert all(share >= 0 for share in shares)
    assert sum(shares) + min(fixed, free) <= free


def test_what_others_have_yet_to_load_is_not_free() -> None:
    total, weights = 100 << 30, [1 << 30, 14 << 30]
    assert free_when_loaded(total, weights, 2) == total - sum(weights) - 2 * CONTEXT_BYTES
    assert free_when_loaded(total, weights[1:], 2) == total - weights[1] - 2 * CONTEXT_BYTES, "which two share"


def test_pools_that_are_set_cost_their_blocks_and_memory_costs_what_weights_leave() -> None:
    assert DeviceTenant("P", pools={"image": 2, "kv": 3}).fixed_bytes(7, {"image": 10, "kv": 100}) == 320
    assert DeviceTenant("D", pools={"image": 2, "kv": 3}).fixed_bytes(7, {"kv": 100}) == 300  # it makes no image pool
    assert DeviceTenant("D", memory_bytes=50).fixed_bytes(7, {"kv": 100}) == 43
    assert DeviceTenant("D").fixed_bytes(7, {"kv": 100}) is None


@pytest.mark.parametrize(
    ("places", "beside"),
    [
        ([("", "cuda"), ("", "cuda:0"), ("", "cuda:1")], [[1], [0], []]),
        ([("", "cuda:1"), ("", "cpu"), ("", "cuda:1"), ("", "cuda:1")], [[2, 3], [], [0, 3], [0, 2]]),
        ([("one", "cuda:0"), ("other", "cuda:0"), ("one", "cuda")], [[2], [], [0]]),
    ],
)
def test_those_of_one_device_of_one_machine_share_it(places: list[tuple[str, str]], beside: list[list[int]]) -> None:
    assert group_by_device(places) == beside
