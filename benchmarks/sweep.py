"""The sequence-length sweep under torchrun:

python -m torch.distributed.run --nproc-per-node 4 benchmarks/sweep.py --seq-lens 8192,16384 --out results.jsonl
"""

import sys

from fa_a2a.cli import main

if __name__ == "__main__":
    sys.exit(main(["sweep", *sys.argv[1:]]))
