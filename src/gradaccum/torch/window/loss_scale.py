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

    Most loops call `zero_grad()` between `GradScaler.update` and the backward pass, and it multiplies. Where a whole
    window has shown that this was always in time, no hook is needed: in ordinary windows `step()` compares the version
    of the scaler's own tensor. Loops in another order keep a hook on each parameter, for good.
    """

    neutral = _Neutral()

    def __init__(self, buffer: GradientBuffer, monitor: GradientMonitor) -> None:
        self._buffer, self._monitor = buffer, monitor
        self.known = False  # a GradScaler has stepped, in some window
        self.scaled: bool | None = None  # whether this window's micro-batches come through one; None: none has come yet
        self._live: Tensor | None = None  # the scaler's own, which it changes in place
        self._handle: Any = None
        self._in_time: bool | None = None  # whether `zero_grad` has always been; None: that is not seen yet
        self._shown: tuple[Tensor, Tensor, int] | None = None
        self.close()

    def close(self) -> None:
        self._scale: Tensor | None = None
        self._version = 0  # of the live scale when it was this one; -1: its gradients have several
        self.overflow: Tensor | None = None
        self.unscaled = False  # `unscale_` has divided the sum
        self._own: Tensor | None = None
        if self._in_time:
            self.remove()

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
        parameters = self._buffer.parameters()
        if all(p.grad is None or not p.requires_grad for p in parameters) and any(p.requires_grad for p in parameters):
            smallest = min((p for p in parameters if p.requires_grad), key=Tensor.numel)
            dtype = getattr(smallest, "grad_dtype", None)  # wider than its own with `accumulate_dtype`
            smallest.grad = zero = torch.zeros_like(smallest, dtype=dtype, requires_grad=False)
            self._shown = smallest, zero, zero._version

    def hide(self) -> None:
        """Remove the zero gradient that `show` made, if no other has joined or replaced it.

        Lightning asks whether the optimizer unscales, and leaves it at that where its user skips a micro-batch.
        """
        shown, self._shown = self._shown, None
        if shown is not None and shown[0].grad is shown[1] and shown[1]._version == shown[2]:
            shown[0].grad = None

    def add(self, live: Tensor | None, found_inf: Tensor) -> None:
        if self._scale is not None:
            self._check_scale(live)
        self.overflow = found_inf.clone() if self.overflow is None else torch.maximum(self.overflow, found_inf)
        self.unscaled = live is None
        if live is not None:
            if self._scale is None:
                self._note(live)
        elif self._scale is not None and self._live is not None:
            self._scale = self._scale / self._live  # which `unscale_` has divided the sum by
        else:
            self._scale = torch.ones_like(found_inf)
        self._buffer.join_restored(self._scale)

    def _note(self, live: Tensor) -> None:
        """The sum is in the live scale, which is about to change."""
        self._live, self._scale, self._version = live, live.detach().clone(), live._version

    @property
    def _moved(self) -> bool:
        return self._scale is not None and self._live is not None and self._live._version != self._version

    def _check_scale(self, live: Tensor | None) -> None:
        """Raise if this micro-batch's gradient may have joined a sum in another scale."""
        another = live is not None and live is not self._live
        self._in_time = not self._moved and self._in_time is not False
        if not another and (self._handle is not None or not self._moved):
            return
        self.remove()
        self._version = -1
        if another:
            raise WindowError(
                "Two GradScalers have stepped in one window, so its gradients have different scales. Use one for all "
                "micro-batches of a window. discard() drops it."
            )
        raise WindowError(
            "GradScaler.update() came behind this micro-batch's zero_grad(), or there was no zero_grad(), unlike in "
            "the windows before: its gradient may have another scale than the window's sum. Keep one order: "
            "zero_grad(), backward(), scaler.step(optimizer), scaler.update(). discard() drops the window; later ones "
            "take any order."
        )

    def stay_open(self) -> None:
        """Another micro-batch is to come: drop a sum that has overflowed, and watch if `zero_grad` may be late."""
        assert self.overflow is not None
        overflow = self.overflow > 0
        if not overflow.is_cpu or overflow:  # on a device nobody waits for it
            with torch.no_grad(), self._monitor.resyncing():
                for part in self._buffer.everything():
                    if not part.is_sparse:
                        part.masked_fill_(overflow.to(part.device), 0)
                    elif overflow:
                        part.zero_()
        if not self._in_time or self._monitor.looking:
            self._attach()

    def _attach(self) -> None:
        if self._handle is not None:
            return
        this = weakref.ref(self)  # the parameters shall not keep the optimizer alive

        def backward_starts(gradient: Tensor) -> None:
            if (scale := this()) is not None:
                scale.rescale_()

        # Frozen ones, too: which ones are may change at any time.
        leaves = [p for p in self._buffer.parameters() if p.is_leaf and p.is_floating_point()]
        with all_require_grad(leaves):
            self._handle = torch.autograd.graph.register_multi_grad_hook(leaves, backward_starts, mode="any")

    def parameters_added(self) -> None:
        if self._handle is not None:
            self.remove()
            self._attach()

    def rescale_(self) -> None:
        """`bring` the sum where `zero_grad` has not. Without hooks others may have come since: then `add` raises."""
        if self._moved:
            self._in_time = False
            if self._handle is not None:
                self.bring()

    def bring(self) -> None:
        """Bring the sum to the live scale, in which the next gradient comes: none has come since that changed."""
        if not self._moved or self._version < 0:
            return
        assert self._live is not None
        assert self._scale is not None
        factor = self._live / self._scale
        if not factor.is_cpu or factor != 1:  # on a device nobody waits for it
            with self._monitor.resyncing():
                self._buffer.scale_(factor)
        self._note(self._live)

    # Several ranks: their sums can be reduced together only in one scale.

    def adopt(self, scale: float) -> None:
        """Have the scaler scale the losses that come by this much: before the backward pass in which ranks reduce."""
        if self._live is not None and scale:
            late, self._own = self._moved, self._live.detach().clone()
            self._in_time = False if late else self._in_time
            self._live.fill_(scale)
            if self._handle is not None or not late:
                self.bring()

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
