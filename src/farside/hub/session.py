"""What the hub keeps of each connection, and what it counts."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from farside.hub.leases import Lease
from farside.hub.state import Spoke

READS_PER_CONNECTION = 4
"""Bulk reads of one connection that are worked on at once; each holds two parts in memory."""


@dataclass
class Counters:
    """What the hub has done since its start."""

    requests: dict[str, int] = field(default_factory=dict)
    bytes_by_reason: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("demand", "planned", "readahead", "fill"), 0)
    )
    metadata_bytes: int = 0
    stale_refusals: int = 0
    invalidations: int = 0
    joined: int = 0
    refused: int = 0


class Session:
    """One connection; ``spoke`` is None for strangers and without TLS, ``lease`` until it attaches."""

    def __init__(self, spoke: Spoke | None) -> None:
        self.spoke = spoke
        self.lease: Lease | None = None
        self.bulk = asyncio.Semaphore(READS_PER_CONNECTION)
