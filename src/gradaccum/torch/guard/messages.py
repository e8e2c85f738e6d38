"""What users are told when the sum of a window was touched."""

from __future__ import annotations

import sys
from typing import Any

from gradaccum.errors import WindowError
from gradaccum.torch.guard.watched import Tampering

__all__ = ["NOTHING_CHANGED", "failed_error", "tampering_error", "untouched_error"]

NOTHING_CHANGED = (
    "The gradients were written inside an open window and kept their values, as clip_grad_norm_(parameters, inf) does "
    "to read a norm. From now on they are compared on every micro-batch; torch.nn.utils.get_total_norm reads a norm "
    "without that. Clipping that has an effect is an error there: pass clip_grad_norm= to the wrapper."
)


def tampering_error(tampering: Tampering) -> WindowError:
    """Somebody else has changed the sum."""
    trainer = _inside_the_trainer()
    if trainer is not None:
        return WindowError(trainer)
    advice = {
        "cleared": "cleared or replaced inside an open window, by model.zero_grad() perhaps. Use "
        "optimizer.zero_grad(), which waits for the window's end.",
        "edited": "edited inside an open window, by clipping perhaps. Until step() closes the window p.grad holds "
        "an undivided sum. Pass clip_grad_norm= to the wrapper, or edit the finished gradient in a hook: "
        "register_step_pre_hook. To read a norm without editing use torch.nn.utils.get_total_norm.",
        "left": "left from the last window: the finished mean gradient would join this window's sum. Call "
        "optimizer.zero_grad() on every micro-batch, which waits for the window's end.",
    }[tampering]
    return WindowError(f"The gradients were {advice} discard() drops the window.")


def untouched_error() -> WindowError:
    """A gradient has arrived that no micro-batch counts."""
    return WindowError(
        "A gradient has arrived since the last step(), and belongs to no micro-batch. Call step() after the backward "
        "pass of every micro-batch: it counts them. If another loss reaches these parameters, as a GAN's generator "
        "loss reaches its discriminator, switch requires_grad_(False) on them meanwhile. To skip a micro-batch, use "
        "backward(loss, weight=0). discard() empties the window."
    )


def failed_error(failure: BaseException | None) -> WindowError:
    """A backward pass has failed."""
    kind = "" if failure is None else f" ({type(failure).__name__})"
    return WindowError(
        f"A backward pass of this window failed{kind}, and may have left part of its gradient in the sum. Call "
        "discard() to drop the window; parameters and optimizer state are as they were."
    )


def _inside_the_trainer() -> str | None:
    """What to do about transformers' Trainer, if that is the caller."""
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "transformers.trainer":
            return (
                "transformers' Trainer clips p.grad and calls model.zero_grad() after every micro-batch, where an "
                "open window holds its sum. Pass the inner optimizer to a Trainer that splits its batches exactly, "
                "gradaccum.integrations.transformers.MicroBatchTrainer, without gradient_accumulation_steps; or write "
                "the loop with optimizer.batches(), or with gradaccum.torch.TrainStep."
            )
        frame = frame.f_back
    return None
