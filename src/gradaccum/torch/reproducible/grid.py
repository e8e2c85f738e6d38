r"""Sums whose bits don't depend on the order of their addends, nor on how ranks share them out.

Floating-point addition rounds, so it is not associative; addition of whole numbers modulo 2^64 is. So each addend c is
rounded to a whole multiple of a grid's unit, and the multiples are added up as 64-bit integers. With an exponent e:

    M = 1.5 * 2^e          u = 2^(e - 52)          q(c) = bits(fl(c + M)) - bits(M)          c is nearly u * q(c)

**Rounding.** Let c be a float64 number with |c| <= 2^(e-1). Then 2^e <= c + M <= 2^(e+1), and in this range float64
numbers are u apart. So fl(c + M) = M + u q with a whole number q, with |c - u q| <= u / 2 and |q| <= 2^51. The bit
patterns of positive float64 numbers, read as integers, count them in their order. So bits(fl(c + M)) is bits(M) + q:
one addition rounds, and q needs no conversion. (At the upper end, 2^(e+1), the pattern is that of the next binade's
first number, which still is bits(M) + q.) q depends on c and e alone. Zeros of both signs have q = 0.

**Sum.** Modulo 2^64, integer addition is associative and commutative, so the sum of all bit patterns minus n bits(M) is
sum_i q(c_i) in any order, over any cut, and with any algorithm of an all-reduce. For n < 2^11 addends it is less than
2^62 in absolute value, so it is the true sum. For more, |c| <= 2^(e-1) / 2^s is demanded, with n < 2^(11+s).

**Error.** The result is u times the sum of the q, as float64: one more rounding. The grid costs at most n u / 2. With
e = exponent(b), 2^(e-1) <= 2 b (for n < 2^11), so u <= b 2^-50 and the error is at most n b 2^-51. A float32 sum's
bound is (n - 1) 2^-24 sum |c_i|. With b = 2^5 times the largest entry g, the headroom of `LIMIT`, the error is at most
n g 2^-46, which for an entry of size 1e-4 g is 2^-24 * 1e-4 * n g divided by 400.

Infinities and NaN are no multiples. A tensor that has some is added up in two parts: what is finite as above, and the
rest as float64, where any order gives the same of 0, inf, -inf and NaN; of NaN one pattern is made.

Source: Demmel and Nguyen, "Parallel Reproducible Summation", 2015; Ahrens, Demmel and Nguyen, "Algorithms for Efficient
Reproducible Floating Point Summation", 2020, whose bins these are, one for each tensor.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

LIMIT = 2.0**5
"""How much larger than in the update before a tensor's entries may be without a new grid."""

_AT_ONCE = {"cpu": 1 << 16}
"""Entries that are rounded at once: on a CPU, as many as stay in its cache."""
_LARGEST = 2.0**1022
"""What is larger counts as infinite: there is no grid above it."""
_ROOM = 11
"""The sum of 2^11 addends is less than 2^62 units."""


def exponent(bound: float, addends: int = 1) -> int:
    """The exponent of a grid on which so many numbers up to this bound can be added up.

    Example:
        >>> exponent(0.75), exponent(1.0), exponent(0.75, addends=5000)
        (1, 2, 3)
    """
    return max(min(math.frexp(bound)[1] + 1 + _spare(addends), 1023), -1022)


def holds(largest: float, exponent: int, addends: int) -> bool:
    """Whether so many numbers, the largest one of this size, can be added up on this grid; not if it is NaN."""
    return largest * 2.0 ** _spare(addends) <= 2.0 ** (exponent - 1)


def _spare(addends: int) -> int:
    return max(addends.bit_length() - _ROOM, 0)


def offset(exponent: int) -> float:
    """M: 1.5 * 2^exponent."""
    return math.ldexp(1.5, exponent)


def _bits(number: float) -> int:
    found: int = struct.unpack("<q", struct.pack("<d", number))[0]
    return found


def _wrapped(number: int) -> int:
    """Modulo 2^64, as a signed number."""
    return (number + 2**63) % 2**64 - 2**63


class GridSums:
    """For each of some tensors, a sum of addends of its shape, on a grid of its own.

    Call `open`, `add` for each addend, `close`; add up what `parts` returns over the ranks, in any order; then `value`.
    It takes 8 bytes for each entry.
    """

    def __init__(self, like: Sequence[Tensor]) -> None:
        self._like = [_real(tensor) for tensor in like]
        entries: dict[torch.device, int] = {}
        for tensor in self._like:
            entries[tensor.device] = entries.get(tensor.device, 0) + tensor.numel()
        self._flat = {device: torch.zeros(n, dtype=torch.int64, device=device) for device, n in entries.items()}
        self._sums: list[Tensor] = []
        starts = dict.fromkeys(entries, 0)
        for tensor in self._like:
            start, stop = starts[tensor.device], starts[tensor.device] + tensor.numel()
            self._sums.append(self._flat[tensor.device][start:stop])
            starts[tensor.device] = stop
        self._scratch: dict[torch.device, Tensor] = {}
        self._special: dict[int, Tensor] = {}
        self.open([None] * len(self._sums))

    def open(self, exponents: Sequence[int | None], special: Sequence[int] = ()) -> None:
        """Begin sums with these exponents; None: find the largest entries alone. `special` ones may have infinities."""
        self.exponents = list(exponents)
        self.counts = [0] * len(self.exponents)
        """How many addends each sum has here."""
        self._largest = [0.0] * len(self.exponents)
        self._waiting: list[tuple[list[int], Tensor]] = []  # largest entries that are still on a device
        self._special = {
            i: torch.zeros(self._like[i].shape, dtype=torch.float64, device=self._like[i].device) for i in special
        }

    @torch.no_grad()
    def add(self, addends: Sequence[tuple[int, Tensor]]) -> None:
        """Add these tensors to the sums of these numbers."""
        on_device: list[tuple[int, Tensor]] = []
        for number, addend in addends:
            values = _real(addend.detach())
            if number in self._special:
                ordinary = values.abs() < _LARGEST  # NaN isn't
                self._special[number] += torch.where(ordinary, 0.0, values.double())
                values = torch.where(ordinary, values, 0.0)
            self.counts[number] += 1
            if values.numel() and values.is_cpu:
                low, high = map(float, torch.aminmax(values))
                self._largest[number] = _larger(self._largest[number], max(-low, high) if low <= high else math.nan)
            elif values.numel():
                on_device.append((number, values))
            if (e := self.exponents[number]) is not None:
                self._round(number, values.reshape(-1), offset(e))
        groups: dict[tuple[torch.device, torch.dtype], list[tuple[int, Tensor]]] = {}
        for number, values in on_device:
            groups.setdefault((values.device, values.dtype), []).append((number, values))
        for group in groups.values():
            norms = torch._foreach_norm([values for _, values in group], math.inf)
            self._waiting.append(([number for number, _ in group], torch.stack(norms).double()))

    def _round(self, number: int, values: Tensor, m: float) -> None:
        sums, first = self._sums[number], self.counts[number] == 1
        size = _AT_ONCE.get(values.device.type, 1 << 22)
        scratch = sums.view(torch.float64) if first else self._room(values.device, size)
        for start in range(0, len(values), size):
            part = values[start : start + size]
            rounded = scratch[start : start + size] if first else scratch[: len(part)]
            if part.dtype == torch.float64:
                torch.add(part, m, out=rounded)
            else:
                rounded.copy_(part).add_(m)
            if not first:
                sums[start : start + size].add_(rounded.view(torch.int64))

    def _room(self, device: torch.device, size: int) -> Tensor:
        size = min(size, max((len(s) for s in self._sums if s.device == device), default=0))
        if device not in self._scratch or len(self._scratch[device]) < size:
            self._scratch[device] = torch.empty(size, dtype=torch.float64, device=device)
        return self._scratch[device]

    @torch.no_grad()
    def largest(self) -> list[float]:
        """The largest absolute value in each sum's addends here; infinite where one isn't finite. Waits for devices."""
        for numbers, norms in self._waiting:
            for number, norm in zip(numbers, norms.tolist()):
                self._largest[number] = _larger(self._largest[number], norm)
        self._waiting = []
        return [size if size < _LARGEST else math.inf for size in self._largest]

    @torch.no_grad()
    def close(self) -> None:
        """All addends are in: what is left of each sum are its multiples of the unit."""
        for sums, count, e in zip(self._sums, self.counts, self.exponents, strict=True):
            if not count:
                sums.zero_()
            elif e is not None:
                sums.sub_(_wrapped(count * _bits(offset(e))))

    def parts(self) -> list[Tensor]:
        """What is to be added up over the ranks, in place."""
        return [*self._flat.values(), *(self._special[i] for i in sorted(self._special))]

    @torch.no_grad()
    def value(self, number: int, divisor: float = 1.0, dtype: torch.dtype = torch.float64) -> Tensor:
        """The sum, divided by this in float64."""
        e, tensor, sums = self.exponents[number], self._like[number], self._sums[number]
        assert e is not None
        special = self._special.get(number)
        value = torch.empty(tensor.shape, dtype=dtype, device=tensor.device)
        parts, size = value.view(-1), _AT_ONCE.get(tensor.device.type, 1 << 22)
        scratch = self._room(tensor.device, size)
        for start in range(0, len(sums), size):
            part = scratch[: len(sums) - start]
            part.copy_(sums[start : start + size]).mul_(math.ldexp(1.0, e - 52))
            if special is not None:
                part += special.view(-1)[start : start + size]
                part.masked_fill_(part.isnan(), math.nan)  # a NaN's sign depends on the order
            if divisor != 1:
                part.div_(divisor)
            parts[start : start + size].copy_(part)
        return value


def _larger(one: float, other: float) -> float:
    """The larger one; infinite where one is NaN."""
    return max(one, other) if one == one and other == other else math.inf


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor
