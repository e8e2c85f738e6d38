"""Four devices, double precision, and programs that compile fast."""

import os

# Before JAX starts. Without fusion emitters, without LLVM's optimizations, and with a program in one piece for LLVM,
# not 32: they take most of the time it takes to compile a program, which here runs once. Sums round otherwise, within
# 1e-15.
flags = (
    "--xla_force_host_platform_device_count=4 --xla_cpu_use_fusion_emitters=false --xla_backend_optimization_level=0"
    " --xla_cpu_parallel_codegen_split_count=1"
)
os.environ["XLA_FLAGS"] = f"{flags} {os.environ.get('XLA_FLAGS', '')}".strip()

import jax  # noqa: E402
import pytest  # noqa: E402

from tests.documents import forked  # noqa: E402

PROGRAMS = forked("gradaccum.jax optax flax.nnx equinox")
jax.config.update("jax_enable_x64", True)


@pytest.fixture(scope="session")
def fresh_process():
    """Runs a page or a script in a process that has imported JAX and done nothing else: see `forked`."""
    return PROGRAMS
