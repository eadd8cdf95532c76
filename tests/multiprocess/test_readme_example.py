"""The README's example runs as it stands."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_example(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    checked = (
        code + "assert out.shape == q.shape and attention.last_plan.exchange == 'fused'\ndist.destroy_process_group()\n"
    )
    script = tmp_path / "layer.py"
    script.write_text(checked.replace("1024, 24, 128", "64, 4, 16"))
    path = os.pathsep.join([str(ROOT), str(ROOT / "cute"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environ = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environ)
    assert done.returncode == 0, done.stderr
