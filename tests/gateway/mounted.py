"""A Secret as the kubelet mounts it."""

from __future__ import annotations

from pathlib import Path


class Secret:
    """A folder as the kubelet mounts a Secret: the files are links, and one rename changes all."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._version = 0
        folder.mkdir()

    def write(self, files: dict[str, str]) -> None:
        self._version += 1
        real = self.folder / f"..{self._version}"
        real.mkdir()
        for name, text in files.items():
            (real / name).write_text(text)
            if not (self.folder / name).is_symlink():
                (self.folder / name).symlink_to(Path("..data") / name)
        new = self.folder / "..data_tmp"
        new.symlink_to(real.name)
        new.rename(self.folder / "..data")
