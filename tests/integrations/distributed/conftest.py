"""Processes that are started once for all tests of several ranks."""

from tests.torch.distributed.conftest import ranks, started

__all__ = ["ranks", "started"]
