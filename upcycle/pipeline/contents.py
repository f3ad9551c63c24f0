"""What files hold, each hashed once in a run."""

from pathlib import Path

from upcycle.checkpoint.manifest import hash_file, hash_folder


class Contents:
    """Content hashes of folders, kept until the stage that makes a folder has run."""

    def __init__(self) -> None:
        self._folders: dict[Path, dict[str, str]] = {}

    def of_folder(self, folder: Path) -> dict[str, str]:
        """Hash of every visible file below a folder but its manifest; none where there is none."""
        if folder not in self._folders:
            self._folders[folder] = hash_folder(folder)
        return self._folders[folder]

    def of(self, path: Path) -> str | dict[str, str]:
        """Hashes of a file, or of every file of a folder."""
        return self.of_folder(path) if path.is_dir() else hash_file(path)

    def forget(self, *folders: Path) -> None:
        """Take these folders' hashes anew when they are asked for."""
        for folder in folders:
            self._folders.pop(folder, None)
