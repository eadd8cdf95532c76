"""Whole diffusion transformers under torchrun:

python -m torch.distributed.run --nproc-per-node 4 benchmarks/dit.py flux:1024x1024 --out results.jsonl
"""

import sys

from fa_a2a.cli import main

if __name__ == "__main__":
    sys.exit(main(["dit", *sys.argv[1:]]))
