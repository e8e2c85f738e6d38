"""Layer by layer, TrainStep makes the large batch's update."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradaccum.torch import Blocks, TrainStep
from tests.reference import FLOAT64, relative_error, torch_updates

ADAM = {"lr": 1e-2}
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
}


class Layer(nn.Module):
    """A residual block with an argument that all blocks share, and a tuple of outputs."""

    def __init__(self, size: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(size), nn.Linear(size, 2 * size), nn.Linear(2 * size, size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, shared: Tensor, *, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        y = self.outer(torch.tanh(self.inner(self.norm(x)) + shared))
        return x + scale * self.dropout(y), shared


class Doing(Layer):
    """The same, after `do(layer, x)`, which returns another x; `after` that, `kept(layer, x)` of what it returns."""

    def __init__(self, do: Any, kept: Any = lambda layer, x: None) -> None:
        super().__init__(6)
        self.do, self.kept = do, kept

    def forward(self, x: Tensor, shared: Tensor, *, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        x, shared = super().forward(self.do(self, x), shared, scale=scale)
        self.kept(self, x)
        return x, shared


def as_it_is(layer: Any, x: Tensor) -> Tensor:
    return x


class Network(nn.Module):
    """Embeddings, blocks, and a head whose weight is the embeddings'."""

    def __init__(self, size: int = 6, depth: int = 3, dropout: float = 0.0, vocabulary: int = 11) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, size)
        self.position = nn.Linear(size, 2 * size)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList([Layer(size, dropout) for _ in range(depth)])
        self.norm = nn.LayerNorm(size)
        self.head = nn.Linear(size, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.dropout(self.embedding(ids))
        shared, first = self.position(x), x
        for layer in self.layers:
            x, shared = layer(x, shared, scale=0.5)
        return self.head(self.norm(x + first + shared[..., : x.shape[-1]]))


def network(**options: Any) -> Network:
    torch.manual_seed(0)
    return Network(**options).double()


def doing(do: Any, kept: Any = lambda layer, x: None, places: Any = (0, 1, 2)) -> Network:
    """A network some of whose blocks do something of their own."""
    model = network()
    for place in places:
        model.layers[place] = Doing(do, kept).double()
    return model


def batches(rows: int = 7, count: int = 3) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randint(11, (rows, 5)), torch.randint(11, (rows, 5))) for _ in range(count)]


def loss_of(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), labels.flatten())


def in_blocks(options: dict[str, Any]) -> dict[str, Any]:
    """These options, with what is meant for `Blocks` in it."""
    given = {name: options[name] for name in ("update", "on") if name in options}
    others = {name: value for name, value in options.items() if name not in given}
    return {**others, "blocks": Blocks(options["blocks"], **given)} if given else others


def build(model: nn.Module, optimizer: Any = None, **options: Any) -> TrainStep:
    optimizer = OPTIMIZERS["sgd"](model.parameters()) if optimizer is None else optimizer
    return TrainStep(
        model, optimizer, **in_blocks({"compute_loss": loss_of, "micro_batch_size": 3, "blocks": "auto", **options})
    )


def trained(model: nn.Module, data: Any = None, optimizer: Any = None, **options: Any) -> list[Tensor]:
    """Parameters, buffers and losses after these updates."""
    step = build(model, optimizer, **options)
    losses = [step(*batch) for batch in data or batches()]
    return [t.detach().double() for t in (*model.parameters(), *model.buffers(), *losses)]


@contextlib.contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Nothing of the model may be updated inside, and no gradient left."""
    before = copy.deepcopy(model.state_dict())
    yield
    assert relative_error(model.state_dict().values(), before.values()) == 0.0
    assert all(p.grad is None for p in model.parameters())


def assert_same_updates(
    model: nn.Module, data: Any, loss: Any, make: Any = OPTIMIZERS["sgd"], size: Any = 2, **options: Any
) -> TrainStep:
    """Train a copy by ordinary steps and the model layer by layer: the same parameters, the same losses."""
    reference = copy.deepcopy(model)
    trained = [p for p in reference.parameters() if p.requires_grad]
    expected = torch_updates(reference, make(trained), data, loss, clip_grad_norm=options.get("clip_grad_norm"))
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    step = build(model, optimizer, **{"compute_loss": loss, "micro_batch_size": size, **options})
    losses = [step(*batch).item() for batch in data]
    assert relative_error([torch.tensor(losses)], [torch.tensor(expected)]) <= FLOAT64
    assert relative_error(model.parameters(), reference.parameters()) <= FLOAT64
    assert step.updates == len(data)
    return step


def test_layer_by_layer_one_call_makes_the_large_batchs_update() -> None:
    for name, size in (("sgd", 1), ("sgd", 3), ("sgd", "auto"), ("adam", 3)):
        assert_same_updates(network(), batches(count=2), loss_of, OPTIMIZERS[name], size)


def test_dropout_is_replayed_so_that_the_update_is_that_of_accumulation() -> None:
    updated = []
    for blocks in (None, "auto", Blocks("auto", on="cpu"), Blocks("auto", update="in_backward")):
        model, data = network(dropout=0.3), batches()
        torch.manual_seed(5)
        updated.append([*trained(model, data, blocks=blocks), torch.get_rng_state()])
    assert max(relative_error(found, updated[0]) for found in updated[1:]) <= FLOAT64


def test_frozen_blocks_and_adapters_inside_of_frozen_blocks() -> None:
    model = network()
    model.requires_grad_(False)
    model.layers[1].inner.weight.requires_grad_()
    assert_same_updates(model, batches(), loss_of)

    model = network()
    model.layers[2].requires_grad_(False)
    model.layers[0].requires_grad_(False)
    assert_same_updates(model, batches(), loss_of)


def test_weights_that_blocks_have_in_common() -> None:
    model = network()
    model.layers[2].inner.weight = model.layers[0].inner.weight
    model.layers[1].outer.bias = model.norm.weight
    assert_same_updates(model, batches(), loss_of, OPTIMIZERS["adam"])


def test_means_over_tokens_terms_groups_and_sums_compose() -> None:
    def tokens(model: nn.Module, ids: Tensor, labels: Tensor) -> Any:
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), ignore_index=0, reduction="sum")
        count = (labels != 0).sum()
        return loss / count, count

    def several(model: nn.Module, ids: Tensor, labels: Tensor) -> Any:
        outputs = model(ids)
        loss = nn.functional.cross_entropy(outputs.flatten(0, 1), labels.flatten())
        return {"words": (loss, labels.numel()), "size": (outputs.square().mean(), len(ids))}

    def plain(compute: Any) -> Any:
        def loss(model: nn.Module, *batch: Tensor) -> Tensor:
            found = compute(model, *batch)
            return sum(loss for loss, _ in found.values()) if isinstance(found, dict) else found[0]

        return loss

    for compute in (tokens, several):
        model, reference = network(), network()
        expected = torch_updates(reference, OPTIMIZERS["sgd"](reference.parameters()), batches(8), plain(compute))
        found = trained(model, batches(8), compute_loss=compute, micro_batch_size=4, groups=2, blocks=model.layers)
        assert relative_error(found, [*reference.parameters(), *torch.tensor(expected, dtype=torch.float64)]) <= FLOAT64


def _note(calls: list[int], place: int, *_: Any) -> None:
    calls.append(place)


def test_the_last_block_runs_once_where_backward_does() -> None:
    for options, runs in (
        ({}, [2, 2, 1]),
        ({"update": "in_backward"}, [2, 2, 1]),
        ({"on": "cpu"}, [2, 2, 2]),
    ):
        model, calls = network(), list[int]()
        for place, layer in enumerate(model.layers):
            layer.inner.register_forward_hook(functools.partial(_note, calls, place))
        assert_same_updates(model, batches(7, count=1), loss_of, size=2, verify=False, **options)
        assert [calls.count(place) for place in range(3)] == [4 * count for count in runs], options
    model = network(depth=1)
    assert_same_updates(model, batches(7, count=2), loss_of, size=2, blocks="layers", update="in_backward")


def test_a_closure_evaluates_the_window_again() -> None:
    def lbfgs(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(parameters, lr=0.1, max_iter=3)

    model, reference = network(), network()
    optimizer = lbfgs(reference.parameters())
    (batch,) = batches(count=1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(reference, *batch)
        loss.backward()
        return loss

    optimizer.step(closure)
    build(model, lbfgs(model.parameters()))(*batch)
    assert relative_error(model.parameters(), reference.parameters()) <= 1e-9  # three steps amplify rounding


def test_autocast_is_in_force_where_backward_runs_a_block_again() -> None:
    options: dict[str, Any] = {"data": batches(6, count=1), "autocast": torch.bfloat16}
    plain, by_blocks = (trained(network().float(), blocks=blocks, **options) for blocks in (None, "auto"))
    assert relative_error(by_blocks, plain) <= 1e-6


class Counting(nn.Module):
    """What stands before the blocks, and moves a buffer in every pass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(5, 6))
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x))


def test_buffers_move_in_first_passes_alone() -> None:
    updated = []
    for blocks in (None, "1"):  # BatchNorm runs once, the others twice
        torch.manual_seed(0)
        blocks_of = [nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)) for _ in range(2)]
        model = nn.Sequential(Counting(), nn.Sequential(*blocks_of, nn.BatchNorm1d(6)), nn.Linear(6, 3)).double()
        data = [(torch.randn(8, 5).double(), torch.randint(3, (8,))) for _ in range(2)]
        options = {"compute_loss": None, "loss_fn": nn.CrossEntropyLoss(), "batch_norm": "micro", "verify": False}
        updated.append(trained(model, data, blocks=blocks, micro_batch_size=4, **options))
    assert relative_error(*updated) <= 1e-9  # BatchNorm amplifies the rounding of biases before it


def test_logits_are_those_of_one_micro_batch_and_the_blocks_keep_no_activations() -> None:
    model, held, most = network(depth=4), [0], [0]

    def add(tensor: Tensor, factor: int = 1) -> Tensor:
        held[0] += factor
        most[0] = max(most[0], held[0])
        return tensor

    class Saved:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = add(tensor.detach())

        def __del__(self) -> None:
            held[0] -= 1

    counts = {}
    for blocks in (None, "auto"):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        step = build(model, optimizer, micro_batch_size=1, blocks=blocks, verify=False)
        most[0] = 0
        with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
            step(*batches()[0])
        counts[blocks] = most[0]
        assert held[0] == 0
    assert counts["auto"] < 0.6 * counts[None], counts


@pytest.mark.parametrize("place", [1, 2])
def test_a_block_that_runs_out_of_memory_in_backward_goes_on_in_smaller_micro_batches(place: int) -> None:
    model, reference = network(), network()
    plain = model.layers[place].inner.forward

    def limited(x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and len(x) > 2:
            raise torch.OutOfMemoryError("no room")
        return plain(x)

    expected = torch_updates(reference, OPTIMIZERS["adam"](reference.parameters()), batches(), loss_of)
    step = build(model, OPTIMIZERS["adam"](model.parameters()), micro_batch_size=7, verify=False)
    model.layers[place].inner.forward = limited
    losses = [step(*batch).item() for batch in batches()]
    assert step.micro_batch_size == 2
    assert losses == pytest.approx(expected, rel=FLOAT64)
    assert relative_error(model.parameters(), reference.parameters()) <= FLOAT64
