"""CUDA graphs of every encoder, and of what goes wrong in one, over a stand-in for the device (no GPU)."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from support.checkpoint_files import checkpoint
from support.cuda_stand_in import DEVICE, REFUSED, CudaStandIn, DeviceTensor, cuda_stand_in, move_to_device
from support.operator_tape import every_operator_is_torchs
from support.stage_driver import processed
from support.thinned import thinned
from trinity.core.messages import Encode, Step
from trinity.memory.block_memory import BlockMemory
from trinity.memory.devices import free_cached_memory
from trinity.preprocess.processor import ProcessedRequest
from trinity.stages.encode import EncodeStage, make_graph_key
from trinity.stages.gpu.cuda_graphs import GraphCache, GraphFunction, make_graph_cache
from trinity.stages.models import load_model
from trinity.testing.checkpoints import ARCHITECTURES

__all__ = ["cuda_stand_in"]
pytestmark = pytest.mark.usefixtures(every_operator_is_torchs.__name__)
BY_PIXELS = ("smolvlm", "idefics3")  # their masks are as large as the image: part of no key
OFTEN = ("llava", "qwen3_vl", "gemma3")  # a plain one, positions in 3-D, a projector of its own
RECORDED = tuple(each for each in ARCHITECTURES if each not in (*BY_PIXELS, "llama", "mistral"))


def cache_on_device() -> GraphCache:
    made = make_graph_cache(DEVICE)
    assert made is not None
    return made


def double(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
    return [inputs[0] * 2]


def on_host(tensor: Tensor) -> Tensor:
    return tensor.to("cpu")


def test_a_replay_follows_its_inputs(cuda_stand_in: CudaStandIn) -> None:
    made = cache_on_device()
    for seed in range(3):
        rows = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
        found = made.call("key", double, [rows])
        assert found is not None
        torch.testing.assert_close(on_host(found[0]), rows * 2)
    assert (cuda_stand_in.captures, cuda_stand_in.replays) == (1, 4)


def test_a_capture_that_fails_leaves_all_as_it_was(
    cuda_stand_in: CudaStandIn, caplog: pytest.LogCaptureFixture
) -> None:
    """The thread on its own stream, allocators in order, and the next call is recorded (fails at cbd100c)."""
    made, before = cache_on_device(), cuda_stand_in.current

    def fails(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        cuda_stand_in.break_capture()  # as what no operator shows: a library that synchronises
        return double(inputs)

    assert made.call("fails", fails, [torch.ones(2)]) is None
    assert caplog.messages == [
        "no CUDA graph of fails: CUDA error: operation failed due to a previous error during capture"
    ]
    assert cuda_stand_in.current is before
    assert not cuda_stand_in.underway
    found = made.call("next", double, [torch.ones(2)])
    assert found is not None
    assert on_host(found[0]).tolist() == [2.0, 2.0]
    assert cuda_stand_in.current is before


def test_an_error_in_a_capture_that_ends_well(cuda_stand_in: CudaStandIn) -> None:
    made, before = cache_on_device(), cuda_stand_in.current

    def fails(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        if cuda_stand_in.capture is not None:
            raise torch.OutOfMemoryError("none left")
        return double(inputs)

    assert made.call("fails", fails, [torch.ones(2)]) is None
    assert (cuda_stand_in.current, cuda_stand_in.underway) == (before, set())
    assert made.call("next", double, [torch.ones(2)]) is not None


def test_after_three_failed_captures_none_begins(cuda_stand_in: CudaStandIn) -> None:
    """Each may keep memory that torch cannot give back."""
    made = cache_on_device()

    def fails(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        cuda_stand_in.break_capture()
        return double(inputs)

    assert [made.call(number, fails, [torch.ones(2)]) for number in range(5)] == [None] * 5
    assert cuda_stand_in.captures == 3
    assert made.call("next", double, [torch.ones(2)]) is None


def test_two_lanes_record_one_after_the_other(cuda_stand_in: CudaStandIn, caplog: pytest.LogCaptureFixture) -> None:
    """``torch.cuda.graph`` begins with a wait for the whole device, which breaks what another lane captures."""
    entered, second = threading.Event(), threading.Event()

    def slow(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        if cuda_stand_in.capture is not None and not entered.is_set():
            entered.set()  # the other lane may begin: nobody waits for longer than this
            assert second.wait(10)
            cuda_stand_in.refused_wait.wait(0.5)
        return double(inputs)

    def follow(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        if cuda_stand_in.capture is None:
            second.set()  # it runs eagerly, and records next
        return double(inputs)

    def record(run: GraphFunction) -> None:
        with cuda_stand_in.enter_thread():
            found.append(cache_on_device().call("key", run, [torch.ones(2)]))

    found: list[Sequence[Tensor] | None] = []
    lanes = [threading.Thread(target=record, args=(run,)) for run in (slow, follow)]
    lanes[0].start()
    assert entered.wait(10)
    lanes[1].start()
    for lane in lanes:
        lane.join()
    assert caplog.messages == []
    assert not cuda_stand_in.refused_wait.is_set()
    assert [each is not None and on_host(each[0]).tolist() for each in found] == [[2.0, 2.0]] * 2


def test_memory_is_given_back_between_two_recordings(cuda_stand_in: CudaStandIn) -> None:
    """While a lane captures, torch's allocator takes that for a fault of its own."""
    freeing = threading.Thread(target=free_cached_memory, args=(DEVICE,))

    def run(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        if cuda_stand_in.capture is not None:
            freeing.start()
            freeing.join(0.1)
            assert freeing.is_alive(), "it waits"
        return double(inputs)

    assert cache_on_device().call("key", run, [torch.ones(2)]) is not None
    freeing.join(10)
    assert not freeing.is_alive()


def test_a_read_is_found_before_a_capture_begins(cuda_stand_in: CudaStandIn) -> None:
    made = cache_on_device()
    looks = {
        "item": lambda inputs: [inputs[0] * inputs[0].sum().item()],
        "list": lambda inputs: [inputs[0] * sum(inputs[0].tolist())],
        "cpu": lambda inputs: [inputs[0].cpu()],
        "if": lambda inputs: [inputs[0] if inputs[0].any() else inputs[0] * 2],
        "mask": lambda inputs: [inputs[0][inputs[0] > 0]],
        "where": lambda inputs: [torch.where(inputs[0] > 0)[0]],
        "repeat": lambda inputs: [inputs[0].repeat_interleave(inputs[0].long())],
        "into a tensor of the host": lambda inputs: [torch.zeros(2).copy_(inputs[0])],
    }
    for name, run in looks.items():
        assert made.call(name, run, [torch.ones(2)]) is None, name
    assert cuda_stand_in.captures == 0


def test_the_stand_in_refuses_what_cuda_does(cuda_stand_in: CudaStandIn) -> None:
    there = torch.ones(2).to(DEVICE)
    assert isinstance(there, DeviceTensor)
    with pytest.raises(RuntimeError, match="same device"):
        there + torch.ones(2)
    assert on_host(there + torch.tensor(1.0)).tolist() == [2.0, 2.0]
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    graph.capture_begin(pool)
    with pytest.raises(RuntimeError, match=REFUSED):
        there.sum().item()
    with pytest.raises(RuntimeError, match="previous error"):
        there + there
    with pytest.raises(RuntimeError, match="captures_underway"):
        torch.cuda.empty_cache()
    with pytest.raises(RuntimeError, match="previous error"):
        graph.capture_end()
    with pytest.raises(RuntimeError, match="already recording"):
        graph.capture_begin(pool)
    torch.cuda.synchronize()
    other = torch.cuda.CUDAGraph()
    other.capture_begin(torch.cuda.graph_pool_handle())
    with pytest.raises(RuntimeError, match=REFUSED):
        torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="previous error"):
        other.capture_end()


@dataclass
class Encoders:
    """One E as it is, one on the stand-in that records, and requests of one image each for both."""

    plain: EncodeStage
    device: EncodeStage
    made: list[ProcessedRequest]

    def encode(self, stage: EncodeStage, *chosen: int) -> Tensor:
        """The features of these requests' images, encoded in one step; each image has 20 blocks of its own."""
        stage.image.tensor.zero_()
        encodes = []
        for place, index in enumerate(chosen):
            one, blocks = self.made[index], tuple(range(20 * place, 20 * place + 20))
            encodes.append(Encode(f"r{place}", 0, one.work.media[0], blocks, one.inputs[0]))
        stage.forward(Step(0, "vision", encodes=tuple(encodes)))
        return stage.image.tensor.clone()


@pytest.fixture
def encoders(request: pytest.FixtureRequest, tmp_path: Path) -> Encoders:
    name = request.param
    own = shutil.copytree(checkpoint(name), tmp_path / name)  # weights of its own, which go to the stand-in
    plain, moved = (load_model(place, "E", dtype="float32") for place in (checkpoint(name), own))
    move_to_device(moved.vision)
    shape = plain.image_shape(16)
    assert shape is not None
    one, other = (EncodeStage(each, BlockMemory(shape, 100)) for each in (plain, replace(moved, device=DEVICE)))
    return Encoders(one, other, [processed(name, 1, seed) for seed in (0, 5, 9)])


@pytest.mark.parametrize("encoders", thinned(RECORDED, OFTEN.__contains__), indirect=True)
def test_every_encoder_is_recorded(encoders: Encoders, cuda_stand_in: CudaStandIn) -> None:
    """Grids and sizes stay on the host: no capture fails, and each replay has the features of its own image."""
    encoders.device._graphs = cache_on_device()
    for chosen in ((0,), (0,), (1,), (2,), (0, 1), (2, 0), (1, 2)):
        found, wanted = (encoders.encode(stage, *chosen) for stage in (encoders.device, encoders.plain))
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    assert (encoders.encode(encoders.plain, 2) - encoders.encode(encoders.plain, 1)).abs().max() > 0.1
    assert cuda_stand_in.captures == 2, "of one image and of two, each when it came again"
    assert cuda_stand_in.replays == 2 + 3 + 2, "and one to compare it"


@pytest.mark.parametrize("encoders", BY_PIXELS, indirect=True)
def test_an_encoder_that_looks_at_pixels_runs_as_it_is(encoders: Encoders, cuda_stand_in: CudaStandIn) -> None:
    encoders.device._graphs = cache_on_device()
    for chosen in ((0,), (1,), (2,)):
        found, wanted = (encoders.encode(stage, *chosen) for stage in (encoders.device, encoders.plain))
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    assert cuda_stand_in.captures == 0


def test_every_architecture_is_one_of_them() -> None:
    assert {*RECORDED, *BY_PIXELS, "llama", "mistral"} == {*ARCHITECTURES}


def test_what_encodes_must_have_in_common() -> None:
    def item(height: int = 4, grid: tuple[int, ...] = (1, 2, 3)) -> dict[str, Tensor]:
        return {"pixel_values": torch.rand(1, 3, height, 4), "image_grid_thw": torch.tensor([grid])}

    one = make_graph_key("image", [item()], [6])
    assert one == make_graph_key("image", [item()], [6])
    others = [
        make_graph_key("video", [item()], [6]),
        make_graph_key("image", [item()], [7]),
        make_graph_key("image", [item(8)], [6]),
        make_graph_key("image", [item(grid=(1, 3, 2))], [6]),
        make_graph_key("image", [item()] * 2, [6, 6]),
    ]
    assert len({one, *others}) == 6
    assert make_graph_key("image", [item()] * 5, [6] * 5) is None, "many items are work enough for a GPU"
    assert make_graph_key("image", [{"ids": torch.zeros(65, dtype=torch.long)}], [6]) is None
