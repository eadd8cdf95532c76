"""The README's examples run as they stand."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from workers import forget, shard

from fa_a2a import UlyssesAttention

ROOT = Path(__file__).parents[2]


def block(word):
    """The one block of Python in the README with this in it."""
    (code,) = [x for x in re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL) if word in x]
    return code


def test_example(tmp_path):
    checked = block("init_process_group") + (
        "assert out.shape == q.shape and attention.last_plan.exchange == 'fused' and not dist.is_initialized()\n"
    )
    script = tmp_path / "layer.py"
    script.write_text(checked.replace("1024, 24, 128", "64, 4, 16"))
    path = os.pathsep.join([str(ROOT), str(ROOT / "cute"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environ = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environ)
    assert done.returncode == 0, done.stderr


class Sdpa(torch.nn.Module):
    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


def model_by_hand(rank, size, code):
    names = {}
    exec(code, names)

    class SelfAttention(torch.nn.Module):
        forward = names["forward"]

        def __init__(self, channels, heads):
            super().__init__()
            self.heads, self.qkv = heads, torch.nn.Linear(channels, 3 * channels)
            self.attention, self.out = UlyssesAttention(), torch.nn.Linear(channels, channels)

    torch.manual_seed(0)
    model, x = SelfAttention(64, 4), torch.randn(2, 16, 64)
    with torch.no_grad():
        got = model(shard(x, rank, size)).clone()
        model.attention = Sdpa()
        want = shard(model(x), rank, size)
    forget(rank, size)
    return (got - want).abs().max().item()


def test_model_written_by_hand(ranks):
    assert max(ranks(2).run(model_by_hand, code=block("def forward"))) < 1e-5


def diffusers_model(rank, size, code):
    from diffusion_models import build, clean, forward, twin

    from fa_a2a.integrations.diffusers import plans

    single, inputs = build("flux")
    model = twin(single)
    with plans._processes_count_as_devices():
        exec(code, {"model": model, "dist": dist})
    difference = (forward(model, inputs) - forward(single, inputs)).abs().max().item()
    clean(model)
    return difference


def test_diffusers_model(ranks):
    pytest.importorskip("diffusers")
    assert max(ranks(2).run(diffusers_model, code=block("fa.enable"))) < 1e-5
