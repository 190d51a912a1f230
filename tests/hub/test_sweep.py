"""The sweep: finds what no event tells of."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.hub.hub_tools import serving

from farside.hub.sweep import Sweep
from farside.protocol.messages import ListDir


class Lister:
    def __init__(self) -> None:
        self.digests: dict[bytes, bytes] = {}

    def digest(self, path: bytes) -> bytes:
        if path not in self.digests:
            raise FileNotFoundError
        return self.digests[path]


def test_differences_are_found_once() -> None:
    async def main() -> None:
        found: list[bytes] = []
        news = asyncio.Event()

        def differs(path: bytes) -> None:
            found.append(path)
            news.set()

        lister = Lister()
        sweep = Sweep(differs, 0.01)
        for path in (b"", b"a", b"b"):
            lister.digests[path] = b"1"
            sweep.listed(path, b"1")
        sweep.start(lister)
        async with asyncio.timeout(5):
            while sweep.done < 6:
                await asyncio.sleep(0.001)
            assert found == []
            lister.digests[b"a"] = b"2"
            await news.wait()
            news.clear()
            assert found == [b"a"]
            del lister.digests[b"b"]
            await news.wait()
            assert found == [b"a", b"b"], "told once, until it is listed again"
            sweep.listed(b"a", b"2")
            done = sweep.done
            while sweep.done < done + 4:
                await asyncio.sleep(0.001)
            assert found == [b"a", b"b"]
        assert await sweep.stop()

    asyncio.run(main())


def test_a_write_by_a_link_outside_of_the_portal_is_told(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "f").write_bytes(b"old")
    (tmp_path / "outside").hardlink_to(root / "f")

    async def main() -> None:
        async with serving(root, sweep_s=0.05) as (hub, spoke):
            await spoke.attach()
            await spoke.call(ListDir("p", b""))
            (tmp_path / "outside").write_bytes(b"new content")
            await spoke.told.until(lambda: spoke.told.tells_of(b"", b"f"))
            assert hub.status()["portals"][0]["found_by_sweep"] >= 1

    asyncio.run(main())
