"""Rows into micro-batches: even sizes, the fastest that fits, what memory is free."""

from gradaccum.core.sizes.plans import GivenSizes, Groups, Joined, Plan, Rows, Slice, TokenBudget, Tokens
from gradaccum.core.sizes.search import (
    MARGIN,
    WORSE,
    BatchSizeFinder,
    DoesNotFit,
    FixedSize,
    MemoryLine,
    SizeEstimate,
    container_limits,
    even_sizes,
    fastest_size,
    format_bytes,
    free_host_memory,
    largest_size,
    parse_bytes,
    process_memory,
    seconds_of,
)

__all__ = [
    "MARGIN", "WORSE", "BatchSizeFinder", "DoesNotFit", "FixedSize", "GivenSizes", "Groups", "Joined", "MemoryLine",
    "Plan", "Rows", "SizeEstimate", "Slice", "TokenBudget", "Tokens", "container_limits", "even_sizes", "fastest_size",
    "format_bytes", "free_host_memory", "largest_size", "parse_bytes", "process_memory", "seconds_of",
]  # fmt: skip
