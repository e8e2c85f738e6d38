"""What is imported with what: no framework before it is needed, and next to nothing before anything is used."""

import pathlib
import re
import subprocess
import sys
import textwrap

import pytest

import gradaccum
from tests.documents import with_pytorch

FRAMEWORKS = {"torch", "keras", "tensorflow", "jax", "jaxlib", "numpy"}
TRAINERS = {"transformers", "lightning", "accelerate", "sentence_transformers"}
COMMAND_LINE = {"click", "rich", "matplotlib", "jinja2", "pooch", "sklearn", "psutil"}
BARE = {"gradaccum", "gradaccum.errors", "gradaccum.lazy"}
"""All that `import gradaccum` may load: what takes time are modules, of the standard library's as well."""
BARE_TORCH = BARE | {"gradaccum.extras", "gradaccum.torch", "gradaccum.torch.chunked"}
"""What `import gradaccum.torch` may load of ours."""


def modules_of(statement, before=""):
    """The modules that a fresh interpreter loads for this statement."""
    program = f"""
        import sys
        {before}
        known = set(sys.modules)
        {statement}
        print(*set(sys.modules) - known)
    """
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(program)]
    return set(subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.split())


def loaded_by(statement, before=""):
    """Their top-level names."""
    return {module.partition(".")[0] for module in modules_of(statement, before)}


CENTRE = [
    "import gradaccum",
    "import gradaccum.report",
    "import gradaccum.integrations",
    "import gradaccum.schedule, gradaccum.core.sizes, gradaccum.core.window",
    "from gradaccum import Schedule, steps_for, WindowError, NotEquivalentError",
    "import gradaccum.cli",
]


@pytest.mark.parametrize("statement", CENTRE)
def test_the_centre_loads_no_framework_and_no_library_of_the_command_line_and_that_no_framework(statement):
    names = loaded_by(statement)
    assert "gradaccum" in names
    assert names & (FRAMEWORKS | TRAINERS) == set()
    assert (names & COMMAND_LINE == set()) is ("cli" not in statement)


def test_the_sides_of_pytorch_and_jax_load_no_other_framework(tmp_path):
    (tmp_path / "loaded.py").write_text("import sys\nprint(*sys.modules)\n")
    modules = with_pytorch()(tmp_path / "loaded.py", tmp_path).stdout.split()
    assert "gradaccum.torch" in modules
    assert not {module.partition(".")[0] for module in modules} & {"keras", "tensorflow", "jax"}
    names = loaded_by("import gradaccum.jax", before="import jax")
    assert "gradaccum" in names
    assert not names & {"torch", "keras", "tensorflow"}


@pytest.mark.parametrize(
    "module",
    [
        "gradaccum.torch", "gradaccum.torch.optim", "gradaccum.keras", "gradaccum.keras.optimizers", "gradaccum.jax",
        "runai.ga.torch", "runai.ga.keras.optimizers", "gradaccum.integrations.transformers",
        "gradaccum.integrations.lightning", "gradaccum.integrations.accelerate",
        "gradaccum.integrations.sentence_transformers",
    ],
)  # fmt: skip
def test_without_its_framework_a_shell_says_how_to_install_it(module):
    framework = next(name for name in ("torch", "keras", "jax", *sorted(TRAINERS)) if name in module.split("."))
    runai = pathlib.Path(__file__).parents[1] / "compat" / "runai" / "src"
    program = f"import sys; sys.path.append({str(runai)!r}); sys.modules[{framework!r}] = None\nimport {module}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stderr.splitlines()[-1] == (
        f"ModuleNotFoundError: This needs {framework}, which is not installed. Install it with: "
        f'pip install "gradaccum[{framework}]", or in a checkout: pip install ".[{framework}]"'
    )


TORCH = "sys.modules['torch'] = type(sys)('torch')"
"""In the place of torch a module with nothing in it: what is of torch is not looked at, either."""


def test_import_gradaccum_loads_nothing_that_it_does_not_need():
    assert modules_of("import gradaccum") <= BARE
    for slow in ("import gradaccum.core.noise", "import dataclasses", "gradaccum.steps_for"):
        assert modules_of(f"import gradaccum; {slow}") - BARE, "it would be seen"
    assert loaded_by("import gradaccum, numpy") & FRAMEWORKS == {"numpy"}, "a framework would be seen"


def test_import_gradaccum_torch_loads_no_way_in_before_it_is_used():
    for more, seen in (("", set()), ("; import gradaccum.core.sizes", {"gradaccum.core", "gradaccum.core.sizes"})):
        loaded = modules_of(f"import gradaccum.torch{more}", before=TORCH)
        ours = {module for module in loaded if module.startswith("gradaccum")} - BARE_TORCH
        assert seen <= ours
        assert seen or not ours


PLAIN_STEP = """
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
step = gradaccum.torch.TrainStep(model, optimizer, loss_fn=torch.nn.CrossEntropyLoss(), micro_batch_size=2)
step(torch.randn(4, 3), torch.tensor([0, 1, 1, 0]))
"""
OF_FEATURES = (
    "core.noise", "core.sizes.search", "on_torch.noise", "torch.chunking", "torch.compiled", "torch.distributed",
    "torch.layers", "torch.loss.counting", "torch.measure", "torch.optimizer", "torch.padding.judged",
    "torch.reproducible", "torch.train_step.exact", "torch.train_step.global_batch", "torch.train_step.scaled",
    "torch.train_step.sharded", "torch.watch", "torch.window",
)  # fmt: skip


def test_a_plain_train_step_loads_no_module_of_a_feature_that_it_does_not_have():
    def loaded(program):
        ours = modules_of(f"exec({program!r})", before="import torch")
        return {name for name in OF_FEATURES if f"gradaccum.{name}" in ours}

    plain = f"import gradaccum.torch, torch\n{PLAIN_STEP}"
    assert not loaded(plain)
    assert "on_torch.noise" in loaded(plain.replace("micro_batch_size=2", "micro_batch_size=2, noise_scale=True"))


# What the prompt shows: public names only, and where a name that isn't here can be found.


SHOWN = {
    "gradaccum": {"Schedule", "steps_for", *gradaccum.__all__} - {"__version__"},
    "gradaccum.torch": {"optim", "TrainStep", "chunked"}, "gradaccum.torch.optim": {"Adam"},
}  # fmt: skip


@pytest.mark.parametrize(("module", "names"), SHOWN.items())
def test_dir_shows_public_names_only_and_all_of_them_are_there(module, names):
    imported = pytest.importorskip(module)
    shown = {name for name in dir(imported) if not name.startswith("_")}
    assert names <= shown
    assert not {"TYPE_CHECKING", "require", "when_used", "lazy", "core", "extras"} & shown
    assert not {"Any", "inspect", "guard", "distributed"} & shown
    assert module == "gradaccum" or "torch" not in shown
    assert all(getattr(imported, name) is not None for name in names)
    with pytest.raises(AttributeError, match="'nothing'"):
        imported.nothing  # noqa: B018  # what asking for it does


ELSEWHERE = {
    "TrainStep": "It is gradaccum.torch.TrainStep.", "micro_batched": "It is gradaccum.keras.micro_batched.",
    "integrations": "Import it first: import gradaccum.integrations",
}  # fmt: skip


def test_a_name_of_a_shell_is_pointed_to_and_a_misspelt_one_is_one_that_python_can_suggest(monkeypatch):
    for name, where in ELSEWHERE.items():
        monkeypatch.delattr(gradaccum, name, raising=False)
        with pytest.raises(AttributeError, match=re.escape(f"module 'gradaccum' has no attribute '{name}'. {where}")):
            getattr(gradaccum, name)
    optim = pytest.importorskip("gradaccum.torch.optim")
    with pytest.raises(AttributeError) as raised:
        optim.Adamw  # noqa: B018  # asking for it is the test
    assert (raised.value.name, raised.value.obj) == ("Adamw", optim)
    assert "AdamW" in dir(optim)


def test_the_class_stays_where_a_module_has_its_name(tmp_path):
    program = """
        import gradaccum.torch, pickle, sys
        kind = pickle.loads(b"cgradaccum.torch.chunked\\nChunked\\n.")  # as an old pickle names it
        assert callable(gradaccum.torch.chunked), gradaccum.torch.chunked
        assert kind is sys.modules["gradaccum.torch.chunked"].Chunked
        assert {*gradaccum.torch.__all__} <= {*dir(gradaccum.torch)}
    """
    (tmp_path / "pickled.py").write_text(textwrap.dedent(program), encoding="utf-8")
    done = with_pytorch()(tmp_path / "pickled.py", tmp_path)
    assert done.ok, done.stderr
