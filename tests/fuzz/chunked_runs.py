"""Chunked modules under losses that look across rows, and the same modules chunk by chunk by hand."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from gradaccum.torch import chunked
from tests.fuzz.problem import Injected, Model, apart, autocast, buffers_of, rows_of, split_sizes
from tests.fuzz.scenario import Scenario
from tests.fuzzing import Errors
from tests.reference import relative_error


class _Encoder(nn.Module):
    """Outputs in a nested structure; with `columns`, its rows are in the last dimension."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__()
        self.model = Model(scenario, alone=True)
        self.columns = scenario.batch == "columns"

    def forward(self, x: Tensor, head: int = 0, *, scale: Any = None) -> Any:
        x = x.T if self.columns else x
        hidden = self.model.fault(self.model.trunk(x))
        outputs = self.model.heads[head](hidden)
        outputs = outputs if scale is None else outputs * scale["by"]
        found = {"outputs": outputs, "more": (hidden, [outputs.detach().argmax(-1)])}
        return {"outputs": outputs.T, "more": (hidden.T, [])} if self.columns else found


def _loss(found: Any, columns: bool) -> Tensor:
    """Looks at all pairs of rows."""
    outputs, hidden = found["outputs"].double(), found["more"][0].double()
    outputs, hidden = (outputs.T, hidden.T) if columns else (outputs, hidden)
    return (outputs - outputs.mean(0) / 2).square().sum() + (hidden @ hidden.T).logsumexp(1).sum()


def _by_hand(encoder: Any, scenario: Scenario, x: Tensor, head: int, scale: Any) -> Any:
    """Chunk by chunk where chunks draw their own random numbers, or normalise by themselves; else all rows at once."""
    if not (scenario.dropout or scenario.norm in ("warn", "micro", "pooled")):
        return encoder(x, head, scale=scale)
    rows = x.shape[-1] if scenario.batch == "columns" else len(x)
    dim = 1 if scenario.batch == "columns" else 0
    moved = copy.deepcopy(encoder)
    with torch.no_grad(), torch.random.fork_rng():
        moved(x, head, scale=scale)
    parts = [encoder(part, head, scale=scale) for part in x.split(split_sizes(rows, scenario.micro), dim)]
    if scenario.norm in ("warn", "pooled"):  # a forward pass moves its buffers once
        for buffer, once in zip(encoder.buffers(), moved.buffers(), strict=True):
            buffer.data = once.data
    more = torch.cat([part["more"][0] for part in parts], dim)
    return {"outputs": torch.cat([part["outputs"] for part in parts], dim), "more": (more, [])}


def run_chunked(scenario: Scenario, rank: int) -> dict[str, float]:
    """What is wrong: relative errors by name."""
    whole, module = _Encoder(scenario), _Encoder(scenario)
    columns = scenario.batch == "columns"
    small: Any = chunked(
        module,
        scenario.micro,
        keep=scenario.keep,
        batch_norm=scenario.norm or "warn",
        batch_dims={"x": 1 if columns else 0, "scale": None} if columns or scenario.batch == "shared" else 0,
        out_dims=1 if columns else 0,
    )
    found = Errors()
    scales = [torch.tensor(1.5, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    for i, one in enumerate(scenario.epochs[0]):
        x, _ = rows_of(scenario, one, i)
        x = x.T.contiguous() if columns else x
        inputs = [x.clone().requires_grad_(scenario.loss == "penalty") for _ in range(2)]
        given = [{"by": scale} if scenario.batch == "shared" else None for scale in scales]
        torch.manual_seed(i)
        module.model.fault.prepare(one.event, 1)
        loss, failed = _small(small, scenario, one, inputs[0], given[0])
        module.model.fault.calm()
        random = torch.get_rng_state()
        if failed and (one.event == "forward error" or scenario.norm or scenario.dropout):
            break  # buffers and random numbers are where the failed call has left them
        if failed:
            module.zero_grad(), whole.zero_grad()
            scales[0].grad = scales[1].grad = None
            continue
        torch.manual_seed(i)
        with autocast(scenario):
            made = [_by_hand(whole, scenario, inputs[1], one.head, given[1]) for _ in range(scenario.losses)]
        expected = sum(_loss(each, columns) for each in made)
        expected.backward()
        found.note("loss", abs(loss.item() / expected.item() - 1))
        results = [_gradients(module, scales[0], inputs[0]), _gradients(whole, scales[1], inputs[1])]
        if scenario.dtype == "float32":  # there the promise is about what becomes of parameters
            results = [[None if g is None else p - g / 10 for p, g in zip(module.parameters(), r)] for r in results]
        found.note("gradient", apart(*results))
        found.note("buffers", relative_error(buffers_of(module), buffers_of(whole)))
        if not torch.equal(random, torch.get_rng_state()):
            found.note("random numbers", float("inf"))
    return found


def _small(small: Any, scenario: Scenario, one: Any, x: Tensor, scale: Any) -> tuple[Tensor, bool]:
    """The loss through the chunked module, and whether an injected error has ended its pass."""
    loss = torch.zeros(())
    try:
        with autocast(scenario):
            made = [small(x, one.head, scale=scale) for _ in range(scenario.losses)]
        loss = sum(_loss(each, scenario.batch == "columns") for each in made)
        if one.event == "eval":
            small.eval()
        loss.backward()
    except (Injected, torch.OutOfMemoryError):
        return loss, True
    finally:
        small.train()
    return loss, False


def _gradients(module: nn.Module, *others: Tensor) -> list[Tensor | None]:
    return [p.grad for p in (*module.parameters(), *others)]
