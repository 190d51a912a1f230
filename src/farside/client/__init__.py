"""farside from Python: read a portal without a mount.

::

    from farside.client import Library, spoke_config

    with Library(spoke_config(hub="hub.example:7420/c4", token_file="join.txt")) as library:
        with library.open("train/shard_00000.bin") as file:
            window = file.pread(16384, 0)
"""

from farside.client.file import File
from farside.client.library import Library
from farside.config import SpokeConfig, spoke_config

__all__ = ["File", "Library", "SpokeConfig", "spoke_config"]
