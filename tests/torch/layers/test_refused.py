"""What can't go layer by layer is an error by name, before anything is updated."""

import functools

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import gradaccum.torch
from gradaccum.errors import NotEquivalentError
from gradaccum.torch import TrainStep
from gradaccum.torch.layers.refused import NOT_TAKEN
from tests.torch.layers.problems import OPTIMIZERS, Layer, batches, build, doing, late, loss_of, network, unchanged


def changed(change, **options):
    def make():
        model = network(**options)
        change(model)
        return model

    return make


# Calls of blocks.


def short(model):
    """Leaves out a block in a later micro-batch alone."""
    model.how["call"] = lambda layer, x, shared: (
        (x, shared) if layer is model.layers[1] and len(x) == 1 else layer(x, shared)
    )


def checkpointed(*arguments):
    return torch.utils.checkpoint.checkpoint(*arguments, use_reentrant=True)


def doubled(layer, args):
    args[0].mul_(2)


def edits_its_input(place):
    return changed(lambda model: model.layers[place].register_forward_pre_hook(doubled))


CALLS = {
    "a block that is left out": (lambda: network(order=[0, 1]), "'layers.2' was not called."),
    "a block that is called twice": (lambda: network(order=[0, 1, 1, 2]), "'layers.1' was called twice."),
    "another order": (lambda: network(order=[0, 2, 1]), "'layers.1' was not called before 'layers.2'."),
    "a block that is left out later": (changed(short), "'layers.1' was not called before 'layers.2'."),
    "a reentrant checkpoint": (lambda: network(call=checkpointed), "'layers.[12]' was called in a backward pass."),
    "a block that edits its input": (edits_its_input(1), r"'layers.1' edits an input of shape \(2, 5, 6\) in place"),
    "a last block that does": (edits_its_input(2), r"'layers.2' edits an input( of shape \(2, 5, 6\))? in place"),
}

# What blocks keep, or read.


def remembers(layer, x):
    layer.mean = 0.5 * getattr(layer, "mean", 0.0) + 0.5 * x.detach().square().mean()
    return x * (1 + layer.mean)


def leaves_a_loss(layer, x):
    """Where the model's loss finds it."""
    layer.penalty = x.square().mean()


def with_the_loss_left(model, *batch):
    return loss_of(model, *batch) + model.layers[1].penalty


def leaves_a_condition(model, x):
    for layer in model.layers:
        layer.condition = x[..., :1].cos()
    return model.position(x)


def reads_a_condition():
    return doing(lambda layer, x: x * layer.condition, shared=leaves_a_condition)


LEFT = {"compute_loss": with_the_loss_left}
KEPT = {
    "a mean over rows": (lambda: doing(remembers, places=[1]), {}, r"the block 'layers\.1' \(mean\)"),
    "a loss in an attribute": (lambda: doing(kept=leaves_a_loss, places=[1]), LEFT, r"block 'layers\.1' \(penalty\)"),
    "what it reads": (reads_a_condition, {}, r"the block 'layers\.[12]' failed there.*If it reads what the model"),
}

# Optimizers whose steps are more than each parameter's update.


def stepping(before):
    class Stepping(torch.optim.SGD):
        count = 0

        def step(self, closure=None):
            before(self)
            return super().step(closure)

    return lambda model: Stepping(model.parameters(), lr=0.1)


def by_a_joint_norm(which, least):
    """Of the gradients of at least so many such parameters."""

    def normalise(optimizer):
        every = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        grads = [p.grad for p in every if which(p)]
        if len(grads) >= least:
            torch._foreach_div_(grads, float(torch.nn.utils.get_total_norm(grads)))

    return stepping(normalise)


def averaging(model):
    """Moves an average of the model's weights, which stands outside of its groups."""
    average = torch.optim.swa_utils.AveragedModel(model)
    return stepping(lambda optimizer: [p.data.mul_(0.9) for p in average.module.parameters()])(model)


def hooked(model):
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


ACROSS = "Stepping makes a different update when it steps parameters one by one"
STEPS = {
    "normalises by the norm of all": (by_a_joint_norm(lambda p: True, 1), ACROSS),
    "normalises large ones by their norm": (by_a_joint_norm(lambda p: p.dim() > 1 and p.numel() > 9, 2), ACROSS),
    "counts in its groups": (stepping(lambda own: [g.update(k=g.get("k", 0) + 1) for g in own.param_groups]), ACROSS),
    "counts in itself": (stepping(lambda optimizer: setattr(optimizer, "count", optimizer.count + 1)), ACROSS),
    "moves an average": (averaging, r"Stepping.step\(\) does more than update its parameters: it calls aten"),
    "evaluates a closure": (lambda model: torch.optim.LBFGS(model.parameters()), "LBFGS, which evaluates a closure"),
    "has hooks": (hooked, "SGD has hooks of register_step_pre_hook"),
}

PATHS = "blocks='encoder.layers'. Lists of modules are at 'layers'."
BLOCKS = {  # what is given for blocks of a network
    "a number": (lambda model: 7, TypeError, "nn.ModuleList, its dotted path, a list of .* Received: 7"),
    "a number among blocks": (lambda model: [model.norm, 3], TypeError, r"Received: blocks\[1\] of type int"),
    "no block": (lambda model: [], ValueError, "at least one module"),
    "another's": (lambda model: [model.norm, Layer(6)], ValueError, r"blocks\[1\], of type Layer, is not a module of"),
    "a wrong path": (lambda model: "encoder.layers", ValueError, PATHS),
    "a block twice": (lambda model: [model.norm, model.norm], ValueError, "The block 'norm' is in `blocks` twice"),
    "one in another": (
        lambda m: [m.layers[0], m.layers[0].inner],
        ValueError,
        "blocks 'layers.0' and 'layers.0.inner'",
    ),
}
OPTIONS = {
    "batch_norm": ("exact", 'doesn\'t take batch_norm="exact"'),
    "clip_grad_norm": (0.1, "update='in_backward' and `clip_grad_norm` together"),
    "micro_batch_size": ("auto", "needs a `micro_batch_size` in rows"),
    "update": ("sometimes", "`update` must be one of 'after_backward', 'in_backward'"),
}
WAYS = {"": {}, "in backward": {"update": "in_backward"}, "on the CPU": {"update": "in_backward", "on": "cpu"}}
IN_BACKWARD, ON_CPU, AUTO = WAYS["in backward"], {"on": "cpu"}, {"blocks": "auto"}
ROOM = {**IN_BACKWARD, "optimizer": lambda model: OPTIMIZERS["adam"](model.parameters()), "memory_limit": 1}
INFINITE = {**IN_BACKWARD, "verify": False, "compute_loss": lambda *batch: loss_of(*batch) / 0}
VALUE, LATE = ValueError, "updated before their gradient is complete: 'layers.2.norm.weight'"
COMPILED = functools.partial(torch.compile, backend="eager")
SYNCED = changed(lambda model: setattr(model, "norm", nn.SyncBatchNorm(6)))
SHARING = changed(lambda model: setattr(model.layers[0].norm, "weight", model.norm.weight))
RECURRENT = changed(lambda model: model.layers[1].add_module("rnn", nn.LSTM(2, 2)))
HOOKED = changed(lambda model: model.layers[1].inner.weight.register_hook(lambda g: g))
REFUSED = {  # the model, options, the error
    **{
        f"{name} {way}": (make, {"verify": False, **options}, VALUE, words)
        for name, (make, words) in CALLS.items() for way, options in WAYS.items()
    },
    **{
        f"{name} {way}": (make, {**options, **WAYS[way]}, NotEquivalentError, words)
        for name, (make, options, words) in KEPT.items() for way in ("", "on the CPU")
    },
    **{f"that {n}": (network, {**IN_BACKWARD, "optimizer": make}, VALUE, words) for n, (make, words) in STEPS.items()},
    **{f"{name} for blocks": (network, {"blocks": blocks}, *error) for name, (blocks, *error) in BLOCKS.items()},
    **{f"{name}={v!r}": (network, {**IN_BACKWARD, name: v}, VALUE, words) for name, (v, words) in OPTIONS.items()},
    "a gradient that would come after its update": (late, IN_BACKWARD, NotEquivalentError, LATE),
    "no room for the optimizer's state": (network, ROOM, torch.OutOfMemoryError, "needs .* are free. Nothing has been"),
    "a loss that is not finite": (network, INFINITE, VALUE, "The loss of this batch is inf"),
    "a model without a list of blocks": (lambda: nn.Linear(2, 2), AUTO, VALUE, "blocks='auto' looks for"),
    "a model that is compiled whole": (lambda: COMPILED(network()), AUTO, VALUE, "Compile each block instead"),
    "a weight of a layer outside": (SHARING, ON_CPU, VALUE, "layers.0.norm.weight is a weight of a module outside the"),
    "an LSTM on the CPU": (RECURRENT, ON_CPU, VALUE, "'layers.1' has a LSTM, which keeps references"),
    "a hook on a gradient on the CPU": (HOOKED, ON_CPU, VALUE, r"layers.1.inner.weight has a hook on its gradient"),
    "blocks in a folder": (network, {"on": "/tmp"}, VALUE, "`on` must be 'cpu' or None. Received: on='/tmp'"),
    "a folder that is not there": (network, {"offload": "/no/such/folder"}, VALUE, "a folder that exists"),
    "a number for a folder": (network, {"offload": 3}, TypeError, "Received: offload=3"),
    "BatchNorm over several ranks": (SYNCED, AUTO, VALUE, "doesn't take SyncBatchNorm, which waits for other ranks"),
    "a model on several devices": (lambda: nn.DataParallel(network()), AUTO, VALUE, "doesn't take DataParallel"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_nothing_is_updated_and_refused_by_name_is(name):
    make, options, error, words = REFUSED[name]
    model = make()
    usual = {"micro_batch_size": 2, "optimizer": lambda model: OPTIMIZERS["sgd"](model.parameters())}
    given = {"blocks": "layers", **usual, **options}
    given |= {key: given[key](model) for key in ("optimizer", "blocks") if callable(given[key])}
    with unchanged(model), pytest.raises(error, match=words):
        build(model, **given)(*batches()[0])
    assert not given["optimizer"].state
    assert all(type(layer) is Layer or "do" in vars(layer) for layer in getattr(model, "layers", ()))


def test_blocks_that_are_not_on_the_cpu_cannot_live_there():
    with pytest.raises(ValueError, match=r"expects the blocks on the CPU. Received: layers.0.norm.weight on meta"):
        build(network().to("meta"), blocks="layers", **ON_CPU)


def test_in_backward_a_step_that_was_replaced_later_is_refused():
    model = network()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    step, inner = build(model, optimizer, **IN_BACKWARD), optimizer.step
    optimizer.step = functools.wraps(inner)(lambda closure=None: inner(closure))
    with pytest.raises(ValueError, match="SGD's step was replaced by step, and update='in_backward' calls it several"):
        step(*batches()[0])


@pytest.mark.parametrize("name", NOT_TAKEN)
def test_an_argument_that_only_train_step_has_is_refused_with_what_to_do(name):
    with pytest.raises(TypeError, match=f"BlockStep takes no `{name}`. "):
        build(network(), **{name: True})


def test_train_step_knows_no_blocks():
    model = network()
    with pytest.raises(TypeError, match="unexpected keyword argument 'blocks'"):
        TrainStep(model, OPTIMIZERS["sgd"](model.parameters()), compute_loss=loss_of, blocks="layers")
    with pytest.raises(AttributeError, match="It is gradaccum.torch.BlockStep"):
        getattr(gradaccum.torch, "Blocks")  # noqa: B009  # the name of an earlier version
