"""Symbolic links of a saved tree. A framework that reads and writes a restored checkpoint follows them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import Denied

if TYPE_CHECKING:
    from ._towline import Tree


def check(tree: Tree) -> None:
    """Raises Denied if a link of the tree may lead out of it."""
    for path, kind, _, _, _, target in tree.entries():
        if kind == "link" and not stays_inside(path, target or ""):
            help = (
                f"`towline restore {tree.name} DEST` restores it elsewhere, if you trust whoever saved it; to resume from it, "
                "save it with the file in the place of the link"
            )
            error = Denied(
                f"{tree.name} is not restored for a framework, which would read and write through its link {path[:200]!r} to "
                f"{(target or '')[:200]!r}, out of the checkpoint ({help})"
            )
            error.place, error.help = f"{tree.name}:{path}", help
            raise error


def stays_inside(path: str, target: str) -> bool:
    """True if a link at `path` to `target` leads to a path of its tree, whichever other links for which this is true it goes
    through. So `..` may only be at its begin: after a link to a deeper folder, it leads elsewhere than the text says."""
    if not path or not target or target.startswith("/"):
        return False
    parts = [part for part in target.split("/") if part not in ("", ".")]
    ups = next((at for at, part in enumerate(parts) if part != ".."), len(parts))
    return ups <= path.count("/") and ".." not in parts[ups:]
