"""What every benchmark shares: contenders timed in turn, in one run, and tables that write themselves into the docs.

Machines are shared and noisy, so nothing here prints a bare time as a result: each contender runs once per round, in
an order that changes, and what counts is the median over rounds of its ratio to the rival in the same round.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # from malloc.h
PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"


def arguments(description: str | None) -> argparse.Namespace:
    """The options of every benchmark: `--quick` for a short try, `--write` to for docs/benchmarks.md."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="few rounds: does it run?")
    parser.add_argument("--write", action="store_true", help="write the tables to docs/benchmarks.md")
    return parser.parse_args()


def seconds(function: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of one call, by the wall's clock or another."""
    start = clock()
    function()
    return clock() - start


def ratios(
    contenders: Mapping[str, Callable[[], object]],
    rival: str,
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Median over rounds of each contender's time over the rival's, all of them timed in every round.

    Args:
        contenders: Functions that do the same work; each is called once before the first round.
        rival: The one that the others are divided by.
        rounds: How often each is timed.
        clock: What times them: `time.process_time` counts what all threads of this process have computed, for what
            waits for nothing.
    """
    for function in contenders.values():
        function()
    shuffle = random.Random(0)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name in shuffle.sample(list(contenders), len(contenders)):
            times[name].append(seconds(contenders[name], clock))
    return {
        name: statistics.median(mine / theirs for mine, theirs in zip(taken, times[rival], strict=True))
        for name, taken in times.items()
    }


def keep_freed_memory() -> None:
    """Have the C library hold on to freed memory, where it is glibc.

    Whether it hands a large block back to the system, and has its pages made anew the next time, hangs on what happens
    to lie above that block: a tenth of the time of two loops that do the same, for a whole process. For contenders that
    allocate the same; where one needs larger blocks than the other, what they cost is part of the comparison.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    mallopt(_M_MMAP_THRESHOLD, 32 * 2**20)  # the most it takes
    mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A markdown table; floats with two decimals."""

    def cell(value: object) -> str:
        return f"{value:.2f}" if isinstance(value, float) else str(value)

    lines = [head, ["---"] * len(head), *([cell(value) for value in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def machine() -> str:
    """This machine, in a line."""
    cpu = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        models = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        cpu = models[0] if models else cpu
    return f"{cpu}, {os.cpu_count()} cores, Python {platform.python_version()}"


def in_fresh_process(code: str, *args: str) -> str:
    """What this Python code prints, run by itself: for peak memory and import times."""
    run = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, check=True)
    return run.stdout.strip()


def publish(name: str, title: str, body: str, versions: Sequence[str], write: bool) -> None:
    """Print the result and, with `--write`, keep it as the section of docs/benchmarks.md that has this name."""
    from importlib.metadata import version

    packages = ", ".join(f"{package} {version(package)}" for package in versions)
    section = (
        f"## {title}\n\n{body}\n\nMeasured on {machine()}; {packages}. Made by `python -m benchmarks.{name} --write`.\n"
    )
    print(section)
    if write:
        PAGE.write_text(with_section(PAGE.read_text(), name, section))


def with_section(page: str, name: str, section: str) -> str:
    """The page with this section in place of the one between its markers, or at its end.

    Example:
        >>> print(with_section("# Measured\\n", "speed", "fast\\n"))
        # Measured
        <BLANKLINE>
        <!-- measured:speed -->
        fast
        <!-- /measured:speed -->
        <BLANKLINE>
    """
    begin, end = f"<!-- measured:{name} -->\n", f"<!-- /measured:{name} -->\n"
    if begin not in page:
        return f"{page}\n{begin}{section}{end}"
    before, rest = page.split(begin)
    return f"{before}{begin}{section}{end}{rest.split(end)[1]}"
