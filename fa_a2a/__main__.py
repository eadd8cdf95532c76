"""python -m fa_a2a: the command fa-a2a."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
