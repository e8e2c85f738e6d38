"""How a large batch is cut into micro-batches."""

from __future__ import annotations

from gradaccum.schedule import checked_count

__all__ = ["even_sizes"]


def even_sizes(rows: int, micro_batch_size: int) -> list[int]:
    """Sizes of the fewest micro-batches of at most `micro_batch_size` rows, as even as can be.

    There are at most two distinct sizes, one row apart, the larger ones first: a compiler sees two shapes at most.

    Args:
        rows: Rows of the large batch, >= 0.
        micro_batch_size: Rows that one micro-batch may have at most.

    Raises:
        TypeError: An argument is not an int.
        ValueError: `rows` is below 0, or `micro_batch_size` below 1.

    Example:
        >>> even_sizes(100, 48), even_sizes(64, 16), even_sizes(3, 16)
        ([34, 33, 33], [16, 16, 16, 16], [3])
    """
    checked_count(rows, "rows", least=0)
    checked_count(micro_batch_size, "micro_batch_size")
    if rows == 0:
        return []
    count = -(-rows // micro_batch_size)
    size, larger = divmod(rows, count)
    return [size + 1] * larger + [size] * (count - larger)
