"""`micro_batch_size="auto"`: the fastest size that fits, found by exact updates."""

import logging

import pytest
import torch
from torch import nn

from gradaccum.core.sizes import container_limits, free_host_memory, parse_bytes
from gradaccum.on_torch.memory import MemoryMeter, is_out_of_memory
from tests.torch.train_step.problems import batches, network
from tests.torch.train_step.steps import step_of


class Clock:
    """A clock that a model moves, and the memory that it takes."""

    def __init__(self, monkeypatch, fastest=8):
        self.now, self.highest, self.sizes, self.fastest = 0.0, 0, [], fastest
        monkeypatch.setattr("gradaccum.on_torch.oom_retry.time.perf_counter", lambda: self.now)
        monkeypatch.setattr(MemoryMeter, "mark", lambda gauge: self.highest)
        monkeypatch.setattr(MemoryMeter, "live", lambda gauge: 100)

    def __call__(self, module, args):
        rows = len(args[0])
        self.sizes.append(rows)
        self.now += self.fastest + rows + 2.0 * max(rows - self.fastest, 0)
        self.highest = max(self.highest, 100 + 10 * args[0].numel())


def timed(clock, model=None, **keywords):
    model = network() if model is None else model
    model.register_forward_pre_hook(clock)
    return step_of(model, **keywords)


def test_it_climbs_and_settles_within_two_updates_and_tells_so_and_what_changes_later(monkeypatch, caplog):
    clock = Clock(monkeypatch)
    step = timed(clock)
    caplog.set_level(logging.INFO, logger="gradaccum")
    for batch in batches(64, count=4):
        step(*batch)
    assert clock.sizes[:5] == [1, 2, 4, 8, 16]
    assert step.micro_batch_size == 8
    (told,) = [record.message for record in caplog.records if "auto" in record.message]
    assert "8 of 64 rows" in told
    assert clock.sizes[-16:] == [8] * 16

    def shrinks(module, args):
        if len(args[0]) > 4:
            raise torch.OutOfMemoryError("simulated")

    step.model.register_forward_pre_hook(shrinks)
    caplog.clear()
    for batch in batches(64, count=2):
        step(*batch)
    assert step.micro_batch_size == 4
    failed, settled = [record.message for record in caplog.records]
    assert (
        "Out of memory with a micro-batch of 8 rows: starting the batch again in micro-batches of at most 4" in failed
    )
    assert "micro_batch_size='auto': 4 of 64 rows" in settled


def test_the_search_stops_before_the_limit(monkeypatch):
    clock = Clock(monkeypatch, fastest=64)
    step = timed(clock, memory_limit=1000)  # 100 + 50 bytes per row: 16 rows take 900
    for batch in batches(64, count=3):
        step(*batch)
    assert clock.highest <= 900
    assert 8 <= step.micro_batch_size <= 16


def test_another_shape_starts_another_search_and_small_changes_do_not(monkeypatch):
    class Rows(nn.Linear):
        def forward(self, x):
            return super().forward(x.mean(1, keepdim=True))

    clock = Clock(monkeypatch)
    step = timed(clock, Rows(1, 3, dtype=torch.float64))

    def sizes(columns):
        clock.sizes.clear()
        step(torch.randn(64, columns, dtype=torch.float64), torch.zeros(64, dtype=torch.long))
        return clock.sizes

    for _ in range(3):
        sizes(10)
    assert step.micro_batch_size == 8
    assert len(set(sizes(12))) <= 2  # a little longer: proportionally fewer rows, no search
    assert max(clock.sizes) <= 8
    assert len(set(sizes(80))) > 2


@pytest.mark.parametrize(
    ("given", "expected"),
    [(None, None), (5, 5), ("4GiB", 4 << 30), ("4 gb", 4 * 10**9), ("512MiB", 512 << 20), ("1.5k", 1500), ("7B", 7)],
)
def test_memory_limits_are_bytes_or_strings(given, expected):
    assert parse_bytes(given) == expected


def test_without_a_limit_given_it_is_what_the_machine_has_free(monkeypatch):
    monkeypatch.setattr(MemoryMeter, "live", lambda gauge: 100)
    for free, limit in ((900, 1000), (None, None)):
        monkeypatch.setattr("gradaccum.on_torch.memory.free_host_memory", lambda free=free: free)
        assert MemoryMeter(torch.device("cpu")).limit() == limit
    assert MemoryMeter(torch.device("cpu"), 50).limit() == 50


def test_the_containers_limit_is_read_from_cgroups_of_either_version(tmp_path):
    def found(version, files):
        for path, text in files.items():
            (tmp_path / version / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / version / path).write_text(text)
        return container_limits(tmp_path / version), free_host_memory(tmp_path / version)

    parent, memory = "sys/fs/cgroup/work", "proc/meminfo"
    assert found("2", {"proc/self/cgroup": "0::/work/job\n", memory: "MemAvailable:   64 kB\n"}) == ([], 65536)
    unlimited = {f"{parent}/job/memory.max": "max\n", f"{parent}/job/memory.current": "5000\n"}
    assert found("2", {**unlimited, memory: "MemTotal: 999 kB\nMemAvailable:   64 kB\n"}) == ([], 65536)
    limited = {f"{parent}/memory.max": "20000\n", f"{parent}/memory.current": "9000\n"}  # a parent's limit holds, too
    cache = {f"{parent}/memory.stat": "anon 100\ninactive_file 3000\n"}
    assert found("2", {**limited, **cache}) == ([(20000, 6000)], 14000)
    top = "sys/fs/cgroup/memory/memory"  # a container sees its own group at the top
    unlimited = {f"{top}.limit_in_bytes": f"{2**63 - 4096}\n", f"{top}.usage_in_bytes": "5000\n"}
    assert found("1", {"proc/self/cgroup": "5:cpu:/docker/x\n4:memory:/docker/x\n", **unlimited}) == ([], None)
    limited = {f"{top}.limit_in_bytes": "8000\n", f"{top}.stat": "total_inactive_file 1000\n"}
    assert found("1", limited) == ([(8000, 4000)], 4000)


def test_out_of_memory_is_told_from_other_errors():
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("shapes differ"))
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 60)
    assert is_out_of_memory(raised.value)
