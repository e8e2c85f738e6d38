"""The Recorder: one complete line per update, and a report at any time."""

import json

import pytest
import torch
from torch import nn

from gradaccum.report.run import read
from gradaccum.torch import BlockStep, Recorder, TrainStep
from gradaccum.torch.optim import SGD
from tests.torch.distributed.processes import fresh_process


def train_step(**options):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return TrainStep(model, optimizer, loss_fn=nn.MSELoss(), micro_batch_size=4, **options)


def batch(count=8):
    return torch.randn(count, 3), torch.randn(count, 1)


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_line_per_update_with_what_is_known(tmp_path):
    path, step, losses = tmp_path / "new" / "run.jsonl", train_step(clip_grad_norm=1.0, noise_scale=True), []
    with Recorder(path, step) as recorder:
        for _ in range(25):
            losses.append(step(*batch()))
            assert recorder.record(losses[-1], accuracy=0.5)
            assert len(lines(path)) == len(losses) + 1  # on disk at once
    start, *updates = lines(path)
    assert start["start"]["source"] == "TrainStep"
    assert [line["update"] for line in updates] == list(range(1, 26))
    assert [line["loss"] for line in updates] == [loss.item() for loss in losses]
    assert all(line["micro_batch_size"] == 4 and line["accuracy"] == 0.5 for line in updates)
    assert all(line["grad_norm"] > 0 and line["seconds"] > 0 and line["peak_memory"] > 2**20 for line in updates)
    measured = [line["update"] for line in updates if "noise_scale" in line]
    assert measured == [2, 22]  # as soon as there are two windows, then every now and then
    report = recorder.report()
    assert {"Loss", "Gradient norm, before clipping"} <= {figure.title for figure in report.figures}
    assert "Micro-batch size 4 rows" in str(report)  # the same in each update
    assert "Noise scale" in str(report)


def test_with_a_wrapped_optimizer_it_may_be_called_after_every_micro_batch(tmp_path):
    model, written = nn.Linear(3, 1), []
    optimizer = SGD(model.parameters(), lr=0.1, steps=2)
    with Recorder(tmp_path / "run.jsonl", optimizer) as recorder:
        for x, y in optimizer.batches([batch(4) for _ in range(5)]):
            optimizer.zero_grad()
            optimizer.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            written.append(recorder.record())
    assert written == [False, True, False, True, True]
    updates = lines(tmp_path / "run.jsonl")[1:]
    assert [line["update"] for line in updates] == [1, 2, 3]
    assert updates[-1]["loss"] == optimizer.loss.item()
    assert "noise_scale" not in updates[-1]


def test_with_a_block_step_it_records_all_but_the_noise_scale(tmp_path):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = BlockStep(model, optimizer, loss_fn=nn.MSELoss(), blocks=model, micro_batch_size=4, clip_grad_norm=1.0)
    with Recorder(tmp_path / "run.jsonl", step) as recorder:
        assert recorder.record(step(*batch()))
    start, line = lines(tmp_path / "run.jsonl")
    assert (start["start"]["source"], line["micro_batch_size"], line["update"]) == ("BlockStep", 4, 1)
    assert line["grad_norm"] > 0
    assert "noise_scale" not in line


def test_a_file_that_exists_is_continued_after_a_line_that_was_cut_off(tmp_path):
    path, step = tmp_path / "run.jsonl", train_step()
    for cut in (True, False):
        with Recorder(path, step) as recorder:
            for _ in range(3):
                recorder.record(step(*batch()))
        if cut:
            path.write_bytes(path.read_bytes()[:-10])
    run = read(path)
    assert [line["update"] for line in run.updates] == [1, 2, 4, 5, 6]
    assert run.damaged == 1
    assert "started 2 times" in str(recorder.report())


def test_what_cannot_be_recorded_is_told(tmp_path):
    step = train_step()
    with Recorder(tmp_path / "run.jsonl", step) as recorder:
        loss = step(*batch())
        with pytest.raises(ValueError, match="`note` must be a number. Received: note='text'"):
            recorder.record(loss, note="text")
    with pytest.raises(ValueError, match="is closed"):
        recorder.record(loss)
    with pytest.raises(TypeError, match="must be a TrainStep, a BlockStep or a"):
        Recorder(tmp_path / "run.jsonl", nn.Linear(1, 1))


def test_without_tensorboard_a_line_says_so(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    step = train_step()
    with Recorder(tmp_path / "run.jsonl", step, tensorboard=tmp_path / "board") as recorder:
        assert recorder.record(step(*batch()))
    assert "TensorBoard is not installed" in caplog.text
    assert not (tmp_path / "board").exists()


def on_a_board(folder, found):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    step = train_step()
    with Recorder(folder / "run.jsonl", step, tensorboard=folder / "board") as recorder:
        recorder.record(step(*batch()))
    events = EventAccumulator(str(folder / "board"))
    events.Reload()
    found.write_text(" ".join(sorted(events.Tags()["scalars"])))


@pytest.mark.slow
def test_tensorboard_gets_every_number(tmp_path):
    pytest.importorskip("tensorboard")
    fresh_process(on_a_board, tmp_path, found := tmp_path / "found").join(120)
    assert found.read_text().split() == ["loss", "micro_batch_size", "peak_memory", "seconds"]
