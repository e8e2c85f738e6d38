"""Second passes leave nothing behind; what can't go layer by layer is an error before anything is updated."""

import random
import resource
import shutil
import signal

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from gradaccum.errors import NotEquivalentError
from tests.reference import FLOAT64, relative_error
from tests.torch.layers.problems import (
    Layer,
    Network,
    as_it_is,
    assert_same_updates,
    batches,
    build,
    doing,
    loss_of,
    network,
    unchanged,
)
from tests.torch.problems import Does


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # read by torch.compile
@pytest.mark.parametrize("between", [as_it_is, lambda _, x: torch.tanh(x)])
def test_compiled_blocks_make_the_large_batchs_update(between):
    model = network(between=lambda x: between(None, x))
    torch.compiler.reset()
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    assert_same_updates(model, batches(count=2), size=3)


def counts(layer, x):
    layer.calls = getattr(layer, "calls", 0) + 1
    return x


def test_second_passes_move_no_attributes():
    model = doing(counts)
    model.forward = lambda ids: Network.forward(model, counts(model, ids))  # as wrappers of models do
    build(model)(*batches()[0])
    assert [module.calls for module in (model, *model.layers)] == [-(-len(batches()[0][0]) // 3)] * 4


def test_gradients_that_would_come_after_their_update_are_refused_before_it():
    model = doing(lambda layer, x: x + 0.1 * layer.other[0].norm.weight, places=[0])
    model.layers[0].other = [model.layers[2]]  # which is not among its modules
    late = r"updated before their gradient is complete: 'layers.2.norm.weight'"
    with unchanged(model), pytest.raises(NotEquivalentError, match=late):
        build(model, blocks="layers", update="in_backward")(*batches()[0])
    assert_same_updates(model, batches(), size=3, blocks="layers")


def test_a_folder_without_room_is_an_error_that_names_it_and_nothing_is_updated(tmp_path):
    model = network()
    step = build(model, blocks="layers", update="in_backward", offload=tmp_path, verify=False)
    limits, ignored = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8, limits[1]))
        full = rf"could not be written to the folder of\s+offload='{tmp_path}'"
        with unchanged(model), pytest.raises(OSError, match=full):
            step(*batches()[0])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    shutil.rmtree(tmp_path)
    with unchanged(model), pytest.raises(OSError, match="it is gone"):
        step(*batches()[0])
    tmp_path.mkdir()
    torch.manual_seed(0)
    assert step(*batches()[0]).isfinite()


def drawn():
    return random.random() + np.random.rand()  # noqa: NPY002  # the global one, which is replayed


@pytest.mark.parametrize("begins", [0, 2])
def test_what_blocks_draw_from_python_and_numpy_is_replayed_also_where_they_begin_with_it_later(begins):
    updated = []
    for blocks in (None, "layers"):
        model = doing(lambda layer, x: x * drawn() if len(losses) >= begins else x)  # noqa: B023  # as of now
        torch.manual_seed(0)
        for p in model.layers.parameters():
            nn.init.normal_(p, std=0.3)
        step, losses = build(model, blocks=blocks, verify=False), []
        random.seed(3)
        np.random.seed(4)  # noqa: NPY002  # as above
        for batch in batches():
            losses.append(step(*batch))
        updated.append([*model.parameters(), *losses, torch.tensor(drawn(), dtype=torch.float64)])
    assert relative_error(*updated) <= FLOAT64


def in_twos(model, blocks, **options):
    return build(model, blocks=blocks, micro_batch_size=2, **options)


A_LIST = "`blocks` must be an nn.ModuleList, its dotted path, a list of modules, or 'auto'. Received: 7"
NONE = {  # what is given of a network
    "a number": (lambda model: 7, TypeError, A_LIST),
    "a list with a number": (lambda model: [model.norm, 3], TypeError, "Received: blocks[1] of type int"),
    "an empty list": (lambda model: [], ValueError, "at least one module"),
    "a module of its own": (
        lambda model: [model.norm, Layer(6)], ValueError, "blocks[1], of type Layer, is not a module of the model",
    ),
    "a wrong path": (
        lambda model: "encoder.layers", ValueError,
        "Received: blocks='encoder.layers'. Lists of modules are at 'layers'.",
    ),
    "one twice": (lambda model: [model.norm, model.norm], ValueError, "The block 'norm' is in `blocks` twice"),
    "one in another": (
        lambda model: [model.layers[0], model.layers[0].inner], ValueError,
        "The blocks 'layers.0' and 'layers.0.inner' have",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NONE)
def test_blocks_that_are_none(name):
    (blocks, error, words), model = NONE[name], network()
    with pytest.raises(error) as raised:
        in_twos(model, blocks(model))
    assert words in str(raised.value)


def test_models_without_a_list_of_blocks_and_those_that_are_compiled_whole():
    with pytest.raises(ValueError, match="blocks='auto' looks for"):
        in_twos(nn.Linear(2, 2), "auto")
    with pytest.raises(ValueError, match="Compile each block instead"):
        in_twos(torch.compile(network(), backend="eager"), "auto")


def short(model):
    """Leaves out a block in a later micro-batch alone."""
    model.how["call"] = lambda layer, x, shared: (
        (x, shared) if layer is model.layers[1] and len(x) == 1 else layer(x, shared)
    )


def reentrant(model):
    model.how["call"] = lambda *args: torch.utils.checkpoint.checkpoint(*args, use_reentrant=True)


def editing(place):
    return lambda model: model.layers[place].register_forward_pre_hook(lambda _, args: [args[0].mul_(2)] and None)


WRONG = {  # the order of its blocks, what is done to the model; what is said of it
    "one is left out": ([0, 1], None, "The block 'layers.2' was not called."),
    "one is called twice": ([0, 1, 1, 2], None, "The block 'layers.1' was called twice."),
    "another order": ([0, 2, 1], None, "The block 'layers.1' was not called before 'layers.2'."),
    "one is left out later": (None, short, "The block 'layers.1' was not called before 'layers.2'."),
    "a reentrant checkpoint": (None, reentrant, "The block 'layers.[12]' was called in a backward pass."),
    "an input edited": (None, editing(1), r"The block 'layers.1' edits an input of shape \(2, 5, 6\) in place"),
    "the last one's input edited": (
        None,
        editing(2),
        r"The block 'layers.2' edits an input( of shape \(2, 5, 6\))? in place",
    ),
}
WAYS = [{}, {"update": "in_backward"}, {"update": "in_backward", "on": "cpu"}]


@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.parametrize("name", WRONG)
def test_blocks_that_are_not_called_once_each_in_order_or_edit_are_refused_before_the_update(name, options):
    order, change, words = WRONG[name]
    model = network(order=order)
    if change is not None:
        change(model)
    step = in_twos(model, model.layers, verify=False, **options)
    with unchanged(model), pytest.raises(ValueError, match=words):
        step(*batches()[0])
    assert type(model.layers[0]) is Layer
    assert step.updates == 0


def remembers(layer, x):
    """Keeps a mean from one call to the next."""
    layer.mean = 0.5 * getattr(layer, "mean", 0.0) + 0.5 * x.detach().square().mean()
    return x * (1 + layer.mean)


def leaves_a_loss(layer, x):
    """Where the model's loss finds it."""
    layer.penalty = x.square().mean()


def penalised(model, *batch):
    return loss_of(model, *batch) + model.layers[1].penalty


@pytest.mark.parametrize("options", [{}, {"update": "in_backward", "on": "cpu"}], ids=str)
@pytest.mark.parametrize(
    ("do", "kept", "loss", "name"),
    [(remembers, as_it_is, loss_of, "mean"), (as_it_is, leaves_a_loss, penalised, "penalty")],
)
def test_what_a_block_keeps_across_rows_or_leaves_to_the_loss_in_an_attribute_is_named(do, kept, loss, name, options):
    model = doing(do, kept, places=[1])
    with unchanged(model), pytest.raises(NotEquivalentError, match=rf"the block 'layers\.1' \({name}\)"):
        in_twos(model, model.layers, compute_loss=loss, **options)(*batches()[0])


@pytest.mark.parametrize(("options", "place"), [({}, 1), ({"update": "in_backward", "on": "cpu"}, 2)])
def test_a_block_that_reads_what_the_model_leaves_in_an_attribute_is_named(options, place):
    def run(model, x):
        for layer in model.layers:
            layer.condition = x[:, :1].cos()
        for layer in model.layers:
            x = layer(x)
        return x

    def block(layer, x):
        return x + torch.tanh(layer.linear(x)) * layer.condition

    layers = nn.ModuleList(Does(block, linear=nn.Linear(6, 6), condition=None) for _ in range(3))
    model, x = Does(run, layers=layers).double(), torch.randn(16, 6, dtype=torch.float64)
    step = in_twos(model, layers, compute_loss=None, loss_fn=nn.MSELoss(), **options)
    again = rf"the block 'layers\.{place}' failed there.*If it reads what the model"
    with unchanged(model), pytest.raises(NotEquivalentError, match=again):
        step(x, x)
