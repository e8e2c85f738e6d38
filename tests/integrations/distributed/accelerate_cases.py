"""What each rank does in the tests of Accelerate. Every case compares itself with one ordinary process."""

import os

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState

from gradaccum import WindowError
from gradaccum.integrations.accelerate import prepare_optimizer
from tests.integrations.distributed.lightning_cases import batches, windows
from tests.reference import relative_error, torch_updates
from tests.torch.problems import mse, network, sgd


def accelerator(rank):
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    return Accelerator(cpu=True)


def prepared(rank, steps):
    one = accelerator(rank)
    model = one.prepare(network(dtype=torch.float64))
    return one, model, prepare_optimizer(one, sgd(model.parameters()), steps)


def train(rank, steps, clip=None, epochs=2):
    """Returns (error, updates)."""
    one, model, optimizer = prepared(rank, steps)
    assert one.num_processes == 2
    for _ in range(epochs):
        for batch in optimizer.batches(batches(rank)):
            optimizer.zero_grad()
            one.backward(mse(model, *batch))
            if clip is not None:
                one.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
    plain = network(dtype=torch.float64)
    torch_updates(plain, sgd(plain.parameters()), [*windows(steps)] * epochs, mse, clip_grad_norm=clip)
    return relative_error(model.module.parameters(), plain.parameters()), optimizer.updates


def prepare_too_early(rank):
    one = accelerator(rank)
    model = network(dtype=torch.float64)
    try:
        prepare_optimizer(one, sgd(model.parameters()), 2)
    except ValueError as error:
        return str(error)


def save(rank, folder):
    """Inside a window and after it. Returns what is said."""
    one, model, optimizer = prepared(rank, 2)
    said = None
    for index, batch in enumerate(batches(rank)[:2]):
        one.backward(mse(model, *batch))
        optimizer.step()
        try:
            one.save_state(folder)
        except WindowError as error:
            said = (index, str(error))
        optimizer.zero_grad()
    return said
