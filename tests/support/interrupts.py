"""Interrupts of a call at each of its bytecodes, as a signal's handler may raise between any two."""

from __future__ import annotations

import opcode
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

# No signal is handled at the return itself; what is raised in a finalizer is printed and lost.
_LEFT_OUT = {opcode.opmap[name] for name in ("RETURN_VALUE", "RETURN_CONST") if name in opcode.opmap}
_FINALIZERS = ("__del__", "_remove")


class InterruptAt:
    """A trace function that raises ``KeyboardInterrupt`` before the bytecode of a number, in frames of some files.

    ``place``: where it has, "" before.
    """

    def __init__(self, number: int, files: tuple[str, ...]) -> None:
        self._left, self._files, self.place = number, files, ""

    def __call__(self, frame: FrameType, event: str, argument: Any) -> InterruptAt:
        code = frame.f_code
        frame.f_trace_opcodes = any(file in code.co_filename for file in self._files)
        if event == "opcode" and code.co_code[frame.f_lasti] not in _LEFT_OUT:
            self._left -= 1
            if self._left < 0 and not _is_finalizing(frame):
                self.place = f"{code.co_qualname}, line {frame.f_lineno}, bytecode {frame.f_lasti}"
                raise KeyboardInterrupt
        return self


def _is_finalizing(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_name not in _FINALIZERS:
        frame = frame.f_back
    return frame is not None


def interrupt_everywhere(work: Callable[[], object], files: tuple[str, ...]) -> Iterator[str]:
    """Call ``work`` again and again, interrupted one bytecode later each time; give each place, after the interrupt."""
    number = 0
    while place := interrupt_at(number, work, files):
        yield place
        number += 1


def interrupt_at(number: int, work: Callable[[], object], files: tuple[str, ...]) -> str:
    """Call ``work``, interrupted at the bytecode of this number; return the place, "" where it has ended before."""
    traced, before = InterruptAt(number, files), sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # CPython 3.12 looks for one such frame as tracing begins
    sys.settrace(traced)
    try:
        work()
    except KeyboardInterrupt:
        assert traced.place
    finally:
        sys.settrace(before)
    return traced.place
