"""The errors and warnings about gradients that were modified inside an open window, and where warnings point to."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from typing import Any

import torch

import gradaccum
from gradaccum.errors import WindowError

SEVERAL_PASSES = (
    "%d backward passes reached one step(), which counts one micro-batch. That is right for several losses over the "
    "same rows. If they belong to different micro-batches, call step() after each of them."
)

_MODIFICATIONS = {
    "cleared": "cleared or replaced inside an open window, by model.zero_grad() perhaps. Use optimizer.zero_grad(), "
    "which waits for the window's end. Gradients of torch.autograd.grad are added by optimizer.add_gradients().",
    "edited": "edited inside an open window, by clipping perhaps. Until step() closes the window p.grad holds "
    "an undivided sum. Pass clip_grad_norm= to the wrapper, or edit the finished gradient in a hook: "
    "register_step_pre_hook. Gradients of torch.autograd.grad are added by optimizer.add_gradients(), not copied "
    "into p.grad. To read a norm without editing use torch.nn.utils.get_total_norm.",
    "left": "left from the last window: the finished mean gradient would join this window's sum. Call "
    "optimizer.zero_grad() on every micro-batch, which waits for the window's end.",
    "assigned": "assigned, where backward passes add to them: each assignment replaces the sum of the window's "
    "micro-batches. Hand gradients of torch.autograd.grad or torch.func.grad to optimizer.add_gradients(gradients).",
}


def several_passes_warning(passes: int) -> str:
    return (
        f"{passes} forward and backward passes reached one step(), which counts one micro-batch, and steps={passes}. "
        "If the loop still has `if (i + 1) % steps == 0:` around step(), windows are "
        f"{passes} times too long and the gradient is {passes} times too large. Call zero_grad() and step() on every "
        "micro-batch, and don't divide the loss: the wrapped optimizer counts."
    )


def modification_error(modification: str) -> WindowError:
    check_outside_of_trainers()
    return WindowError(f"The gradients were {_MODIFICATIONS[modification]} discard() drops the window.")


def untouched_error() -> WindowError:
    return WindowError(
        "A gradient has arrived since the last step(), and no step() counted its micro-batch. Call step() after the "
        "backward pass of every micro-batch. If another loss reaches these parameters, as a GAN's generator loss "
        "reaches the discriminator, call requires_grad_(False) on them during that pass. To skip a micro-batch, use "
        "backward(loss, weight=0). discard() empties the window."
    )


def failed_error(failure: BaseException | None) -> WindowError:
    kind = "" if failure is None else f" ({type(failure).__name__})"
    return WindowError(
        f"A backward pass of this window failed{kind}, and may have left part of its gradient in the sum. Call "
        "discard() to drop the window; parameters and optimizer state are as they were."
    )


def callers() -> set[str]:
    """The modules of all functions that run, of which one may be a trainer's."""
    found = set[str]()
    frame: Any = sys._getframe()
    while frame is not None:
        found.add(frame.f_globals.get("__name__", ""))
        frame = frame.f_back
    return found


def check_outside_of_trainers() -> None:
    """Raise WindowError where transformers' Trainer is the caller: nothing closes its epochs' last windows."""
    if "transformers.trainer" in callers():
        raise WindowError(
            "transformers' Trainer clips p.grad and calls model.zero_grad() after every micro-batch, but an open "
            "window keeps its sum in p.grad. Use gradaccum.integrations.transformers.MicroBatchTrainer, which splits "
            "batches exactly, with the inner optimizer and without gradient_accumulation_steps; or write the loop with "
            "optimizer.batches() or gradaccum.torch.TrainStep."
        )


_OTHERS = tuple(os.path.join(os.path.realpath(package.__path__[0]), "") for package in (gradaccum, torch))


@functools.lru_cache(maxsize=256)
def is_of_the_user(filename: str) -> bool:
    """Whether code of this file is neither ours nor PyTorch's, nor that of a context manager between them."""
    inside = os.path.realpath(filename).startswith(_OTHERS)
    return not (inside or filename.startswith("<") or filename == contextlib.__file__)


def level_of_the_user() -> int:
    """The `stacklevel`, for a caller of this function, of the user's first line."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and not is_of_the_user(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    return level
