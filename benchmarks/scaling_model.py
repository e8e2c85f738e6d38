"""How long an update takes on several ranks: windows of data-parallel training as a model of times and messages.

An update on N ranks, each with a window of K micro-batches whose passes take t seconds, takes

    T(N, K) = K t + wait(N, K) + exposed(N) + u

    exposed(N)  what of the reduction no backward pass hides: max(r - h b, r / buckets), where r is the reduction's
                time, b the backward pass of a micro-batch (two thirds of t) and h the part of it that can hide messages
    r           of G bytes, by the faster of two ways: a ring takes 2 (N-1) (L + G / (N B)), a tree
                2 (ceil(log2 N) L + G / B), over links of B bytes a second and a latency of L
    wait(N, K)  for the slowest rank: t s sqrt(K) e(N), where s is the relative spread of a micro-batch's time, and e(N)
                the mean largest of N normal numbers
    u           the inner optimizer's step

Reducing after every micro-batch costs K (t + t s e(N) + exposed(N)) + u: K times the messages, and waits that don't
average out. `simulated_seconds` draws every micro-batch's time in place of the formula for `wait`.

What ranks tell each other beside the gradients is one message of 24 numbers a window (`WindowMessage`).
"""

from __future__ import annotations

import dataclasses
import math
import random
import re

from gradaccum.core.sizes import format_bytes

__all__ = ["Link", "Scaling", "WindowMessage"]

LENGTH = 24
"""Numbers of 8 bytes in a message: gradaccum.torch.distributed.channel's."""

BACKWARD = 2 / 3
"""The backward pass, as a part of a micro-batch's passes."""
BUCKET = 25 * 2**20
"""Bytes that DDP reduces at a time: the last bucket has no backward pass left to hide behind."""

_LINK = re.compile(r"(\d+\.?\d*)\s*([kMGT]?)(i?)(bit|b|B)(?:/s|ps)\s*(?:,\s*(\d+\.?\d*)\s*(us|ms|s))?")


@dataclasses.dataclass(frozen=True)
class Link:
    """What connects a rank with the next.

    Args:
        bandwidth: Bytes a second, in each direction.
        latency: Seconds of a message without content.
    """

    bandwidth: float
    latency: float = 2e-5

    @classmethod
    def parse(cls, text: str) -> Link:
        """From "25Gbit/s", "300GB/s" or, with a latency, "100Gbit/s, 5us".

        Raises:
            ValueError: It is none of these.

        Example:
            >>> Link.parse("8Gbit/s, 2s")
            Link(bandwidth=1000000000.0, latency=2.0)
        """
        found = _LINK.fullmatch(text.strip())
        if found is None or not float(found[1]):
            raise ValueError(
                "A link is a bandwidth such as '25Gbit/s' or '300GB/s', and a latency where it isn't 20us: "
                f"'25Gbit/s, 5us'. Received: {text!r}."
            )
        number, prefix, binary, unit, latency, of_latency = found.groups()
        bits = 8 if unit in ("bit", "b") else 1
        bandwidth = float(number) * (1024 if binary else 1000) ** " kMGT".index(prefix or " ") / bits
        scale = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
        return cls(bandwidth, float(latency) * scale[of_latency] if latency else cls.latency)

    def reduction_seconds(self, ranks: int, size: float) -> float:
        """Seconds in which so many ranks reduce `size` bytes, and all have the result.

        Example:
            >>> round(Link(1e9, 0).reduction_seconds(4, 2e9), 9)  # each sends 3/4 of the bytes twice
            3.0
        """
        if ranks == 1:
            return 0.0
        ring = 2 * (ranks - 1) * (self.latency + size / (ranks * self.bandwidth))
        tree = 2 * (math.ceil(math.log2(ranks)) * self.latency + size / self.bandwidth)
        return min(ring, tree)


@dataclasses.dataclass(frozen=True)
class WindowMessage:
    """What one of so many ranks sends to learn what a window weighs, in an all-gather by a ring, as gloo's.

    It goes over the connections of the process group.

    Example:
        >>> for ranks in (2, 64, 1024):
        ...     one = WindowMessage(ranks)
        ...     print(ranks, one.sends, one.sent_bytes, f"{1e3 * one.seconds(Link.parse('25Gbit/s')):.2f} ms")
        2 1 192 0.02 ms
        64 63 12096 1.26 ms
        1024 1023 196416 20.52 ms
    """

    ranks: int

    @property
    def sends(self) -> int:
        return self.ranks - 1

    @property
    def sent_bytes(self) -> int:
        return self.sends * LENGTH * 8

    def seconds(self, link: Link) -> float:
        """Until all ranks have all of it; a backward pass that is longer hides it."""
        return self.sends * (link.latency + LENGTH * 8 / link.bandwidth)


@dataclasses.dataclass(frozen=True)
class Scaling:
    """An update's time on any number of ranks, with windows of any length.

    Args:
        seconds: Of a micro-batch's forward and backward pass on one device.
        gradient_bytes: What a reduction carries.
        link: Between the ranks.
        update_seconds: Of the inner optimizer's step.
        overlap: The part of a backward pass that can hide messages: 1 on devices that send by themselves, 0 where the
            same cores compute and send.
        spread: Standard deviation of a micro-batch's seconds, as a part of them.

    Example:
        >>> job = Scaling(0.5, 2 * 10**9, Link.parse("25Gbit/s"))
        >>> [round(job.efficiency(64, steps), 2) for steps in (1, 4, 16)]
        [0.35, 0.68, 0.9]
        >>> job.steps_for(64, 0.9)
        17
    """

    seconds: float
    gradient_bytes: float
    link: Link
    update_seconds: float = 0.0
    overlap: float = 1.0
    spread: float = 0.0

    def exposed_seconds(self, ranks: int) -> float:
        """What of a reduction no backward pass hides."""
        reduction = self.link.reduction_seconds(ranks, self.gradient_bytes)
        buckets = max(self.gradient_bytes / BUCKET, 1)
        return max(reduction - self.overlap * BACKWARD * self.seconds, reduction / buckets)

    def update_time(self, ranks: int, steps: int, *, every_micro_batch: bool = False) -> float:
        """Seconds of an update; `every_micro_batch` reduces after each one, as DDP does without `no_sync`."""
        wait = self.seconds * self.spread * _largest_of(ranks)
        exposed = self.exposed_seconds(ranks)
        if every_micro_batch:
            return steps * (self.seconds + wait + exposed) + self.update_seconds
        return steps * self.seconds + math.sqrt(steps) * wait + exposed + self.update_seconds

    def efficiency(self, ranks: int, steps: int, *, every_micro_batch: bool = False) -> float:
        """The part of an update's time in which devices compute micro-batches."""
        return steps * self.seconds / self.update_time(ranks, steps, every_micro_batch=every_micro_batch)

    def steps_for(self, ranks: int, efficiency: float) -> int:
        """The shortest window that is at least so efficient (less than 1)."""
        # K t >= e T(N, K) is a quadratic inequality in sqrt(K)
        free = (1 - efficiency) * self.seconds
        wait = efficiency * self.seconds * self.spread * _largest_of(ranks)
        fixed = efficiency * (self.exposed_seconds(ranks) + self.update_seconds)
        root = (wait + math.sqrt(wait**2 + 4 * free * fixed)) / (2 * free)
        return max(math.ceil(root**2 - 1e-9), 1)

    def sent_bytes(self, ranks: int, steps: int, *, every_micro_batch: bool = False) -> float:
        """Bytes that a rank sends for an update, by a ring: 2 (N-1) / N of the gradients for each reduction."""
        return (steps if every_micro_batch else 1) * 2 * (ranks - 1) / ranks * self.gradient_bytes

    def advice(self, ranks: int, rows: int, efficiency: float = 0.9) -> str:
        """In words: what an update sends, how long that takes, and which window makes up for it.

        Args:
            ranks: How many.
            rows: Of a micro-batch.
            efficiency: How much of the time is to be spent on passes.

        Example:
            >>> print(Scaling(0.5, 2 * 10**9, Link.parse("25Gbit/s")).advice(64, 8))
            an update sends:  3.7 GiB from each of 64 ranks, 1.9 GiB of gradients: 1.26 s, 0.929 s of it exposed
            window:           17 steps, 8,704 rows over all ranks, for 90 % of the time in passes; 1 step: 35 %
        """
        reduction = self.link.reduction_seconds(ranks, self.gradient_bytes)
        sent, gradients = (format_bytes(round(size)) for size in (self.sent_bytes(ranks, 1), self.gradient_bytes))
        first = f"an update sends:  {sent} from each of {ranks:,} ranks, {gradients} of gradients: {reduction:.3g} s"
        goal = f"for {100 * efficiency:.0f} % of the time in passes"
        if not self.seconds:
            window = efficiency / (1 - efficiency) * reduction
            return f"{first}\nwindow:           {window:.3g} s of passes on each rank, {goal}"
        steps = self.steps_for(ranks, efficiency)
        window_ = f"{steps:,} step{'s' if steps > 1 else ''}, {steps * ranks * rows:,} rows over all ranks, {goal}"
        alone = f"; 1 step: {100 * self.efficiency(ranks, 1):.0f} %" if steps > 1 else ""
        return f"{first}, {self.exposed_seconds(ranks):.3g} s of it exposed\nwindow:           {window_}{alone}"

    def simulated_seconds(
        self, ranks: int, steps: int, *, every_micro_batch: bool = False, updates: int = 20, seed: int = 0
    ) -> float:
        """Mean seconds of an update, with the time of each micro-batch on each rank drawn at random."""
        draw, total = random.Random(seed).gauss, 0.0
        exposed = self.exposed_seconds(ranks)
        for _ in range(updates):
            if every_micro_batch:
                for _ in range(steps):
                    total += max(self.seconds * draw(1, self.spread) for _ in range(ranks)) + exposed
            else:
                slowest = max(sum(draw(1, self.spread) for _ in range(steps)) for _ in range(ranks))
                total += self.seconds * slowest + exposed
            total += self.update_seconds
        return total / updates


def _largest_of(ranks: int) -> float:
    """The mean largest of so many standard normal numbers, by Blom's formula."""
    if ranks == 1:
        return 0.0
    from statistics import NormalDist

    return NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))
