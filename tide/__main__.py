"""``python -m tide``: see :mod:`tide.cli`."""

import sys

from tide.cli import main

if __name__ == "__main__":
    sys.exit(main())
