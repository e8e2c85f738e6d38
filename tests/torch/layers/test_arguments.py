"""What blocks find and write in their arguments: caches, dicts, lists, objects, and tensors with gradients in these."""

from __future__ import annotations

import functools
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradaccum.torch import Blocks, TrainStep
from tests.torch.layers.test_blocks import OPTIMIZERS, assert_same_updates

SIZE, DEPTH = 4, 3


class Cache:
    """Keys of each block, as transformers' caches have them."""

    def __init__(self, prefix: list[Tensor]) -> None:
        self.layers = [types.SimpleNamespace(keys=keys) for keys in prefix]


class Block(nn.Module):
    """Does something with its argument as `how` says."""

    def __init__(self, how: str, place: int) -> None:
        super().__init__()
        self.linear, self.how, self.place = nn.Linear(SIZE, SIZE), how, place

    def forward(self, x: Tensor, given: Any) -> Any:
        y = torch.tanh(self.linear(x)) if isinstance(x, Tensor) else x
        if self.how.startswith("prefix"):
            if self.how == "prefix in a cache":
                mine = given.layers[self.place]
                mine.keys = torch.cat([mine.keys, y[:, None]], 1)
                return x + mine.keys.mean(1)
            if self.how == "prefix in a partial":
                return x + given(y)
            return x + y * given.scale
        if self.how == "dict, read by the next":
            y = y + given.get("last", 0.0)
            given["last"] = y.sin()
        if self.how == "list, read by the loss":
            given.append(y.square().mean(1))
        if self.how == "object, read by the loss":
            given.total = y.square().mean(1) if self.place == DEPTH - 1 else None
        if self.how == "tuple in a dict":
            given["pairs"] = (*given.get("pairs", ()), y.cos())
            y = y * given["pairs"][0]
        if self.how == "an object is returned":
            return types.SimpleNamespace(x=x.x + torch.tanh(self.linear(x.x)), last=x.x)  # type: ignore[attr-defined]
        if self.how == "counter in a dict":
            given["calls"] = given.get("calls", 0) + 1
            y = y * given["calls"]
        return x + y


class Model(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first, self.prefix = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE * DEPTH)
        self.layers = nn.ModuleList(Block(how, place) for place in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        keys = self.prefix(x).view(len(x), DEPTH, SIZE)
        makers: dict[str, Any] = {
            "prefix in a cache": lambda: Cache([keys[:, [place]] for place in range(DEPTH)]),
            "prefix in an object": lambda: types.SimpleNamespace(scale=keys[:, 0], name="one"),
            "prefix in a partial": lambda: functools.partial(torch.mul, keys[:, 0]),
            "list, read by the loss": list,
            "object, read by the loss": types.SimpleNamespace,
        }
        given = makers.get(self.how, dict)()
        if self.how == "an object is returned":
            x = types.SimpleNamespace(x=x)  # type: ignore[assignment]
        for layer in self.layers:
            x = layer(x, given)
        if self.how == "an object is returned":
            x = x.x * x.last  # type: ignore[attr-defined]
        aside = [given] if isinstance(given, list) else [[given.total]] if self.how.startswith("object") else []
        return torch.cat([x, *(loss[:, None] for listed in aside for loss in listed)], 1)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


HOW = [
    "prefix in a cache",
    "prefix in an object",
    "prefix in a partial",
    "dict, read by the next",
    "list, read by the loss",
    "object, read by the loss",
    "tuple in a dict",
    "counter in a dict",
    "an object is returned",
]


@pytest.mark.parametrize("options", [{}, {"update": "in_backward"}, {"on": "cpu"}, {"verify": False}], ids=str)
@pytest.mark.parametrize("how", HOW)
def test_what_blocks_read_and_write_in_their_arguments_makes_the_large_batchs_update(
    how: str, options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    data = [(torch.randn(5, SIZE, dtype=torch.float64),) for _ in range(2)]
    for frozen in (False, True):
        model = Model(how).double()
        model.layers.requires_grad_(not frozen)
        model.first.requires_grad_(not frozen)
        if frozen and not how.startswith("prefix"):
            model.layers[0].requires_grad_()
        options = options if not (frozen and "on" in options) else {}
        assert_same_updates(model, data, loss_of, OPTIMIZERS["adam"], **{"blocks": "layers", **options})


def test_prefix_tuning_of_a_transformer_makes_the_large_batchs_update() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 12}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=11, **sizes)).double()

    class Tuned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model.requires_grad_(False)
            self.prefix = nn.Parameter(torch.randn(3, 2, 1, 2, 2, 4, dtype=torch.float64))

        def forward(self, ids: Tensor) -> Tensor:
            cache = transformers.DynamicCache()
            for place, (keys, values) in enumerate(self.prefix):
                cache.update(keys.expand(len(ids), -1, -1, -1), values.expand(len(ids), -1, -1, -1), place)
            mask = torch.ones(len(ids), 2 + ids.shape[1], dtype=torch.long)
            return self.model(input_ids=ids, attention_mask=mask, past_key_values=cache).logits

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    data = [(torch.randint(11, (5, 6)),) for _ in range(2)]
    for options in ({}, {"verify": False}):
        assert_same_updates(Tuned(), data, loss, size=2, blocks="model.model.layers", **options)


class OfTheUser(Exception):
    """Raised by code that is nobody else's."""


@pytest.mark.parametrize("where", ["second pass", "backward hook"])
@pytest.mark.parametrize("verify", [True, False])
def test_a_users_own_exception_comes_as_it_is(where: str, verify: bool) -> None:
    torch.manual_seed(0)
    model = Model("plain").double()

    def fail(*_: Any) -> None:
        if where == "backward hook" or torch.is_grad_enabled():
            raise OfTheUser("on purpose")

    layer: Any = model.layers[0].linear
    if where == "second pass":
        layer.register_forward_pre_hook(fail)
    else:
        layer.weight.register_hook(fail)
    step = TrainStep(
        model,
        OPTIMIZERS["sgd"](model.parameters()),
        compute_loss=loss_of,
        micro_batch_size=2,
        blocks=Blocks("layers"),
        verify=verify,
    )
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(OfTheUser, match="on purpose"):
        step(torch.randn(5, SIZE, dtype=torch.float64))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
