"""Processes that are started once for all tests of several ranks."""

from tests.torch.distributed.conftest import ranks, whole_ranks

__all__ = ["ranks", "whole_ranks"]
