"""All benchmarks, one after the other, each in a process of its own: `make bench`, or `python -m benchmarks`.

Writes what was measured as Markdown, JSON and a picture into a folder; with `--write` into docs/ and README.md as well,
which is for a machine that does nothing else. What uses PyTorch or JAX is measured on a GPU once more where CUDA is
found.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.harness import section_of
from benchmarks.picture import drawn

HERE = Path(__file__).parent
NAMES = (
    "demo", "optimizer", "scaling", "peers", "chunked", "layers", "trainers", "transformers_trainer", "distributed",
    "jax_value_and_grad", "jax_windowed", "jax_chunked", "exact_batch_norm", "sentence_transformers",
    "train_step", "max_tokens", "noise_scale", "keras_optimizers", "info_nce", "keras_micro_batched",
    "keras_chunked", "sharded",
)  # fmt: skip
"""In the order in which they are run: what the README shows first, what takes longest last."""
QUICKLY = ("keras_optimizers", "jax_value_and_grad", "train_step", "trainers", "chunked", "layers", "optimizer", "demo")
"""What `--quick` takes by itself: one of each way in, in two minutes. The longest first, as two run at a time."""
ON_CUDA = (
    "chunked", "exact_batch_norm", "info_nce", "layers", "max_tokens", "noise_scale", "optimizer", "train_step",
)  # fmt: skip
"""Those that `--device cuda` is for."""
TIME_LIMIT = 1200


def main() -> int:
    """Run them; 1 where one has failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"of {', '.join(NAMES)}; default: all, in this order; with --quick {', '.join(QUICKLY)}",
    )
    parser.add_argument("--quick", action="store_true", help="a few rounds, two scripts at a time")
    parser.add_argument("--write", action="store_true", help="into docs/ and README.md as well")
    parser.add_argument("--minutes", type=float, default=math.inf, help="leave out what isn't done by then")
    parser.add_argument("--out", type=Path, default=Path("bench-results"), help="folder for the results")
    options = parser.parse_args()
    unknown = sorted(set(options.names) - set(NAMES))
    if unknown:
        parser.error(f"no such benchmark: {', '.join(unknown)}. There are {', '.join(NAMES)}.")
    if options.quick and options.write:
        parser.error("--quick shows that the scripts run; its numbers are not for the documentation.")
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    names = options.names or (QUICKLY if options.quick else NAMES)
    runs = [(name, "cpu") for name in names]
    if cuda_is_found():
        runs += [(name, "cuda") for name in names if name in ON_CUDA]
    started = time.perf_counter()
    options.end = started + 60 * options.minutes
    with ThreadPoolExecutor(min(2, os.cpu_count() or 1) if options.quick else 1) as pool:
        done = list(pool.map(lambda run: measured(*run, options), runs))
    records: dict[str, Any] = {}
    for record in done:
        records |= record
    results = options.out / "benchmarks"
    page = "# Measured\n\n" + "\n".join(section_of(record) for record in records.values())
    results.with_suffix(".md").write_text(page, encoding="utf-8")
    results.with_suffix(".json").write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    results.with_suffix(".svg").write_text(drawn(records), encoding="utf-8")
    failed = [name for (name, _), record in zip(runs, done, strict=True) if not record]
    print(f"{len(runs)} benchmarks in {time.perf_counter() - started:.0f} s: {results}.md, .json and .svg")
    if failed:
        print(f"failed, or not done in time: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def cuda_is_found() -> bool:
    """Asked in a process of its own, so that this one holds no device."""
    code = "import torch; print(torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "True"


def measured(name: str, device: str, options: argparse.Namespace) -> dict[str, Any]:
    """The record that a script writes, by its name; none where it fails, which is printed."""
    kept = options.out / f"{name}{'' if device == 'cpu' else f'_{device}'}.json"
    kept.unlink(missing_ok=True)
    command = [sys.executable, "-m", f"benchmarks.{name}", "--json", str(kept)]
    command += [f"--{flag}" for flag in ("quick", "write") if getattr(options, flag)]
    command += [] if device == "cpu" else ["--device", device]
    threads = {"OMP_NUM_THREADS": "1"} if options.quick else {}  # two scripts at a time would be in each other's way
    started = time.perf_counter()
    limit = min(options.end - started, TIME_LIMIT)
    settings: dict[str, Any] = {"cwd": HERE.parent, "env": {**os.environ, **threads}}
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=max(limit, 0.0), **settings)
        problem = "" if run.returncode == 0 else run.stderr[-3000:]
    except subprocess.TimeoutExpired:
        problem = f"not done in the {max(limit, 0.0):.0f} s that were left"
    print(f"{name}, {device}: {time.perf_counter() - started:.0f} s{', failed' if problem else ''}", flush=True)
    if problem:
        print(problem, file=sys.stderr)
        return {}
    found: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8"))
    return found


if __name__ == "__main__":
    sys.exit(main())
