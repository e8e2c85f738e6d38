"""Processes that are started once for all tests of several ranks."""

from tests.torch.distributed.conftest import ranks, whole_ranks
from tests.torch.distributed.processes import import_before

import_before(*(f"tests.integrations.distributed.{name}_cases" for name in ("accelerate", "trainer")))
import_before("tests.integrations.distributed.sentence_transformers_cases")

__all__ = ["ranks", "whole_ranks"]
