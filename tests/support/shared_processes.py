"""Tests of one group share a process, and with it their fixtures: those of a file, or of one ``xdist_group``.

pytest-xdist tells groups by the end of a test's id, "@GROUP", which it writes to ``Node._nodeid``. Since pytest 9.2 an
id is elsewhere: ``--dist loadgroup`` then spreads the tests of each file over all processes, and says nothing (issue
1386 of pytest-xdist). So ids get that end here while xdist sends them, and lose it again.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest


class SharedProcesses:
    """A pytest plugin, for each process of xdist."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            if item.get_closest_marker("xdist_group") is None:
                item.add_marker(pytest.mark.xdist_group(item.path.stem))

    @pytest.hookimpl(wrapper=True)
    def pytest_collection_finish(self, session: pytest.Session) -> Generator[None, None, None]:
        items: list[Any] = session.items if session.config.getoption("loadgroup", False) else []
        plain = [(item, item._id) for item in items if hasattr(item, "_id") and not item.nodeid.endswith(ending(item))]
        for item, identity in plain:
            item._id = type(identity).parse(f"{item.nodeid}{ending(item)}")
        yield
        for item, identity in plain:
            item._id = identity


def ending(item: pytest.Item) -> str:
    """What xdist finds a test's group by: the innermost mark's."""
    mark = item.get_closest_marker("xdist_group")
    assert mark is not None
    return f"@{mark.args[0]}"
