"""Random numbers that follow from a seed and a few counters: of a micro-batch, from its update and its place there."""

from __future__ import annotations

import hashlib
import random
import struct
import sys
from collections.abc import Iterable
from typing import Any

import torch

from gradaccum.on_torch.random_state import all_generators, every_device


def derived_seed(*numbers: int) -> int:
    """A seed of 63 bits that follows from these whole numbers, and differs where one of them does.

    Example:
        >>> derived_seed(0, 1) == derived_seed(0, 1), derived_seed(0, 1) == derived_seed(1, 0)
        (True, False)
    """
    packed = struct.pack(f"<{len(numbers)}Q", *(number % 2**64 for number in numbers))
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1


def every_generator(held: Iterable[Any]) -> list[Any]:
    """PyTorch's generators on all devices in use, Python's, NumPy's if it is loaded, and those that a model holds."""
    return [*all_generators(every_device()), *held]


def plant(seed: int, generators: Iterable[Any]) -> None:
    """Seed these generators, each with a seed of its own; those of devices are `torch.device`s."""
    for number, generator in enumerate(generators):
        _seed(generator, derived_seed(seed, number))


def _seed(generator: Any, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif generator == "cpu":
        torch.default_generator.manual_seed(seed)
    elif isinstance(generator, torch.device):
        torch.cuda.default_generators[generator.index].manual_seed(seed)
    elif generator == "python":
        random.seed(seed)
    elif isinstance(generator, random.Random):
        generator.seed(seed)
    elif generator == "numpy":
        sys.modules["numpy"].random.seed(seed % 2**32)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = type(generator.bit_generator)(seed).state
    else:
        generator.seed(seed % 2**32)
