"""`Chunked` under the name that pickled models know it by. `gradaccum.torch.chunked` itself is the class."""

from gradaccum.torch.chunking import Chunked, chunked

__all__ = ["Chunked", "chunked"]
