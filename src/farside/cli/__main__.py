"""``python -m farside.cli``: the same as the ``farside`` program."""

import sys

from farside.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
