"""The calibration under torchrun:

python -m torch.distributed.run --nproc-per-node 4 benchmarks/calibrate.py --out calibrate.jsonl
"""

import sys

from fa_a2a.cli import main

if __name__ == "__main__":
    sys.exit(main(["calibrate", *sys.argv[1:]]))
