"""Objects that hold threads, event loops or device memory: none is pickled or copied."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from trinity.errors import ConfigError

T = TypeVar("T")


def forbid_copies(advice: str) -> Callable[[type[T]], type[T]]:
    """Make pickling and copying an object of a class raise ``ConfigError`` at once, with this advice (a decorator).

    Python would walk all that the object holds, for a minute, and fail at some lock.
    """

    def forbid(kind: type[T]) -> type[T]:
        def refuse(self: T, protocol: int) -> str:
            raise ConfigError(
                f"a {type(self).__name__} can be neither pickled nor copied: it holds threads, event loops or memory "
                f"of this process; {advice}"
            )

        kind.__reduce_ex__ = refuse  # type: ignore[method-assign, assignment]
        return kind

    return forbid
