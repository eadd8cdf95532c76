"""Environment variables and the kinds of errors."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import fa_a2a
from fa_a2a import config, errors
from fa_a2a.errors import ConfigurationError

PACKAGE = Path(fa_a2a.__file__).parent


def test_default_where_unset_or_empty(monkeypatch):
    monkeypatch.delenv("FA_A2A_TIMEOUT_S", raising=False)
    assert config.read_number("FA_A2A_TIMEOUT_S") == 30
    monkeypatch.setenv("FA_A2A_TIMEOUT_S", "")
    assert config.read_number("FA_A2A_TIMEOUT_S") == 30
    monkeypatch.setenv("FA_A2A_TIMEOUT_S", "2.5")
    assert config.read_number("FA_A2A_TIMEOUT_S") == 2.5


@pytest.mark.parametrize("text", ["0", "-1", "soon", "nan", "inf", "1e400", "2e9"])
def test_number_must_be_positive_and_finite(monkeypatch, text):
    monkeypatch.setenv("FA_A2A_TIMEOUT_S", text)
    rule = "FA_A2A_TIMEOUT_S must be a positive number, at most 1e\\+09"
    with pytest.raises(ConfigurationError, match=f"{rule}, got '{text}'; unset"):
        config.read_number("FA_A2A_TIMEOUT_S")


def test_unknown_variable_is_a_programming_error():
    with pytest.raises(KeyError):
        config.read("FA_A2A_UNHEARD_OF")


@pytest.mark.parametrize(("text", "on"), [("", False), ("0", False), ("false", False), ("no", False), ("1", True)])
def test_debug_switch(monkeypatch, text, on):
    monkeypatch.setenv("FA_A2A_DEBUG", text)
    assert config.debug() is on


def test_set_default_respects_the_user(monkeypatch):
    monkeypatch.setenv("FA_A2A_TEST_ONLY", "theirs")
    config.set_default("FA_A2A_TEST_ONLY", "ours")
    assert config.os.environ["FA_A2A_TEST_ONLY"] == "theirs"


def test_every_variable_in_the_sources_is_declared_and_read_in_one_place():
    declared = {v.name for v in config.VARIABLES}
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        assert set(re.findall(r"\bFA_A2A_[A-Z_]+\b", text)) <= declared, path
        if path.name != "config.py" and "bench" not in path.parts:  # the bench reads torchrun's own variables
            assert not re.search(r"os\.(environ|getenv)", text), f"{path} reads the environment"


def test_every_error_is_a_fa_a2a_error_and_a_builtin_kind():
    for name in errors.__all__:
        kind = getattr(errors, name)
        assert issubclass(kind, errors.FaA2AError)
        assert kind.__doc__
    assert issubclass(errors.ShapeError, ValueError)
    assert issubclass(errors.UnsupportedError, NotImplementedError)
    assert issubclass(errors.PeerTimeoutError, TimeoutError)
    assert issubclass(errors.PeerMismatchError, errors.PeerError)


def test_public_names_resolve_and_are_all_listed():
    assert dir(fa_a2a) == sorted(fa_a2a.__all__)
    for name in fa_a2a.__all__:
        assert getattr(fa_a2a, name) is not None
    assert set(fa_a2a._HOME) | {"__version__", "errors"} == set(fa_a2a.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        fa_a2a.nothing  # noqa: B018


HEAVY = "cutlass flash_attn nvshmem tvm_ffi cuda diffusers transformers matplotlib numpy.f2py triton quack fa4_a2a"


@pytest.mark.parametrize("use", ["", "fa_a2a.UlyssesAttention()", "import fa_a2a.xstage"])
def test_import_brings_no_optional_package(use):
    """Whatever torch loads for its own decorators is not ours to answer for."""
    program = (
        f"import sys, torch._dynamo, torch.distributed; before = set(sys.modules); import fa_a2a; {use}\n"
        f"heavy = {HEAVY.split()!r}\n"
        "print(sorted(m for m in set(sys.modules) - before if any(m == h or m.startswith(h + '.') for h in heavy)))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert result.stdout.strip() == "[]", result.stdout + result.stderr


@pytest.mark.parametrize("module", ["fa_a2a", "fa_a2a.xstage"])
def test_import_needs_no_torch(module):
    program = f"import sys, {module}; print([m for m in ('torch', 'einops', 'numpy') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert result.stdout.strip() == "[]", result.stdout + result.stderr


@pytest.mark.parametrize("off", ["0", "false", "False", "NO", ""])
def test_a_switch_is_off_however_that_is_spelled(monkeypatch, off):
    for name, switch in (("FA_A2A_DEBUG", config.debug), ("FA_A2A_SHARE_GPU", config.share_gpu)):
        monkeypatch.setenv(name, off)
        assert not switch() and config.problem(name) is None
        monkeypatch.setenv(name, "True")
        assert switch() and config.problem(name) is None
