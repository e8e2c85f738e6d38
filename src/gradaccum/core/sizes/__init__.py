"""Rows into micro-batches: even sizes, the fastest that fits, what memory is free."""

from gradaccum.core.sizes.plans import GivenSizes, Groups, Joined, Plan, Rows, Slice, TokenBudget, Tokens
from gradaccum.core.sizes.search import (
    MARGIN,
    BatchSizeFinder,
    DoesNotFit,
    FixedSize,
    MemoryLine,
    SizeEstimate,
    container_limits,
    even_sizes,
    format_bytes,
    free_host_memory,
    largest_size,
    parse_bytes,
    process_memory,
)

__all__ = [
    "MARGIN", "BatchSizeFinder", "DoesNotFit", "FixedSize", "GivenSizes", "Groups", "Joined", "MemoryLine", "Plan",
    "Rows", "SizeEstimate", "Slice", "TokenBudget", "Tokens", "container_limits", "even_sizes", "format_bytes",
    "free_host_memory", "largest_size", "parse_bytes", "process_memory",
]  # fmt: skip
