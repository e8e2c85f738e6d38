"""Rows into micro-batches: even sizes, the fastest that fits, what memory is free."""

from gradaccum.core.sizes.by_shape import Sizers
from gradaccum.core.sizes.estimate import DoesNotFit, SizeEstimate, format_bytes, largest_size
from gradaccum.core.sizes.even import FixedSize, even_sizes
from gradaccum.core.sizes.groups import Groups
from gradaccum.core.sizes.host_memory import container_limits, free_host_memory, parse_bytes, process_memory
from gradaccum.core.sizes.packs import Joined
from gradaccum.core.sizes.pieces import GivenSizes, Piece, Rows, TokenBudget, Tokens
from gradaccum.core.sizes.search import MARGIN, MemoryLine

__all__ = [
    "MARGIN",
    "DoesNotFit",
    "FixedSize",
    "GivenSizes",
    "Groups",
    "Joined",
    "MemoryLine",
    "Piece",
    "Rows",
    "SizeEstimate",
    "Sizers",
    "TokenBudget",
    "Tokens",
    "container_limits",
    "even_sizes",
    "format_bytes",
    "free_host_memory",
    "largest_size",
    "parse_bytes",
    "process_memory",
]
