"""Files of a folder, behind links too, and what there is no file."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass, field
from pathlib import Path
from stat import S_ISDIR, S_ISREG

DANGLING = "links that lead nowhere"
REPEATED = "links to folders above it or read already"
SPECIAL = "pipes, sockets or devices"

_NOWHERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


@dataclass(frozen=True, slots=True)
class FolderContent:
    """Content of a folder, everything sorted by path."""

    files: list[Path] = field(default_factory=list)
    left_out: dict[str, list[Path]] = field(default_factory=dict)
    """Paths under `DANGLING`, `REPEATED` and `SPECIAL`, for those of which there are some."""


def walk(folder: Path) -> FolderContent:
    """The files below a folder, without hidden ones. Links are followed.

    A folder is read once, however many links lead to it: under its own path where that is below
    `folder`, else under the first link's. One that contains `folder` is not read. Raises OSError,
    with the file's name, for a folder that cannot be read.
    """
    files: list[Path] = []
    left_out: dict[str, list[Path]] = {DANGLING: [], REPEATED: [], SPECIAL: []}
    seen = {_identity(parent) for parent in folder.resolve().parents}
    links = [folder]
    # Links wait until no folder is left that stands there itself.
    while links:
        folders, links = sorted(links), []
        while folders:
            path = folders.pop(0)
            if (identity := _identity(path)) in seen:
                left_out[REPEATED].append(path)
                continue
            seen.add(identity)
            with os.scandir(path) as entries:
                visible = [entry for entry in entries if not entry.name.startswith(".")]
            for entry in sorted(visible, key=lambda entry: entry.name):
                inside = path / entry.name
                match _kind_of(entry):
                    case "file":
                        files.append(inside)
                    case "folder":
                        (links if entry.is_symlink() else folders).append(inside)
                    case other:
                        left_out[other].append(inside)
    return FolderContent(
        sorted(files), {what: sorted(paths) for what, paths in left_out.items() if paths}
    )


def _identity(folder: Path) -> tuple[int, int]:
    status = folder.stat()
    return status.st_dev, status.st_ino


def _kind_of(entry: os.DirEntry[str]) -> str:
    if entry.is_file(follow_symlinks=False):
        return "file"
    try:
        mode = os.stat(entry.path).st_mode
    except OSError as error:
        if entry.is_symlink() and error.errno in _NOWHERE:
            return DANGLING
        raise
    return "folder" if S_ISDIR(mode) else "file" if S_ISREG(mode) else SPECIAL
