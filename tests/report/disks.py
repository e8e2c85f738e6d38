"""A disk that takes no more."""

import contextlib
import resource

LITTLE = 4096


@contextlib.contextmanager
def full_disk():
    """Files take `LITTLE` bytes: the system refuses to write more, as it does on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LITTLE, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
