"""Rows into micro-batches: even sizes, the fastest that fits, what memory is free."""

from gradaccum.core.sizes.finder import BatchSizeFinder
from gradaccum.core.sizes.fixed import FixedSize, even_sizes
from gradaccum.core.sizes.plans import GivenSizes, Groups, Plan, Rows, Slice
from gradaccum.lazy import when_used

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gradaccum.core.sizes.memory import (
        MARGIN,
        DoesNotFit,
        SizeEstimate,
        container_limits,
        format_bytes,
        free_host_memory,
        largest_size,
        parse_bytes,
        process_memory,
    )
    from gradaccum.core.sizes.search import WORSE, MemoryLine, fastest_size, seconds_of
    from gradaccum.core.sizes.tokens import Joined, TokenBudget, Tokens
else:
    _MEMORY = (
        "MARGIN", "DoesNotFit", "SizeEstimate", "container_limits", "format_bytes", "free_host_memory", "largest_size",
        "parse_bytes", "process_memory",
    )  # fmt: skip
    __getattr__, __dir__ = when_used(
        __name__,
        {
            **dict.fromkeys(_MEMORY, "gradaccum.core.sizes.memory"),
            **dict.fromkeys(("WORSE", "MemoryLine", "fastest_size", "seconds_of"), "gradaccum.core.sizes.search"),
            **dict.fromkeys(("Joined", "TokenBudget", "Tokens"), "gradaccum.core.sizes.tokens"),
        },
    )

__all__ = [
    "MARGIN", "WORSE", "BatchSizeFinder", "DoesNotFit", "FixedSize", "GivenSizes", "Groups", "Joined", "MemoryLine",
    "Plan", "Rows", "SizeEstimate", "Slice", "TokenBudget", "Tokens", "container_limits", "even_sizes", "fastest_size",
    "format_bytes", "free_host_memory", "largest_size", "parse_bytes", "process_memory", "seconds_of",
]  # fmt: skip
