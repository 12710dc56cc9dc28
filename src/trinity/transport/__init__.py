"""Transports: move paged blocks between instances. This package exports all that an author of one needs.

``Transport`` and ``Remote`` are the contract, ``trinity.testing.transport_contract`` tests it. ``check_read`` and
``check_block_numbers`` refuse bad requests before a byte moves; ``check_read`` returns a ``CopyPlan``, what to move.
``find_runs``, ``copy_pieces`` and ``view_units`` help to move blocks of a ``BlockMemory``.
"""

from trinity.memory.block_memory import BlockMemory as BlockMemory
from trinity.memory.block_memory import view_units as view_units
from trinity.transport.base import ByteRange as ByteRange
from trinity.transport.base import CopyPlan as CopyPlan
from trinity.transport.base import Remote as Remote
from trinity.transport.base import Strided as Strided
from trinity.transport.base import Transport as Transport
from trinity.transport.base import check_block_numbers as check_block_numbers
from trinity.transport.base import check_read as check_read
from trinity.transport.base import copy_pieces as copy_pieces
from trinity.transport.base import find_runs as find_runs
from trinity.transport.registry import known_transports as known_transports
from trinity.transport.registry import make_transport as make_transport
