"""Models as people have them, layer by layer: those of transformers, from tiny configs, and a ResNet."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from gradaccum.torch import TrainStep
from tests.torch.layers.test_blocks import OPTIMIZERS, Layer, Network, assert_same_updates, batches, loss_of

transformers = pytest.importorskip("transformers")


def _text(rows: int = 5, length: int = 6) -> list[tuple[dict[str, Tensor]]]:
    torch.manual_seed(1)
    batches = []
    for _ in range(2):
        ids = torch.randint(3, 20, (rows, length))
        mask = torch.ones_like(ids)
        mask[0, 4:] = 0
        batches.append(({"input_ids": ids, "attention_mask": mask, "labels": torch.randint(3, 20, (rows, length))},))
    return batches


def _images(rows: int = 5) -> list[tuple[dict[str, Tensor]]]:
    torch.manual_seed(1)
    pixels = [torch.randn(rows, 3, 8, 8, dtype=torch.float64) for _ in range(2)]
    return [({"pixel_values": x, "labels": torch.randint(0, 3, (rows,))},) for x in pixels]


SMALL = {"hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 12}
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT2 = {"n_embd": 8, "n_layer": 3, "n_head": 2, "n_positions": 8, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
T5 = {"d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
MODELS: dict[str, tuple[str, dict[str, Any], Any]] = {
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": 20, **GPT2}, "transformer.h"),
    "llama": ("LlamaForCausalLM", {"vocab_size": 20, "num_key_value_heads": 1, **SMALL}, "model.layers"),
    "bert": ("BertForMaskedLM", {"vocab_size": 20, **SMALL, **QUIET}, "auto"),
    "t5": ("T5ForConditionalGeneration", {"vocab_size": 20, "decoder_start_token_id": 0, **T5}, None),
    "vit": ("ViTForImageClassification", {"image_size": 8, "patch_size": 4, "num_labels": 3, **SMALL, **QUIET}, "auto"),
}


def _model(name: str) -> tuple[Any, Any]:
    """The model, and its blocks."""
    torch.manual_seed(0)
    kind, options, blocks = MODELS[name]
    kind = getattr(transformers, kind)
    model = kind(kind.config_class(**options)).double()
    for path, parameter in model.named_parameters():
        if path.endswith("bias"):  # that of keys gets no gradient but rounding
            nn.init.normal_(parameter, std=0.1)
    return model, [*model.encoder.block, *model.decoder.block] if blocks is None else blocks


def _loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """A mean over rows: transformers' own is one over tokens that count."""
    labels = batch["labels"]
    outputs = model(**batch)
    if labels.dim() == 1:
        return outputs.loss
    return nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())


def slow(*names: str) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", ["llama", "t5", *slow("gpt2", "bert", "vit")])
def test_models_of_transformers_make_the_large_batchs_update(name: str) -> None:
    model, blocks = _model(name)
    assert_same_updates(model, _images() if name == "vit" else _text(), _loss, OPTIMIZERS["sgd"], 2, blocks=blocks)


@pytest.mark.parametrize("name", ["llama", *slow("gpt2", "bert")])
def test_blocks_that_live_elsewhere_make_the_large_batchs_update_though_only_some_rows_have_a_mask(name: str) -> None:
    model, blocks = _model(name)
    assert_same_updates(model, _text()[:1], _loss, OPTIMIZERS["sgd"], 2, blocks=blocks, on="cpu", verify=False)


def test_keys_and_values_that_blocks_leave_in_a_cache_are_not_there_when_backward_runs_them_again() -> None:
    model, _ = _model("llama")
    assert model.config.use_cache
    seen = []
    model.model.layers[1].register_forward_pre_hook(
        lambda layer, args, kwargs: seen.append(kwargs["past_key_values"].get_seq_length(1)), with_kwargs=True
    )
    assert_same_updates(model, _text()[:1], _loss, blocks="auto", verify=False)
    assert set(seen) == {0}


def test_a_cache_keeps_no_graph_of_a_micro_batch_that_is_through() -> None:
    most, held, (model, _) = list[int](), [0], _model("llama")

    class Saved:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor.detach()
            held[0] += 1
            most[-1] = max(most[-1], held[0])

        def __del__(self) -> None:
            held[0] -= 1

    for rows in (1, 4):
        options: dict[str, Any] = {"micro_batch_size": 1, "blocks": "auto", "verify": False}
        step = TrainStep(model, OPTIMIZERS["sgd"](model.parameters()), compute_loss=_loss, **options)
        most.append(0)
        with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
            step(*_text(rows)[0])
    assert most[0] == most[1]


class Named(Layer):
    """A block that returns a ModelOutput."""

    def forward(self, x: Tensor, shared: Tensor, *, scale: float = 1.0) -> Any:
        x, shared = super().forward(x, shared, scale=scale)
        return transformers.modeling_outputs.BaseModelOutput(last_hidden_state=x, hidden_states=(shared,))


class NamedNetwork(Network):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        shared = self.position(x)
        for layer in self.layers:
            outputs = layer(x, shared)
            x, shared = outputs.last_hidden_state, outputs["hidden_states"][0]
        return self.head(self.norm(x))


@pytest.mark.parametrize("on", [None, "cpu"])
def test_blocks_that_return_model_outputs(on: Any) -> None:
    torch.manual_seed(0)
    model = NamedNetwork().double()
    model.layers = nn.ModuleList([Named(6) for _ in range(3)]).double()
    options = {"blocks": "layers", "on": on, "verify": False}
    assert_same_updates(model, batches(count=1), loss_of, size=3, **options)


def test_checkpointing_inside_blocks_goes_on() -> None:
    model, _ = _model("llama")
    model.config.use_cache = False
    for layer in model.model.layers:  # as model.activation_checkpointing_enable() does
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=True)
    assert_same_updates(model.train(), _text(), _loss, blocks="auto")


class _Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.one, self.two = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.norm = nn.GroupNorm(2, channels)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu_(x + self.two(torch.relu(self.norm(self.one(x)))))


def test_a_resnet_with_layers_between_its_blocks() -> None:
    torch.manual_seed(0)
    stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU())
    one, two = (nn.Sequential(*(_Residual(4) for _ in range(2))) for _ in range(2))
    model = nn.Sequential(stem, one, nn.AvgPool2d(2), two, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    data = [(batch["pixel_values"], batch["labels"]) for (batch,) in _images()]

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(x), y)

    assert_same_updates(model.double(), data, loss, blocks=[*one, *two])
