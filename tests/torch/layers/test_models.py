"""Models as people have them, layer by layer: those of transformers, from tiny configs."""

import functools

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from tests.torch.layers.problems import assert_same_updates, batches, build, network
from tests.torch.problems import Does, Held

transformers = pytest.importorskip("transformers")


def text(rows=5, length=6):
    torch.manual_seed(1)
    found = []
    for _ in range(2):
        ids = torch.randint(3, 20, (rows, length))
        mask = torch.ones_like(ids)
        mask[0, 4:] = 0
        found.append(({"input_ids": ids, "attention_mask": mask, "labels": torch.randint(3, 20, (rows, length))},))
    return found


def images(rows=5):
    torch.manual_seed(1)
    pixels = [torch.randn(rows, 3, 8, 8, dtype=torch.float64) for _ in range(2)]
    return [({"pixel_values": x, "labels": torch.randint(0, 3, (rows,))},) for x in pixels]


SMALL = {"hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 12}
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT2 = {"n_embd": 8, "n_layer": 3, "n_head": 2, "n_positions": 8, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
T5 = {"d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
MODELS = {
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": 20, **GPT2}, "transformer.h"),
    "llama": ("LlamaForCausalLM", {"vocab_size": 20, "num_key_value_heads": 1, **SMALL}, "model.layers"),
    "bert": ("BertForMaskedLM", {"vocab_size": 20, **SMALL, **QUIET}, "auto"),
    "t5": ("T5ForConditionalGeneration", {"vocab_size": 20, "decoder_start_token_id": 0, **T5}, None),
    "vit": ("ViTForImageClassification", {"image_size": 8, "patch_size": 4, "num_labels": 3, **SMALL, **QUIET}, "auto"),
}


def model_of(name):
    torch.manual_seed(0)
    kind, options, blocks = MODELS[name]
    kind = getattr(transformers, kind)
    model = kind(kind.config_class(**options)).double()
    for path, parameter in model.named_parameters():
        if path.endswith("bias"):  # that of keys gets no gradient but rounding
            nn.init.normal_(parameter, std=0.1)
    return model, [*model.encoder.block, *model.decoder.block] if blocks is None else blocks


def mean_loss(model, batch):
    """A mean over rows: transformers' own is one over tokens that count."""
    outputs, labels = model(**batch), batch["labels"]
    if labels.dim() == 1:
        return outputs.loss
    return nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())


def slow(*cases):
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


ALL, SOME, ON_CPU = text(), text()[:1], {"on": "cpu", "verify": False}  # though only some rows have a mask
OTHERS = [("gpt2", ALL, {}), ("bert", ALL, {}), ("vit", images(), {}), ("gpt2", SOME, ON_CPU), ("bert", SOME, ON_CPU)]


@pytest.mark.parametrize(
    ("name", "data", "options"), [("llama", ALL, {}), ("t5", ALL, {}), ("llama", SOME, ON_CPU), *slow(*OTHERS)]
)
def test_models_of_transformers_make_the_large_batchs_update_with_blocks_that_live_elsewhere_too(name, data, options):
    model, blocks = model_of(name)
    assert_same_updates(model, data, mean_loss, blocks=blocks, **options)


def test_keys_and_values_that_blocks_leave_in_a_cache_are_not_there_when_backward_runs_them_again():
    (model, _), seen = model_of("llama"), []
    assert model.config.use_cache
    model.model.layers[1].register_forward_pre_hook(
        lambda layer, args, kwargs: seen.append(kwargs["past_key_values"].get_seq_length(1)), with_kwargs=True
    )
    assert_same_updates(model, text()[:1], mean_loss, verify=False)
    assert set(seen) == {0}


def test_a_cache_keeps_no_graph_of_a_micro_batch_that_is_through():
    (model, _), most = model_of("llama"), []
    for rows in (1, 4):
        held, step = Held(), build(model, compute_loss=mean_loss, micro_batch_size=1, verify=False)
        with held.saved():
            step(*text(rows)[0])
        most.append(held.most)
    assert most[0] == most[1]


def prefixed(model, ids):
    """Prefix tuning: keys and values of two tokens, in the cache of a frozen model."""
    cache = transformers.DynamicCache()
    for place, (keys, values) in enumerate(model.prefix):
        cache.update(keys.expand(len(ids), -1, -1, -1), values.expand(len(ids), -1, -1, -1), place)
    mask = torch.ones(len(ids), 2 + ids.shape[1], dtype=torch.long)
    logits = model.model(input_ids=ids, attention_mask=mask, past_key_values=cache).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@pytest.mark.parametrize("verify", [True, False])
def test_prefix_tuning_of_a_transformer_makes_the_large_batchs_update(verify):
    prefix = nn.Parameter(torch.randn(3, 2, 1, 1, 2, 4, dtype=torch.float64))
    model = Does(prefixed, model=model_of("llama")[0].requires_grad_(False), prefix=prefix)
    data = [(torch.randint(11, (5, 6)),) for _ in range(2)]
    assert_same_updates(model, data, lambda model, ids: model(ids), blocks="model.model.layers", verify=verify)


@pytest.mark.parametrize("on", [None, "cpu"])
def test_blocks_that_return_model_outputs(on):
    def call(layer, x, shared):
        outputs = layer(x, shared)
        return outputs.last_hidden_state, outputs["hidden_states"][0]

    def named(layer, args, outputs):
        x, shared = outputs
        return transformers.modeling_outputs.BaseModelOutput(last_hidden_state=x, hidden_states=(shared,))

    model = network(call=call)
    for layer in model.layers:
        layer.register_forward_hook(named)
    assert_same_updates(model, batches(count=1), blocks="layers", on=on, verify=False)


def test_checkpointing_inside_blocks_goes_on():
    model, _ = model_of("llama")
    model.config.use_cache = False
    for layer in model.model.layers:  # as model.activation_checkpointing_enable() does
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=True)
    assert_same_updates(model.train(), text(), mean_loss)
