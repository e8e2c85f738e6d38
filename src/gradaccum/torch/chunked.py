"""`Chunked` under the name that pickled models know it by. `gradaccum.torch.chunked` itself is the class."""

from typing import TYPE_CHECKING

from gradaccum.lazy import when_used

if TYPE_CHECKING:
    from gradaccum.torch.chunking import Chunked, chunked
else:
    __getattr__, __dir__ = when_used(
        __name__, {"Chunked": "gradaccum.torch.chunking", "chunked": "gradaccum.torch.chunking"}
    )

__all__ = ["Chunked", "chunked"]
