"""The wheel carries the kernels and the data files, and works without the checkout."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (path,) = out.glob("*.whl")
    return path


def test_contents(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = {f"fa4_a2a/{p.name}" for p in (ROOT / "cute/fa4_a2a").glob("*.py")}
    sources |= {f"fa_a2a/csrc/fa3_a2a/{p.name}" for p in (ROOT / "csrc/fa3_a2a").iterdir()}
    sources |= {str(p.relative_to(ROOT)) for suffix in ("py", "json") for p in (ROOT / "fa_a2a").rglob(f"*.{suffix}")}
    assert sources <= names
    assert {"fa_a2a/py.typed", "fa_a2a/csrc/fa3_a2a/README.md", "fa_a2a/xstage/profiles/h200x4.json"} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not any(name.startswith(("tests/", "benchmarks/", ".ci/")) for name in names)


def test_works_without_the_checkout(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); import fa_a2a, fa4_a2a.cache, fa_a2a.xstage as x; "
        "assert fa_a2a.__file__.startswith(sys.argv[1]) and fa4_a2a.__file__.startswith(sys.argv[1]); "
        "x.load_profile('paper'); fa_a2a.UlyssesAttention()"
    )
    site = str(tmp_path / "site")
    subprocess.run([sys.executable, "-I", "-c", program, site], cwd=tmp_path, check=True, capture_output=True)
