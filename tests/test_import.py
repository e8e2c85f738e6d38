"""What is imported with what: no framework before it is needed, and next to nothing before anything is used."""

import pathlib
import subprocess
import sys
import textwrap

import pytest

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


@pytest.mark.parametrize(
    "statement",
    [
        "import gradaccum",
        "import gradaccum.report",
        "import gradaccum.integrations",
        "import gradaccum.schedule, gradaccum.core.sizes, gradaccum.core.window",
        "from gradaccum import Schedule, steps_for, WindowError, NotEquivalentError",
    ],
)
def test_the_centre_loads_no_framework_and_no_library_of_the_command_line(statement):
    names = loaded_by(statement)
    assert "gradaccum" in names
    assert not names & (FRAMEWORKS | COMMAND_LINE | TRAINERS)


def test_the_command_line_loads_no_framework_before_a_command_runs():
    names = loaded_by("import gradaccum.cli")
    assert "click" in names
    assert not names & FRAMEWORKS


def test_the_pytorch_side_loads_no_keras(tmp_path):
    (tmp_path / "loaded.py").write_text("import sys\nprint(*sys.modules)\n")
    modules = with_pytorch()(tmp_path / "loaded.py", tmp_path).stdout.split()
    names = {module.partition(".")[0] for module in modules}
    assert "gradaccum.torch" in modules
    assert not names & {"keras", "tensorflow", "jax"}


def test_the_jax_side_loads_no_other_framework():
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


def test_import_gradaccum_loads_nothing_that_it_does_not_need():
    assert modules_of("import gradaccum") <= BARE


def test_import_gradaccum_torch_loads_no_way_in_before_it_is_used():
    # In the place of torch a module with nothing in it: what is of torch is not looked at, either.
    loaded = modules_of("import gradaccum.torch", before="sys.modules['torch'] = type(sys)('torch')")
    assert {module for module in loaded if module.startswith("gradaccum")} <= BARE_TORCH


def test_a_framework_would_be_seen():
    names = loaded_by("import gradaccum, numpy")
    assert names & FRAMEWORKS == {"numpy"}


@pytest.mark.parametrize("slow", ["import gradaccum.core.noise", "import dataclasses", "gradaccum.steps_for"])
def test_an_import_that_takes_time_would_be_seen(slow):
    assert modules_of(f"import gradaccum; {slow}") - BARE


def test_a_way_in_that_is_loaded_too_soon_would_be_seen():
    framework = "sys.modules['torch'] = type(sys)('torch')"
    loaded = modules_of("import gradaccum.torch; import gradaccum.core.sizes", before=framework)
    assert {module for module in loaded if module.startswith("gradaccum")} - BARE_TORCH


def test_all_names_of_the_package_are_there():
    import gradaccum

    for name in gradaccum.__all__:
        assert getattr(gradaccum, name) is not None
        assert name in dir(gradaccum)
    with pytest.raises(AttributeError, match="module 'gradaccum' has no attribute 'nothing'"):
        gradaccum.nothing  # noqa: B018  # what asking for it does


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
