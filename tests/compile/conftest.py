"""The compile tier: kernels compiled for real, on a machine that needs no GPU. Skipped without the CuTe DSL."""

import importlib.util
import os

import pytest


@pytest.fixture(autouse=True)
def _toolchain(need):
    missing = [m for m in ("cutlass", "flash_attn", "tvm_ffi") if importlib.util.find_spec(m) is None]
    need("compile", not missing, f"not installed: {', '.join(missing)}")


@pytest.fixture(scope="session", autouse=True)
def cache_folder(tmp_path_factory):
    """All tests of a session share one cache, so each kernel is compiled once."""
    folder = tmp_path_factory.mktemp("kernels")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FA_A2A_CACHE_DIR", str(folder))
        yield folder


@pytest.fixture(scope="session")
def no_gpu():
    return not os.path.exists("/dev/nvidia0")


@pytest.fixture
def sass(need):
    """sass(name, **key): the instructions of the cached kernel of that name and key, as text."""
    import cubin

    need("compile", cubin.disassembler() is not None, "no nvdisasm (CUDA toolkit, or the triton package)")

    def read(name: str, **key) -> list[str]:
        from fa4_a2a.cache import cached_kernels

        found = [k for k in cached_kernels() if k.name == name and k.intact and key.items() <= k.key.items()]
        assert len(found) == 1, f"{len(found)} kernels {name} {key}"
        return cubin.instructions(found[0].path)

    return read
