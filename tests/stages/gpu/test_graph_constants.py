"""Constants of a recording: what stays on the host, what goes to the device once, and what is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from support.cuda_stand_in import DEVICE, CudaStandIn, DeviceTensor, Graph, cuda_stand_in
from trinity.stages.gpu.graph_constants import GraphConstants, Unrecordable

__all__ = ["cuda_stand_in"]


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    """Composite operators arrive whole there."""
    with torch.inference_mode():
        yield


def on_device(*numbers: float) -> Tensor:
    return torch.tensor(numbers).to(DEVICE)


def test_what_is_computed_of_numbers_of_the_host_stays_there(cuda_stand_in: CudaStandIn) -> None:
    constants = GraphConstants(DEVICE)
    grid, rows = torch.tensor([[1, 2, 3], [2, 1, 2]]), on_device(1.0)
    with constants.lifted():
        lengths = grid.prod(-1).pin_memory().to(DEVICE, non_blocking=True).cumsum(0, dtype=torch.int32)
        made = torch.tensor(lengths.tolist(), device=DEVICE)
        again = rows.new_tensor([3, 4])
        repeated = torch.repeat_interleave(grid[:, 1] * grid[:, 2], grid[:, 0])
    for found, wanted in ((lengths, [6, 10]), (made, [6, 10]), (again, [3.0, 4.0]), (repeated, [6, 2, 2])):
        assert not isinstance(found, DeviceTensor)
        assert found.tolist() == wanted


def test_what_meets_the_device_is_uploaded_once(cuda_stand_in: CudaStandIn) -> None:
    """By its numbers: the second run computes the same ones in other tensors."""
    constants = GraphConstants(DEVICE)
    rows = on_device(1.0, 2.0, 3.0)

    def run() -> Tensor:
        order = torch.arange(2, -1, -1)
        return rows[order] + order.to(DEVICE) * torch.tensor([True, True, False], device=DEVICE)

    with constants.lifted():
        first = run()
    waits = len(cuda_stand_in.waits)
    constants.seal()
    cuda_stand_in.capture = Graph(cuda_stand_in)  # any copy raises
    with constants.lifted():
        second = run()
    cuda_stand_in.capture = None
    assert len(cuda_stand_in.waits) == waits
    assert [each.to("cpu").tolist() for each in (first, second)] == [[5.0, 3.0, 1.0]] * 2


def test_numbers_that_differ_from_run_to_run_are_refused(cuda_stand_in: CudaStandIn) -> None:
    constants = GraphConstants(DEVICE)
    rows = on_device(1.0, 1.0)
    with constants.lifted():
        rows * torch.tensor([1.0, 2.0])
    constants.seal()
    with constants.lifted():
        rows * torch.tensor([1.0, 2.0])
    with constants.lifted(), pytest.raises(Unrecordable, match="other numbers"):
        rows * torch.tensor([7.0, 8.0])


READS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda rows: rows.sum().item(),
    "bool": lambda rows: bool(rows.any()),
    "list": lambda rows: rows.tolist(),
    "cpu": lambda rows: rows.cpu(),
    "float64 there": lambda rows: rows.to("cpu", torch.float64),
    "nonzero": lambda rows: rows.nonzero(),
    "mask": lambda rows: rows[rows > 0],
    "mask of the host": lambda rows: rows[torch.tensor([True, False])],
    "written by mask": lambda rows: rows.index_put_((rows > 0,), rows[:1]),
    "unique": lambda rows: rows.unique(),
    "equal": lambda rows: torch.equal(rows, rows + 1),
    "allclose": lambda rows: torch.allclose(rows, rows),
    "repeat": lambda rows: rows.repeat_interleave(rows.long()),
    "into the host": lambda rows: torch.zeros(2).copy_(rows),
    "out=": lambda rows: torch.add(rows, rows, out=torch.zeros(2)),
}


@pytest.mark.parametrize("read", READS)
def test_a_read_of_the_device_is_refused(read: str, cuda_stand_in: CudaStandIn) -> None:
    rows = torch.ones(2).to(DEVICE)
    with GraphConstants(DEVICE).lifted(), pytest.raises(Unrecordable, match="only the device knows"):
        READS[read](rows)


@pytest.mark.parametrize(
    "run",
    [
        lambda rows: rows[torch.tensor([1, 0])],
        lambda rows: rows.repeat_interleave(torch.tensor([2, 2]).to(DEVICE), output_size=4),
        lambda rows: torch.where(rows > 0, rows, 0.0),
        lambda rows: torch.zeros_like(torch.ones(2), device=DEVICE) + rows,
        lambda rows: rows.masked_fill(rows > 0, 3.0),
        lambda rows: rows.new_zeros(2).copy_(torch.ones(2)),
    ],
)
def test_what_reads_nothing_runs(run: Callable[[Tensor], Tensor], cuda_stand_in: CudaStandIn) -> None:
    rows = torch.ones(2).to(DEVICE)
    with GraphConstants(DEVICE).lifted():
        assert isinstance(run(rows), DeviceTensor)


def test_other_threads_read_what_they_like(cuda_stand_in: CudaStandIn) -> None:
    found: list[float] = []
    with GraphConstants(torch.device("cpu")).lifted():
        with pytest.raises(Unrecordable):
            torch.ones(2).sum().item()
        other = threading.Thread(target=lambda: found.append(torch.ones(2).sum().item()))
        other.start()
        other.join()
    assert found == [2.0]
