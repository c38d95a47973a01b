"""``python -m lenprobe`` is ``lenprobe``."""

import sys

from lenprobe.cli import main

if __name__ == "__main__":
    sys.exit(main())
