"""Rows into micro-batches: even sizes, the fastest that fits, what memory is free."""

from gradaccum.core.sizes.by_shape import BatchSizeFinder
from gradaccum.core.sizes.estimate import DoesNotFit, SizeEstimate, format_bytes, largest_size
from gradaccum.core.sizes.even import FixedSize, even_sizes
from gradaccum.core.sizes.groups import Groups
from gradaccum.core.sizes.host_memory import container_limits, free_host_memory, parse_bytes, process_memory
from gradaccum.core.sizes.pieces import GivenSizes, Joined, Plan, Rows, Slice, TokenBudget, Tokens
from gradaccum.core.sizes.search import MARGIN, MemoryLine

__all__ = [
    "MARGIN",
    "BatchSizeFinder",
    "DoesNotFit",
    "FixedSize",
    "GivenSizes",
    "Groups",
    "Joined",
    "MemoryLine",
    "Plan",
    "Rows",
    "SizeEstimate",
    "Slice",
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
