"""Activations between blocks that wait elsewhere."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gradaccum.torch import TrainStep
from gradaccum.torch.measure.fake_memory import LiveBytes
from tests.torch.layers.test_blocks import OPTIMIZERS, assert_same_updates, batches, loss_of, network


def test_offloaded_activations_make_the_same_update_and_leave_no_files(tmp_path: Path) -> None:
    seen = []
    model = network()
    model.layers[2].register_forward_hook(lambda *_: seen.append(len(os.listdir(tmp_path))))
    assert_same_updates(model, batches(), loss_of, OPTIMIZERS["adam"], 3, offload=str(tmp_path), update="in_backward")
    assert max(seen) >= 6  # of three blocks and three micro-batches
    assert os.listdir(tmp_path) == []
    assert_same_updates(network(), batches(), loss_of, size=3, offload=True)


def test_what_waits_in_files_takes_no_memory(tmp_path: Path) -> None:
    def peak(offload: Any) -> int:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 64), nn.Sequential(*(nn.Tanh() for _ in range(9)), nn.Linear(64, 2)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = TrainStep(
            model,
            optimizer,
            loss_fn=nn.MSELoss(),
            micro_batch_size=8,
            blocks=list(model[1]),
            offload=offload,
            verify=False,
        )
        x, y = torch.randn(64, 4), torch.randn(64, 2)
        with LiveBytes() as live:
            step(x, y)
        return live.peak

    assert peak(tmp_path) < 0.4 * peak(False)


def test_offload_that_cannot_be() -> None:
    model = network()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    for options, error, words in (
        ({"blocks": "auto", "offload": "/no/such/folder"}, ValueError, "a folder that exists"),
        ({"blocks": "auto", "offload": 3}, TypeError, "Received: offload=3"),
        ({"offload": "/tmp"}, ValueError, "or `blocks`"),
        ({"offload": "/tmp", "batch_norm": "exact"}, TypeError, "must be True or False"),
    ):
        with pytest.raises(error, match=words):
            TrainStep(model, optimizer, compute_loss=loss_of, **options)
