"""What the prompt shows: public names only, and where a name that isn't here can be found."""

import re

import pytest

import gradaccum


def test_dir_shows_public_names_only():
    shown = [name for name in dir(gradaccum) if not name.startswith("_")]
    assert {"Schedule", "steps_for"} <= set(shown)
    assert not {"TYPE_CHECKING", "when_used", "lazy", "core", "extras"} & set(shown)


@pytest.mark.parametrize("module", ["gradaccum.torch", "gradaccum.torch.optim"])
def test_dir_of_the_pytorch_shell_shows_public_names_only(module):
    found = pytest.importorskip(module)
    shown = {name for name in dir(found) if not name.startswith("_")}
    assert {"optim", "TrainStep", "chunked"} <= shown or {"Adam", "Optimizer"} <= shown
    assert not {"TYPE_CHECKING", "require", "when_used", "Any", "torch", "inspect", "guard", "distributed"} & shown


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("TrainStep", "It is gradaccum.torch.TrainStep."),
        ("micro_batched", "It is gradaccum.keras.micro_batched."),
        ("integrations", "Import it first: import gradaccum.integrations"),
    ],
)
def test_a_name_of_a_shell_is_pointed_to(name, where, monkeypatch):
    monkeypatch.delattr(gradaccum, name, raising=False)
    with pytest.raises(AttributeError, match=re.escape(f"module 'gradaccum' has no attribute '{name}'. {where}")):
        getattr(gradaccum, name)


def test_a_misspelt_name_is_one_that_python_can_suggest():
    optim = pytest.importorskip("gradaccum.torch.optim")
    with pytest.raises(AttributeError) as raised:
        optim.Adamw  # noqa: B018  # asking for it is the test
    assert (raised.value.name, raised.value.obj) == ("Adamw", optim)
    assert "AdamW" in dir(optim)
