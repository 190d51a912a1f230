from __future__ import annotations

from pathlib import Path

from farside.cli.mounttable import farside_mounts, filesystem_of


def test_mounts_are_told_by_type_and_unescaped(tmp_path: Path) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(
        "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
        r"91 22 0:51 / /mnt/with\040space ro shared:1 master:2 - fuse.farside hub:7420/x ro" + "\n"
        "92 22 0:52 / /mnt/other ro - fuse.sshfs host: ro\n"
    )
    assert farside_mounts(str(table)) == [Path("/mnt/with space")]
    assert filesystem_of(Path("/mnt/with space/x"), str(table)) == "fuse.farside"
    assert filesystem_of(Path("/mnt/otherwise"), str(table)) == "ext4"
    assert filesystem_of(Path("/")) != "unknown"
