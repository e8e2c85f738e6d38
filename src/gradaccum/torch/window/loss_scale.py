"""Gradient accumulation under `torch.amp.GradScaler`, whose loss scale may change on every micro-batch."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from gradaccum.errors import WindowError
from gradaccum.on_torch.foreach import clip_norm_
from gradaccum.on_torch.grad_buffer import GradientBuffer, all_require_grad
from gradaccum.torch.watch import GradientMonitor


class _Neutral:
    """`scale * _Neutral()` is `scale` itself, not a copy.

    `GradScaler.step` hands over `scale * optimizer.grad_scale`. The tensor it multiplies is the one that
    `GradScaler.update` changes in place, so holding it tells the scale of the next backward pass, too.
    """

    def __rmul__(self, scale: Tensor) -> Tensor:
        return scale


class LossScale:
    """Keeps a window's sum in one scale, and remembers an overflow until its end, without a host synchronisation.

    Micro-batch i's gradient arrives as `s_i g_i`. Before the first gradient of micro-batch i+1 joins it, the sum is
    multiplied by `s_{i+1} / s_i`; and if it has overflowed it is set to zero, so that the scaler, which looks at the
    sum on every micro-batch, sees one overflow and halves once.
    """

    neutral = _Neutral()

    def __init__(self, buffer: GradientBuffer, monitor: GradientMonitor) -> None:
        self._buffer, self._monitor = buffer, monitor
        self.known = False  # a GradScaler has stepped, in some window
        self.scaled: bool | None = None  # whether this window's micro-batches come through one; None: none has come yet
        self._live: Tensor | None = None  # the scaler's own, which it changes in place
        self._handle: Any = None
        self._rescaled_to = -1  # the version of the live scale that the sum was brought to last
        self._shown: tuple[Tensor, Tensor, int] | None = None
        self.close()

    def close(self) -> None:
        self._scale: Tensor | None = None
        self.overflow: Tensor | None = None
        self._due = self.unscaled = False  # unscaled: `unscale_` has divided the sum
        self._own: Tensor | None = None

    def check(self, scaled: bool) -> None:
        """A micro-batch that weighs something came through the scaler, or without it: as those before it."""
        if self.scaled is not None and scaled != self.scaled:
            raise WindowError(
                "Some micro-batches of this window came through a GradScaler's step(optimizer), others through "
                "optimizer.step(), so their gradients have different scales. Use scaler.scale(loss) and "
                "scaler.step(optimizer) for all of them or for none; with GradScaler(enabled=False) the same loop runs "
                "without scaling. discard() drops the window."
            )
        self.scaled = scaled

    def restore(self, overflow: bool) -> None:
        if overflow:
            self.known = True
            self.overflow = torch.ones(1, device=self._buffer.parameters()[0].device)

    @property
    def in_use(self) -> bool:
        return self.overflow is not None

    @property
    def scale(self) -> Tensor | None:
        """What the sum is multiplied by; None where no GradScaler has stepped in this window."""
        return self._scale if self.in_use else None

    @property
    def live(self) -> Tensor | None:
        """The scaler's own, if it has ever handed it over."""
        return self._live

    def overflowed(self) -> bool:
        return self.overflow is not None and bool(self.overflow.item())

    def show(self) -> None:
        """`GradScaler.step` wants a gradient to look at: a zero where the window has none in `p.grad` so far."""
        parameters = [p for p in self._buffer.parameters() if p.requires_grad]
        if parameters and all(p.grad is None for p in parameters):
            smallest = min(parameters, key=Tensor.numel)
            dtype = getattr(smallest, "grad_dtype", None)  # wider than its own with `accumulate_dtype`
            smallest.grad = zero = torch.zeros_like(smallest, dtype=dtype, requires_grad=False)
            self._shown = smallest, zero, zero._version
        self._buffer.expose(self._monitor.resyncing)

    def hide(self) -> None:
        """Remove the zero gradient that `show` made, if no other has joined or replaced it.

        Lightning asks whether the optimizer unscales, and leaves it at that where its user skips a micro-batch.
        """
        shown, self._shown = self._shown, None
        if shown is not None and shown[0].grad is shown[1] and shown[1]._version == shown[2]:
            shown[0].grad = None

    def add(self, live: Tensor | None, found_inf: Tensor) -> None:
        if self._due and live is not None:
            self.rescale_()  # no backward pass has done it
        self.overflow = found_inf.clone() if self.overflow is None else torch.maximum(self.overflow, found_inf)
        self.unscaled = live is None
        if live is not None:
            self._live, self._scale = live, live.detach().clone()  # it is about to change
        elif self._due and self._scale is not None and self._live is not None:
            self._scale = self._scale / self._live  # no backward pass had brought the sum to what `unscale_` divided by
        else:
            self._scale = torch.ones_like(found_inf)
        self._buffer.join_restored(self._scale)

    def expect_backward(self) -> None:
        """The window stays open: bring the sum to the next backward pass's scale as soon as that one starts."""
        self._due = True
        if self._handle is None:
            this = weakref.ref(self)  # the parameters shall not keep the optimizer alive

            def backward_starts(gradient: Tensor) -> None:
                if (scale := this()) is not None:
                    scale.rescale_()

            # Frozen ones, too: which ones are may change at any time.
            leaves = [p for p in self._buffer.parameters() if p.is_leaf and p.is_floating_point()]
            with all_require_grad(leaves):
                self._handle = torch.autograd.graph.register_multi_grad_hook(leaves, backward_starts, mode="any")

    def rescale_(self) -> None:
        if self._live is None or self._scale is None or self.overflow is None:
            return
        version = self._live._version  # it may change after a pass that only `torch.autograd.grad` has asked for
        if not self._due and version == self._rescaled_to:
            return
        self._due, self._rescaled_to = False, version
        with torch.no_grad(), self._monitor.resyncing():
            self._buffer.scale_(self._live / self._scale)
            overflow = self.overflow > 0
            for part in self._buffer.everything():
                if not part.is_sparse:
                    part.masked_fill_(overflow.to(part.device), 0)
                elif overflow:
                    part.zero_()
        self._scale = self._live.detach().clone()

    # Several ranks: their sums can be reduced together only in one scale.

    def adopt(self, scale: float) -> None:
        """Have the scaler scale the losses that come by this much: before the backward pass in which ranks reduce."""
        if self._live is not None and scale:
            self._own = self._live.detach().clone()
            self._live.fill_(scale)

    def bring_to(self, scale: float) -> None:
        if self.in_use and self._scale is not None and scale:
            self._buffer.scale_(scale / self._scale)
            self._scale.fill_(scale)

    def agreement(self, reduced: bool) -> tuple[float, float, bool]:
        """The scale of the sum (0 without a scaler), the scale that this rank's scaler has come to, any overflow.

        Of a sum that a backward pass has `reduced`, it is the scale of then, in which ranks without a micro-batch have
        it. Where that is not known, it is a negative number, the same on ranks that have divided by the same one.
        """
        if self._scale is None or self.overflow is None:
            return 0.0, 0.0, self.overflowed()
        own = next(scale for scale in (self._own, self._live, self._scale) if scale is not None)
        held = self._scale
        if reduced and self.unscaled:
            held = -1.0 - clip_norm_(self._buffer.gradients(), None) if self._live is None else self._live
        found = [t.detach().double().reshape(()) for t in (held, own, self.overflow)]
        scale, own_scale, overflow = torch.stack(found).tolist()
        return scale, own_scale, bool(overflow)

    def agree(self, scale: float) -> None:
        if self.in_use and self._live is not None and scale:
            self._live.fill_(scale)

    def remove(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
