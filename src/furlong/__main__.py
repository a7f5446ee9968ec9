"""`python -m furlong`, which `torchrun -m furlong` starts as well: the command `furlong`."""

import sys

from furlong.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
