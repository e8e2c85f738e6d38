"""Layer by layer, BlockStep makes the large batch's update; in the backward pass and with blocks on the CPU, too."""

import copy
import functools
import os
import resource
import shutil
import signal
import types
import weakref

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from gradaccum.errors import WindowError
from gradaccum.torch.measure.fake_memory import LiveBytes
from tests.reference import relative_error
from tests.torch.layers import problems
from tests.torch.layers.problems import OPTIMIZERS, WAYS, Layer, assert_same_updates, batches, build, loss_of, network
from tests.torch.problems import Does, Held

SIZE, DEPTH = 4, 3


def frozen(*trained):
    model = network().requires_grad_(False)
    for path in trained:
        model.get_parameter(path).requires_grad_()
    return model


def without(*places):
    model = network()
    for place in places:
        model.layers[place].requires_grad_(False)
    return model


def tied(outside=False):
    model = network()
    model.layers[2].inner.weight = model.layers[0].inner.weight
    if outside:
        model.layers[1].outer.bias = model.norm.weight
    return model


def penalised(model, ids, labels):  # block 2's weight stands before block 1, too
    return loss_of(model, ids.clone(), labels) + model.layers[2].inner.weight.square().sum()


def captured(model, ids, labels):
    found = []
    handles = [layer.register_forward_hook(lambda *call: found.append(call[2][0])) for layer in model.layers]
    loss = loss_of(model, ids, labels)
    for handle in handles:
        handle.remove()
    assert len(found) == 3
    assert not any(module._forward_hooks for module in model.modules())
    return loss + 0.1 * sum(x.square().mean() for x in found)


def checkpointed(layer, *arguments):
    return torch.utils.checkpoint.checkpoint(layer, *arguments, use_reentrant=False)


def then_in_place(layer, *arguments):
    x, shared = layer(*arguments)
    return torch.tanh_(x), shared


class Reentrant(Layer):
    """Passes no gradient on where its input wants none, as reentrant checkpoints do."""

    def forward(self, *args, **kwargs):
        again = functools.partial(super().forward, **kwargs)
        return torch.utils.checkpoint.checkpoint(again, *args, use_reentrant=True)


def over_a_frozen_stem(shared):
    model = network(layer=Reentrant)
    model.embedding.requires_grad_(False)
    model.position.requires_grad_(shared)
    return model


# What blocks find and write in their arguments: caches, dicts, lists, objects, and tensors with gradients in these.


def extended(layer, x, y, cache):
    """Keys of each block are added to, as in transformers' caches."""
    mine = cache.layers[layer.place]
    mine.keys = torch.cat([mine.keys, y[:, None]], 1)
    return x + mine.keys.mean(1)


def in_a_dict(layer, x, y, given):
    """What the next block reads, a tuple that grows, and a counter."""
    y = y + given.get("last", 0.0)
    given.update(last=y.sin(), pairs=(*given.get("pairs", ()), y.cos()), calls=given.get("calls", 0) + 1)
    return x + y * given["pairs"][0] * given["calls"]


def read_by_the_loss(layer, x, y, given):
    losses, left = given
    losses.append(y.square().mean(1))
    left.last = y.cos().mean(1) if layer.place == DEPTH - 1 else None
    return x + y


def in_an_object(layer, x, _, given):
    return types.SimpleNamespace(x=x.x + torch.tanh(layer.linear(x.x)), last=x.x)


class Uncopied:
    def __init__(self, scale):
        self.scale = scale

    def __reduce_ex__(self, protocol):
        raise TypeError("neither copied nor pickled")


def scaled(layer, x, y, given):
    return x + y * given.scale


ARGUMENTS = {  # the argument of all blocks, made of keys for each; what a block returns
    "a prefix in a cache": (
        lambda keys: types.SimpleNamespace(layers=[types.SimpleNamespace(keys=k[:, None]) for k in keys.unbind(1)]),
        extended,
    ),
    "a prefix in an object that can't be copied": (lambda keys: Uncopied(keys[:, 0]), scaled),
    "an object without a graph that can't be copied": (lambda keys: Uncopied(keys[:, 0].detach().cos()), scaled),
    "a prefix in a partial of C": (
        lambda keys: functools.partial(torch.mul, keys[:, 0]), lambda layer, x, y, given: x + given(y),
    ),
    "a dict, read by the next": (lambda keys: {}, in_a_dict),
    "a list and an object, read by the loss": (lambda keys: ([], types.SimpleNamespace()), read_by_the_loss),
    "an object is returned": (lambda keys: None, in_an_object),
}  # fmt: skip


def with_arguments(name, freeze=False):
    make, run = ARGUMENTS[name]

    def block(layer, x, given):
        return run(layer, x, torch.tanh(layer.linear(x)) if isinstance(x, torch.Tensor) else None, given)

    def whole(model, x):
        x = model.first(x)
        given = make(model.prefix(x).view(len(x), DEPTH, SIZE))
        x = types.SimpleNamespace(x=x) if run is in_an_object else x
        for layer in model.layers:
            x = layer(x, given)
        x = x.x * x.last if run is in_an_object else x
        left = [*given[0], given[1].last] if run is read_by_the_loss else []
        return torch.cat([x, *(loss[:, None] for loss in left)], 1)

    layers = nn.ModuleList(Does(block, linear=nn.Linear(SIZE, SIZE), place=place) for place in range(DEPTH))
    model = Does(whole, layers=layers, first=nn.Linear(SIZE, SIZE), prefix=nn.Linear(SIZE, SIZE * DEPTH)).double()
    model.layers.requires_grad_(not freeze)
    model.first.requires_grad_(not freeze)
    model.layers[0].requires_grad_(not freeze or "prefix" not in name)
    return model


def square(model, x):
    return model(x).square().mean()


NO_PROOF = {"verify": False}
CASES = {  # the model, the loss, options
    "a plain network": (network, loss_of, {}),
    "one block": (lambda: network(depth=1), loss_of, {"blocks": "layers"}),
    "an adapter inside of frozen blocks": (lambda: frozen("layers.1.inner.weight"), loss_of, {}),
    "frozen blocks": (lambda: without(0, 2), loss_of, {}),
    "weights that blocks have in common": (tied, loss_of, {}),
    "weights in common with a layer outside": (lambda: tied(outside=True), loss_of, {}),
    "a loss of a block's weight": (network, penalised, {}),
    "a block's weight before the blocks": (
        lambda: network(shared=lambda model, x: model.position(x) * model.layers[2].inner.bias),
        loss_of,
        {},
    ),
    "a weight of a later block": (problems.late, loss_of, {}),
    "hooks that the loss registers and removes": (network, captured, {}),
    "a graph between the blocks, in place": (lambda: network(call=then_in_place), loss_of, {}),
    "skips around the blocks": (lambda: network(between=torch.tanh, skips=True), loss_of, {}),
    "checkpoints around the blocks": (lambda: network(call=checkpointed), loss_of, {}),
    "reentrant checkpoints over a frozen stem": (lambda: over_a_frozen_stem(False), loss_of, NO_PROOF),
    "reentrant checkpoints over a frozen embedding": (lambda: over_a_frozen_stem(True), loss_of, NO_PROOF),
    "clipping": (network, loss_of, {"clip_grad_norm": 0.05}),
    "clipping and a loss of a block's weight": (network, penalised, {"clip_grad_norm": 0.05}),
    **{name: (lambda name=name: with_arguments(name), square, {}) for name in ARGUMENTS},
    **{f"{name}; frozen": (lambda name=name: with_arguments(name, True), square, {}) for name in ARGUMENTS},
}
NOT_RUN = [("clipping", "in backward"), ("outside", "on the CPU"), ("later block", "in backward")]  # are refused
NOT_RUN += [(case, "without") for case in CASES if case.split(";")[0] not in ARGUMENTS]  # nobody looks at these
EVERY = [(case, way) for case in CASES for way in WAYS if not any(a in case and b in way for a, b in NOT_RUN)]


@pytest.mark.parametrize(("case", "way"), EVERY)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # of reentrant checkpoints
def test_layer_by_layer_one_call_makes_the_large_batchs_update(case, way):
    make, loss, options = CASES[case]
    torch.manual_seed(0)
    model = make()
    data = batches(count=2) if loss is not square else [(torch.randn(5, SIZE, dtype=torch.float64),) for _ in range(2)]
    optimizer = OPTIMIZERS["adam" if len(case) % 2 else "sgd"]
    assert_same_updates(model, data, loss, optimizer, **{"blocks": "layers", **options, **WAYS[way]})
    if "reentrant" in case:
        found = any(p.grad is not None for p in model.layers.parameters())
        assert found == ("embedding" in case and "in backward" not in way)  # which frees them


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # read by torch.compile
@pytest.mark.parametrize("between", [torch.nn.Identity(), torch.tanh])
def test_compiled_blocks_make_the_large_batchs_update(between):
    model = network(between=between)
    torch.compiler.reset()
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    assert_same_updates(model, batches(count=2), size=3)


def counts(layer, x):
    layer.calls = getattr(layer, "calls", 0) + 1
    return x


def test_second_passes_move_no_attributes():
    model = problems.doing(counts)
    model.forward = lambda ids: type(model).forward(model, counts(model, ids))  # as wrappers of models do
    build(model)(*batches()[0])
    assert [module.calls for module in (model, *model.layers)] == [-(-len(batches()[0][0]) // 3)] * 4


def several(model, ids, labels):
    outputs = model(ids)
    loss = nn.functional.cross_entropy(outputs.flatten(0, 1), labels.flatten())
    return {"words": (loss, labels.numel()), "size": (outputs.square().mean(), len(ids))}


def tokens(*batch):
    return {"tokens": problems.with_its_weight(*batch)}


COMPOSED = {
    "micro-batches of one row": {"size": 1},
    "several losses by name, and groups": {"terms": several, "rows": 8, "size": 4, "groups": 2},
    "a loss by name, and groups": {"terms": tokens, "rows": 8, "size": 4, "groups": 2},
    "a mean with its weight": {"loss": problems.token_mean, "compute_loss": problems.with_its_weight, "size": 4},
}


@pytest.mark.parametrize("name", COMPOSED)
def test_with_any_size_optimizer_and_loss_it_is_the_large_batchs_update(name):
    options = {"rows": 7, **COMPOSED[name]}
    assert_same_updates(network(), batches(options.pop("rows"), 2), **options)


@pytest.mark.parametrize("way", WAYS)
def test_the_last_block_runs_once_where_backward_does(way):
    model, calls = network(), []
    for place, layer in enumerate(model.layers):
        layer.inner.register_forward_hook(lambda *_, place=place: calls.append(place))
    build(model, micro_batch_size=2, **{**WAYS[way], "verify": False})(*batches(7, count=1)[0])
    assert [calls.count(place) for place in range(3)] == [4 * 2, 4 * 2, 4 * (2 if "CPU" in way else 1)]


def test_logits_are_those_of_one_micro_batch_and_the_blocks_keep_no_activations():
    model, counts = network(depth=4), []
    for blocks in (None, "auto"):
        held = Held(*model.parameters())
        step = build(
            model, torch.optim.SGD(model.parameters(), lr=0.0), micro_batch_size=1, blocks=blocks, verify=False
        )
        with held.saved():
            step(*batches()[0])
        counts.append(held.most)
        assert held.now == 0
    assert counts[1] < 0.6 * counts[0], counts


@pytest.mark.parametrize("place", [1, 2])
def test_a_block_that_runs_out_of_memory_in_backward_goes_on_in_smaller_micro_batches(place):
    model, reference = network(), network()
    plain = model.layers[place].inner.forward

    def limited(x):
        if torch.is_grad_enabled() and len(x) > 2:
            raise torch.OutOfMemoryError("no room")
        return plain(x)

    model.layers[place].inner.forward = limited
    make, data = OPTIMIZERS["adam"], batches()
    step = assert_same_updates(model, data, make=make, size=7, reference=reference, verify=False)
    assert step.micro_batch_size == 2


class OfTheUser(Exception):
    """Raised by code that is nobody else's."""


@pytest.mark.parametrize("where", ["forward pass", "second pass", "backward hook"])
@pytest.mark.parametrize("way", [{}, {"verify": False}, {"verify": False, "on": "cpu"}], ids=str)
def test_a_users_own_exception_comes_as_it_is_and_leaves_all_where_it_was(where, way):
    def fail(*_):
        if where == "backward hook" or torch.is_grad_enabled() == (where == "second pass"):
            raise OfTheUser("on purpose")

    model = network()
    step, layer, own = build(model, blocks="layers", **way), model.layers[1].inner, [id(p) for p in model.parameters()]
    hook = layer.register_full_backward_hook(fail) if "hook" in where else layer.register_forward_pre_hook(fail)
    with problems.unchanged(model), pytest.raises(OfTheUser, match="on purpose"):
        step(*batches()[0])
    hook.remove()
    assert [id(p) for p in model.parameters()] == own
    assert step(*batches()[0]).isfinite()


# Blocks that are updated in the backward pass.

IN_BACKWARD = {"update": "in_backward"}
RATES = {"Adafactor": {"lr": 0.1}, "ASGD": {"lr": 0.1}, "Rprop": {"lr": 0.01}}
NAMES = [
    "Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
]  # fmt: skip
if torch.optim.Adagrad([nn.Parameter(torch.ones(1))]).state:
    NAMES.remove("Adagrad")  # torch 2.10 makes its state beforehand: it is refused, by name


def build_in_backward(model, optimizer=None, **options):
    optimizer = OPTIMIZERS["adam"](model.parameters()) if optimizer is None else optimizer
    return build(model, optimizer, **IN_BACKWARD | options)


def of_torch(name, foreach):
    options = {"lr": 1e-2, **RATES.get(name, {}), "foreach": foreach}
    return lambda parameters: getattr(torch.optim, name)(parameters, **options)


def fused(parameters):
    listed = list(parameters)
    groups = [{"params": listed[:4], "lr": 0.1}, {"params": listed[4:]}]
    return torch.optim.AdamW(groups, lr=1e-2, fused=True)


def two_optimizers(parameters):
    listed = list(parameters)
    return [torch.optim.SGD(listed[::2], lr=0.1), torch.optim.Adam(listed[1::2], lr=0.01)]


MAKE = {f"{name}, foreach={n % 2 == 0}": of_torch(name, n % 2 == 0) for n, name in enumerate(NAMES)}
MAKE |= {f"{name}, foreach={each}": of_torch(name, each) for name in ("Adam", "SGD") for each in (False, True)}
MAKE |= {"fused, of two groups": fused, "several": two_optimizers}


@pytest.mark.parametrize("name", MAKE)
def test_in_backward_each_optimizer_of_torch_makes_the_large_batchs_update(name):
    verify = MAKE[name] in (fused, two_optimizers)
    assert_same_updates(network(), batches(count=2), loss_of, MAKE[name], 3, verify=verify, **IN_BACKWARD)


def test_in_backward_schedulers_hooks_and_counters_see_one_update():
    model, seen = network(), []
    parameters = list(model.parameters())
    optimizer = OPTIMIZERS["adam"](parameters)
    scheduler, step = torch.optim.lr_scheduler.StepLR(optimizer, 1), build_in_backward(model, optimizer)
    optimizer.register_step_post_hook(lambda optimizer, *_: seen.append(len(optimizer.param_groups[0]["params"])))
    groups = [*optimizer.param_groups]
    for batch in batches():
        step(*batch)
        scheduler.step()
    assert seen == [len(parameters)] * 3
    assert {int(state["step"]) for state in optimizer.state.values()} == {3}
    assert all(one is other for one, other in zip(groups, optimizer.param_groups, strict=True))
    assert len(optimizer.state_dict()["state"]) == len(parameters)
    assert all(p.grad is None for p in parameters)


def test_in_backward_gradients_are_gone_before_the_next_block_runs_and_no_more_than_one_blocks_are_alive():
    model, numbers, used, kept = network(depth=5), [], [], []
    inside = [id(p) for p in model.layers.parameters()]

    def arrived(parameter):
        numbers.append(sum(p.numel() for p in model.parameters() if p.grad is not None))
        if parameter is model.layers[2].inner.weight and parameter.grad is not None:
            used[:] = [weakref.ref(parameter.grad)]

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(arrived)
    model.layers[1].inner.register_forward_hook(
        lambda *_: kept.append(used[0]() is not None) if torch.is_grad_enabled() else None
    )
    build_in_backward(model, verify=False)(*batches()[0])
    outside = sum(p.numel() for p in model.parameters() if id(p) not in inside)
    assert max(numbers) <= outside + sum(p.numel() for p in model.layers[0].parameters())
    assert kept == [False] * 3


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
def test_in_backward_an_error_in_the_middle_says_what_has_been_updated(error):
    model = network()
    step, before = build_in_backward(model, verify=False), copy.deepcopy(model)

    def fail(layer, args):
        if torch.is_grad_enabled():
            raise error("on purpose")

    model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises((torch.OutOfMemoryError, WindowError)) as raised:
        step(*batches()[0])
    assert "6 of 23 parameters have been updated with this batch" in str(raised.value)
    assert "those of the blocks 'layers.2'" in str(raised.value)
    assert isinstance(raised.value, torch.OutOfMemoryError) == (error is torch.OutOfMemoryError)
    for layer, changed in (("layers.0", False), ("layers.1", False), ("layers.2", True), ("norm", False)):
        found = relative_error(model.get_submodule(layer).parameters(), before.get_submodule(layer).parameters())
        assert (found > 0) == changed, layer
    assert step.updates == 0
    assert all(p.grad is None for p in model.parameters())


# Elsewhere: here that is the CPU, and each comes as a copy.


def test_a_block_comes_once_per_forward_pass_and_once_in_backward_and_its_own_parameters_stay_where_they_are():
    model, copied = network(), []
    step, places = build(model, verify=False, on="cpu", **IN_BACKWARD), [id(p) for p in model.parameters()]
    offloaded = step._layers.offloaded
    copies = offloaded._copies
    offloaded._copies = lambda place: copied.append(place) or copies(place)
    step(*batches(rows=15)[0])
    assert [copied.count(place) for place in range(3)] == [5 + 1] * 3  # five forward passes, and one turn
    assert [id(p) for p in model.parameters()] == places
    assert all(type(layer) is Layer for layer in model.layers)


def test_offloaded_activations_make_the_same_update_take_no_memory_and_leave_no_files(tmp_path):
    seen, peaks, data = [], [], [(torch.randn(64, 4).double(), torch.randn(64, 2).double()) for _ in range(2)]
    mse = lambda model, x, y: nn.functional.mse_loss(model(x), y)  # noqa: E731
    for offload in (tmp_path, False):
        torch.manual_seed(0)
        blocks = nn.Sequential(*(nn.Tanh() for _ in range(9)), nn.Linear(64, 2))
        blocks[-1].register_forward_hook(lambda *_: seen.append(len(os.listdir(tmp_path))))
        model = nn.Sequential(nn.Linear(4, 64), blocks).double()
        options = {"blocks": list(blocks), "offload": offload, "update": "in_backward", "verify": False}
        step = assert_same_updates(model, data, mse, OPTIMIZERS["adam"], 8, **options)
        with LiveBytes() as live:
            step(*data[0])
        peaks.append(live.peak)
    assert max(seen) >= 8 * 9
    assert peaks[0] < 0.4 * peaks[1]
    assert os.listdir(tmp_path) == []


def test_a_folder_without_room_is_an_error_that_names_it_and_nothing_is_updated(tmp_path):
    model = network()
    step = build(model, offload=tmp_path, verify=False, **IN_BACKWARD)
    limits, ignored = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8, limits[1]))
        full = rf"could not be written to the folder of\s+offload='{tmp_path}'"
        with problems.unchanged(model), pytest.raises(OSError, match=full):
            step(*batches()[0])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    shutil.rmtree(tmp_path)
    with problems.unchanged(model), pytest.raises(OSError, match="it is gone"):
        step(*batches()[0])
    tmp_path.mkdir()
    torch.manual_seed(0)
    assert step(*batches()[0]).isfinite()
