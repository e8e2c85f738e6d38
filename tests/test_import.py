"""`import gradaccum` loads no framework, and takes next to no time."""

import json
import pathlib
import subprocess
import sys
import textwrap

import pytest

from tests.documents import with_pytorch

FRAMEWORKS = {"torch", "keras", "tensorflow", "jax", "jaxlib", "numpy"}
TRAINERS = {"transformers", "lightning", "accelerate", "sentence_transformers"}
COMMAND_LINE = {"click", "rich", "matplotlib", "jinja2", "pooch", "sklearn", "psutil"}
MILLISECONDS = 50.0


def loaded_by(statement, before=""):
    """What a fresh interpreter loads for this statement, top-level names, and the milliseconds of processor time."""
    program = f"""
        import sys, time, json
        {before}
        known = set(sys.modules)
        start = time.process_time()
        {statement}
        milliseconds = 1000 * (time.process_time() - start)
        loaded = sorted({{name.partition(".")[0] for name in set(sys.modules) - known}})
        print(json.dumps([loaded, milliseconds]))
    """
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(program)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    names, milliseconds = json.loads(done.stdout)
    return set(names), milliseconds


@pytest.mark.parametrize(
    "statement",
    [
        "import gradaccum",
        "import gradaccum.report",
        "import gradaccum.integrations",
        "import gradaccum.schedule, gradaccum.sizes, gradaccum.window",
        "from gradaccum import Schedule, steps_for, WindowError, NotEquivalentError",
    ],
)
def test_the_centre_loads_no_framework_and_no_library_of_the_command_line(statement):
    names, _ = loaded_by(statement)
    assert "gradaccum" in names
    assert not names & (FRAMEWORKS | COMMAND_LINE | TRAINERS)


def test_the_command_line_loads_no_framework_before_a_command_runs():
    names, _ = loaded_by("import gradaccum.cli")
    assert "click" in names
    assert not names & FRAMEWORKS


def test_the_pytorch_side_loads_no_keras(tmp_path):
    (tmp_path / "loaded.py").write_text("import sys\nprint(*sys.modules)\n")
    modules = with_pytorch()(tmp_path / "loaded.py", tmp_path).stdout.split()
    names = {module.partition(".")[0] for module in modules}
    assert "gradaccum.torch" in modules
    assert not names & {"keras", "tensorflow", "jax"}


def test_the_jax_side_loads_no_other_framework():
    names, _ = loaded_by("import gradaccum.jax", before="import jax")
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
        f'pip install "gradaccum[{framework}]"'
    )


def test_import_gradaccum_takes_well_under_50_milliseconds():
    # Processor time, and the best of three: a busy machine is not the package's fault.
    assert min(loaded_by("import gradaccum")[1] for _ in range(3)) < MILLISECONDS


def test_a_framework_would_be_seen():
    names, _ = loaded_by("import gradaccum, numpy")
    assert names & FRAMEWORKS == {"numpy"}


def test_a_slow_import_would_be_seen():
    busy = "import gradaccum; end = time.process_time() + 0.06\nwhile time.process_time() < end: pass"
    _, milliseconds = loaded_by(textwrap.indent(busy, " " * 8).lstrip())
    assert milliseconds > MILLISECONDS


def test_all_names_of_the_package_are_there():
    import gradaccum

    for name in gradaccum.__all__:
        assert getattr(gradaccum, name) is not None
