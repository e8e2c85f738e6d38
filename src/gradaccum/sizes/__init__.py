"""Rows into micro-batches: even sizes, the fastest that fits, what memory is free, what several ranks cost."""

from gradaccum.sizes.by_shape import Sizers
from gradaccum.sizes.estimate import DoesNotFit, SizeEstimate, format_bytes, largest_size
from gradaccum.sizes.even import FixedSize, even_sizes
from gradaccum.sizes.groups import Groups
from gradaccum.sizes.host_memory import container_limits, free_host_memory, parse_bytes, process_memory
from gradaccum.sizes.packs import Joined
from gradaccum.sizes.pieces import GivenSizes, Piece, Rows, TokenBudget, Tokens
from gradaccum.sizes.scaling import Link, Scaling
from gradaccum.sizes.search import MARGIN, MemoryLine

__all__ = [
    "MARGIN",
    "DoesNotFit",
    "FixedSize",
    "GivenSizes",
    "Groups",
    "Joined",
    "Link",
    "MemoryLine",
    "Piece",
    "Rows",
    "Scaling",
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
