"""What every benchmark shares: contenders timed in turn, in one run, and tables that write themselves into the docs.

Machines are shared and noisy, so nothing here prints a bare time as a result: each contender runs once per round, in
an order that changes, and what counts is the median over rounds of its ratio to the rival in the same round, with the
middle half of the rounds as its spread. `python -m benchmarks` runs all scripts.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import pickle
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # from malloc.h
ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"
RECORDS = PAGE.with_suffix(".json")
"""What the sections of the page are made of: `{name: record}`."""

WARM_UP = 20
"""Windows before the first round."""

_MEASURED: list[dict[str, Any]] = []
"""What `ratios` has found in this process."""
_STARTED = time.perf_counter()
_KEPT: list[Path] = []
"""The folder of `--resume`, if any."""


class Ratio(float):
    """A median over rounds, with the quartiles as its spread.

    Example:
        >>> print(Ratio(1.02, 0.98, 1.08), Ratio(1), f"{Ratio(1.02, 0.98, 1.08):.1f}")
        1.02 ± 0.05 1.00 1.0
    """

    def __new__(cls, median: float, low: float | None = None, high: float | None = None) -> Ratio:
        """Without quartiles: of too few rounds, or of the rival to itself."""
        self = super().__new__(cls, median)
        self.low, self.high = median if low is None else low, median if high is None else high
        return self

    low: float
    high: float

    def __str__(self) -> str:
        spread = (self.high - self.low) / 2
        return f"{float(self):.2f}" + (f" ± {spread:.2f}" if spread else "")

    def triple(self) -> list[float]:
        """For JSON: `Ratio(*triple)` reads it back."""
        return [float(self), float(self.low), float(self.high)]


def arguments(description: str | None, *, cuda: bool = False) -> argparse.Namespace:
    """The options of every benchmark; `cuda` says that its tensors can be on any device, and has them made there.

    Returns:
        `quick`, `write`, `json` (a file for the record, or None) and `device`.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="few rounds: does it run?")
    parser.add_argument("--write", action="store_true", help="write the tables to docs/benchmarks.md")
    parser.add_argument("--json", type=Path, help="a file for what was measured")
    parser.add_argument("--device", choices=["cpu", "cuda"] if cuda else ["cpu"], default="cpu")
    parser.add_argument("--resume", type=Path, help="a folder of what processes print: an ended run goes on")
    options = parser.parse_args()
    if options.resume:
        options.resume.mkdir(parents=True, exist_ok=True)
        _KEPT.append(options.resume)
    if options.device != "cpu":
        import torch

        torch.set_default_device(options.device)
    return options


def seconds(function: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of one call, by the wall's clock or another, until the device has finished.

    A function that times a part of its work by itself, such as a run without its start, returns the seconds as a float.
    """
    start = clock()
    found = function()
    if isinstance(found, float):
        return found
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return clock() - start


Contenders = Mapping[str, Callable[[], object]]


def ratios(
    contenders: Contenders | Callable[[], Contenders],
    rival: str,
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
    about: str = "",
    warm_up: int = WARM_UP,
) -> dict[str, Ratio]:
    """Median over rounds of each contender's time over the rival's, all of them timed in every round.

    Windows 1, 2, 4, 8, ... are watched and proven, so `WARM_UP` of them come before the first round, and `looks` times
    those that look apart.

    Args:
        contenders: Functions that do the same work. Or what builds them, anew for every third round: of small networks,
            where their memory happens to lie decides some per cent.
        rival: The one that the others are divided by.
        rounds: How often each is timed.
        clock: What times them: `time.process_time` counts what all threads of this process have computed, for what
            waits for nothing.
        about: What it is that they do, for the record.
        warm_up: How often each is called before it is timed. Fewer where a call makes several windows or none.
    """
    shuffle, times = random.Random(0), defaultdict[str, list[float]](list)
    built: Contenders = {}
    for number in range(rounds):
        if number == 0 or (number % 3 == 0 and callable(contenders)):
            built = contenders() if callable(contenders) else contenders
            for function in built.values():
                for _ in range(warm_up):
                    function()
        for name in shuffle.sample(list(built), len(built)):
            times[name].append(seconds(built[name], clock))
    found = {
        name: ratio_of([mine / theirs for mine, theirs in zip(times[name], times[rival], strict=True)])
        for name in built
    }
    return recorded(found, rival, rounds, about)


def looks(window: Callable[[], object], last: int = 64, clock: Callable[[], float] = time.perf_counter) -> list[float]:
    """The last three windows that are watched or proven, over the median of the ordinary ones from their first on.

    Args:
        window: Makes a window of a training that begins here.
        last: The last of them, a power of two: 64 for windows 16, 32 and 64.
        clock: What times them.
    """
    times = dict(enumerate((seconds(window, clock) for _ in range(last)), 1))
    ordinary = statistics.median(times[number] for number in range(last // 4, last) if number & (number - 1))
    return [times[number] / ordinary for number in (last // 4, last // 2, last)]


def first_call(make: Callable[[], Callable[[], object]], rounds: int) -> Ratio:
    """What a new function's first call takes, which is proven, over the median of the next four."""
    found = []
    for _ in range(rounds):
        function = make()
        first, *others = [seconds(function) for _ in range(5)]
        found.append(first / statistics.median(others))
    return ratio_of(found)


def ratio_of(values: Sequence[float]) -> Ratio:
    """Their median, with the quartiles where there are five or more.

    Example:
        >>> print(ratio_of([1.0, 1.2, 1.1, 1.4, 1.3]), ratio_of([1.0, 1.2, 1.1]))
        1.20 ± 0.10 1.10
    """
    if len(values) < 5:
        return Ratio(statistics.median(values))
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Ratio(median, low, high)


def recorded(found: dict[str, Ratio], rival: str, rounds: int, about: str = "") -> dict[str, Ratio]:
    """The same, kept for the record that `publish` writes."""
    triples = {name: ratio.triple() for name, ratio in found.items()}
    _MEASURED.append({"about": about, "rival": rival, "rounds": rounds, "ratios": triples})
    return found


def send(found: Mapping[str, Ratio]) -> None:
    """In a process of its own: print them in a line that `received` reads."""
    print(json.dumps({name: ratio.triple() for name, ratio in found.items()}))


def received(line: str, rival: str, rounds: int, about: str = "") -> dict[str, Ratio]:
    """What another process has sent, recorded here."""
    found = {name: Ratio(*triple) for name, triple in json.loads(line).items()}
    return recorded(found, rival, rounds, about)


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
    """A markdown table; floats with two decimals, ratios with their spread."""

    def cell(value: object) -> str:
        return f"{value:.2f}" if isinstance(value, float) and not isinstance(value, Ratio) else str(value)

    lines = [head, *([cell(value) for value in row] for row in rows)]
    first, *others = ("| " + " | ".join(line) + " |" for line in lines)
    return "\n".join([first, "|" + "---|" * len(head), *others])


def machine() -> str:
    """This machine, in a line."""
    cpu = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        models = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        cpu = models[0].replace("(R)", "").removesuffix(" Processor") if models else cpu
    return f"{cpu}, {os.cpu_count()} cores"


def in_short(backends: Mapping[str, str]) -> dict[str, str]:
    """Of Keras' backends, the one that is imported soonest: for `--quick`."""
    return {name: title for name, title in backends.items() if name == "jax"}


def in_fresh_process(code: str, *args: str) -> str:
    """What this Python code prints, run by itself: for peak memory and import times."""
    kept = [folder / hashlib.sha256(repr((code, args)).encode()).hexdigest() for folder in _KEPT]
    if kept and kept[0].exists():
        return kept[0].read_text(encoding="utf-8")
    run = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, check=True)
    for file in kept:
        file.write_text(run.stdout.strip(), encoding="utf-8")
    return run.stdout.strip()


def on_ranks(measure: Callable[..., Any], ranks: int, *args: Any) -> Any:
    """What `measure(rank, *args)` returns on the first of these ranks: processes of one thread in one gloo group.

    Raises:
        torch.multiprocessing.ProcessRaisedException: With what a rank raised; the others are stopped.
    """
    from torch import multiprocessing

    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_as_rank, (measure, ranks, Path(folder), args), nprocs=ranks)
        return pickle.loads(Path(folder, "found").read_bytes())


def _as_rank(rank: int, measure: Callable[..., Any], ranks: int, folder: Path, args: Sequence[Any]) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    keep_freed_memory()
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=ranks)
    found = measure(rank, *args)
    if rank == 0:
        (folder / "found").write_bytes(pickle.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def device_name(device: str) -> str:
    """The machine in a line, with its GPU where that was measured."""
    if device == "cpu":
        return machine()
    import torch

    return f"{torch.cuda.get_device_name()}, {machine()}"


def publish(
    name: str,
    title: str,
    body: str,
    versions: Sequence[str],
    options: argparse.Namespace,
    *,
    ours: Sequence[str] = (),
    blocks: Mapping[str, str] | None = None,
) -> None:
    """Print the result; with `--write`, keep it as the section of docs/benchmarks.md that has this name.

    Args:
        name: The script.
        title: The section's.
        body: Its text.
        versions: The packages that it compares.
        options: What `arguments` returned.
        ours: Which contenders are this library's, for the picture.
        blocks: More that `--write` keeps: `{"README.md#speed": text}` goes to the block `measured:speed` there.
    """
    place = name if options.device == "cpu" else f"{name}_{options.device}"
    made = f"{device_name(options.device)}; {packages(versions)}"
    device = "" if options.device == "cpu" else f" --device {options.device}"
    record = {
        "title": title if options.device == "cpu" else f"{title}, on a GPU",
        "body": body,
        "made": f"`benchmarks.{name}{device}`: {made}",
        "quick": options.quick,
        "seconds": round(time.perf_counter() - _STARTED, 1),
        "ours": list(ours),
        "measured": list(_MEASURED),
        "blocks": {target: text.rstrip("\n") + "\n" for target, text in (blocks or {}).items()},
    }
    print(section_of(record))
    write_json(options, place, record)
    if options.write:
        keep(PAGE, place, section_of(record))
        for target, text in record["blocks"].items() if options.device == "cpu" else ():
            page, _, block = target.partition("#")
            keep(ROOT / page, block, text)
        from benchmarks.picture import write_picture  # which draws what is kept here

        write_picture()


def packages(names: Sequence[str]) -> str:
    """These packages with their versions."""
    from importlib.metadata import version

    return ", ".join(f"{name} {version(name)}" for name in names)


def write_json(options: argparse.Namespace, name: str, record: Mapping[str, Any]) -> None:
    """The record into the file that `--json` names and, with `--write`, among those of docs/benchmarks.json."""
    if options.json:
        options.json.write_text(json.dumps({name: record}, indent=1) + "\n", encoding="utf-8")
    if options.write:
        records = json.loads(RECORDS.read_text(encoding="utf-8")) if RECORDS.exists() else {}
        RECORDS.write_text(json.dumps(records | {name: record}, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def section_of(record: Mapping[str, Any]) -> str:
    """The section of the page that shows this record."""
    return f"## {record['title']}\n\n{record['body']}\n\n{record['made']}\n"


def keep(page: Path, name: str, text: str) -> None:
    """Write this text between the page's markers of that name."""
    page.write_text(with_section(page.read_text(encoding="utf-8"), name, text), encoding="utf-8")


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
