"""`python -m adasum_hvd` is the `adasum-hvd` command."""

import sys

from adasum_hvd.cli import main

if __name__ == "__main__":
    sys.exit(main())
