"""The backend is that of the process (`KERAS_BACKEND`): each one's tests run in a process of their own."""

import gc
import os

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
BACKEND = os.environ["KERAS_BACKEND"]
if BACKEND == "jax":  # before JAX starts: two devices to train on at once
    # And without fusion emitters, and with a program in one piece for LLVM, not 32: they take most of the time it takes
    # to compile a program, which here runs once.
    # The numbers are the same; without LLVM's optimizations, which saves as much, sums round otherwise.
    flags = (
        "--xla_force_host_platform_device_count=2 --xla_cpu_use_fusion_emitters=false"
        " --xla_cpu_parallel_codegen_split_count=1"
    )
    os.environ["XLA_FLAGS"] = f"{flags} {os.environ.get('XLA_FLAGS', '')}".strip()

import keras  # noqa: E402  # Keras reads the environment when it is imported
import pytest  # noqa: E402

from tests.documents import forked  # noqa: E402
from tests.reference import FLOAT32, FLOAT64  # noqa: E402

if BACKEND == "jax":
    import jax

    jax.config.update("jax_disable_most_optimizations", True)  # see `leave_keras_as_found`
# What its first optimizer imports, and Keras to save a model.
PROGRAMS = forked("gradaccum.keras" + " torch._dynamo tensorflow" * (BACKEND == "torch"))
if BACKEND == "tensorflow":
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)


@pytest.fixture(scope="session")
def fresh_process():
    """Runs a page or a script in a process that has imported Keras and done nothing else: see `forked`."""
    return PROGRAMS


@pytest.fixture(autouse=True)
def leave_keras_as_found(request):
    if BACKEND == "jax":
        # A program that runs once takes longest to compile. But where rows are summed in a loop, what XLA does without
        # its simplifications goes through float32: for those tests in float64 it is left as it is.
        exact = (
            any(name in request.path.name for name in ("micro_batched", "chunked", "fuzz"))
            and "float64" in request.fixturenames
        )
        jax.config.update("jax_disable_most_optimizations", not exact)
    if BACKEND == "tensorflow":
        # Grappler takes a quarter of a test's time, for graphs that run a few times. The slow tests run with it.
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": "slow" not in request.keywords})
    keras.utils.set_random_seed(0)
    yield
    keras.backend.set_floatx("float32")
    keras.config.set_dtype_policy("float32")
    keras.backend.clear_session()
    gc.freeze()  # `clear_session` collects garbage: this time, and not what it has looked at after earlier tests


@pytest.fixture
def float64():
    """Double precision by default. Yields the error that is then allowed for whole models (see `fit_bound`)."""
    keras.backend.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    if BACKEND == "jax":
        jax.config.update("jax_enable_x64", True)
    yield FLOAT32 if BACKEND == "torch" else FLOAT64
    if BACKEND == "jax":
        jax.config.update("jax_enable_x64", False)


@pytest.fixture
def bound(float64):
    """The relative error that is allowed, in double precision."""
    return 1e-12


@pytest.fixture
def exact(float64, monkeypatch):
    """Lets Keras compute in float64 on JAX and PyTorch, too. Yields the error that is then allowed."""
    from keras.src.backend.common import dtypes

    monkeypatch.setitem(dtypes.BIT64_TO_BIT32_DTYPE, "float64", "float64")
    return 1e-12


@pytest.fixture
def fit_bound(request):
    """The same for whole models. On JAX and PyTorch, where `keras.backend.result_type` makes float32 of float64,
    `ops.mean` and with it many of Keras' losses compute in single precision whatever is set.
    """
    if BACKEND != "tensorflow":
        return 1e-6
    request.getfixturevalue("float64")
    return 1e-12
