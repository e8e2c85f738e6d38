"""The pieces that a large batch is cut into, as rows and columns; nothing is copied before its turn."""

from __future__ import annotations

from dataclasses import dataclass

from gradaccum.sizes import even_sizes

__all__ = ["Piece"]


@dataclass(frozen=True)
class Piece:
    """One micro-batch: which rows, and up to which columns where rows are padded.

    Example:
        >>> [piece.rows for piece in Piece(slice(4, 14)).split(4)]
        [slice(4, 8, None), slice(8, 11, None), slice(11, 14, None)]
    """

    rows: slice | list[int]
    columns: tuple[int, int] | None = None

    @property
    def size(self) -> int:
        """Its number of rows."""
        return self.rows.stop - self.rows.start if isinstance(self.rows, slice) else len(self.rows)

    @property
    def tokens(self) -> int:
        """Rows times columns; its rows where there are no columns."""
        return self.size * (self.columns[1] - self.columns[0] if self.columns is not None else 1)

    def split(self, size: int) -> list[Piece]:
        """Pieces of at most `size` rows, as even as can be."""
        pieces, start = [], 0
        for length in even_sizes(self.size, size):
            if isinstance(self.rows, slice):
                first = self.rows.start + start
                pieces.append(Piece(slice(first, first + length), self.columns))
            else:
                pieces.append(Piece(self.rows[start : start + length], self.columns))
            start += length
        return pieces
