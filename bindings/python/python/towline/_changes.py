"""Transactions of the file system: changes are collected to one commit for each tree."""

from __future__ import annotations

import contextlib
from typing import Any

import fsspec.transaction

from ._files import Writer
from ._trees import SharedRepository, TreePath


class TreeChanges:
    """Changes of one tree. The engine applies removals first, then renames, then new files."""

    def __init__(self) -> None:
        self.put: dict[str, Writer] = {}
        self.remove: list[str] = []
        self.rename: list[tuple[str, str]] = []

    def drop(self, path: str) -> None:
        """Discards a file that was written."""
        writer = self.put.pop(path, None)
        if writer is not None:
            writer.discard()


class Transaction(fsspec.transaction.Transaction):
    """Transaction of the file system. All changes within it become visible at its end, in one commit for each tree; none if an
    exception ends it. Until then the file system shows the trees without them."""

    def __init__(self, fs: Any, **kwargs: Any):
        super().__init__(fs, **kwargs)
        self._fs = fs
        self._trees: dict[str, TreeChanges] = {}
        self._paths: dict[int, TreePath] = {}
        self._writers: list[Writer] = []

    def staged(self, tree_path: TreePath, writer: Writer) -> Writer:
        """Registers a file that is being written."""
        self._paths[id(writer)] = tree_path
        self._writers.append(writer)
        return writer

    def closed(self, writer: Writer) -> None:
        """Registers a file that was closed; it stays staged."""
        tree_path = self._paths.pop(id(writer))
        tree = self._tree(tree_path)
        tree.drop(tree_path.inner)
        tree.put[tree_path.inner] = writer

    def removes(self, tree_path: TreePath) -> bool:
        """Removes a file that this transaction wrote; False if it wrote none there."""
        tree = self._tree(tree_path)
        if tree_path.inner not in tree.put:
            return False
        tree.drop(tree_path.inner)
        self._clear(tree_path)
        return True

    def renames(self, source: TreePath, target: TreePath) -> bool:
        """Renames a file that this transaction wrote; False if it wrote none there."""
        tree = self._tree(source)
        if source.inner not in tree.put:
            return False
        if source.name != target.name:
            raise ValueError("a transaction moves files within trees; copy to others outside of it")
        tree.drop(target.inner)
        tree.put[target.inner] = tree.put.pop(source.inner)
        self._clear(source)
        return True

    def change(self, name: str, remove: list[str], rename: list[tuple[str, str]]) -> None:
        """Registers removals and renames of saved files in a tree."""
        tree = self._tree(TreePath(name, ""))
        renamed = {path for pair in tree.rename for path in pair}
        for path in remove:
            if path in renamed:
                raise ValueError(f"{path}: a transaction removes nothing that it renamed; use two")
            for written in [there for there in tree.put if there.startswith(f"{path}/")]:
                tree.drop(written)
            tree.remove.append(path)
        for source, target in rename:
            tree.drop(target)
            tree.rename.append((source, target))

    def _clear(self, tree_path: TreePath) -> None:
        """Removes the saved file that a written file would have replaced."""
        tree = self._tree(tree_path)
        shared: SharedRepository = self._fs.shared
        there = shared.find(tree_path.path)
        if there.name == tree_path.name and shared.entry(there) is not None and tree_path.inner not in tree.remove:
            tree.remove.append(tree_path.inner)

    def complete(self, commit: bool = True) -> None:
        fs = self._fs
        try:
            if commit:
                for writer in self._writers:
                    if id(writer) in self._paths and not writer.closed:
                        writer.close()
                for name, tree in self._trees.items():
                    self._publish(fs, name, tree)
        finally:
            for writer in self._writers:
                writer.discard()
            self._trees, self._paths, self._writers = {}, {}, []
            self.files.clear()
            fs._intrans, fs._transaction = False, None
            self.fs = None

    def _publish(self, fs: Any, name: str, tree: TreeChanges) -> None:
        with contextlib.ExitStack() as staged:
            put = [(path, staged.enter_context(writer.pieces())) for path, writer in tree.put.items()]
            if put or tree.remove or tree.rename:
                fs.shared.amend(name, put, tree.remove, tree.rename)

    def _tree(self, tree_path: TreePath) -> TreeChanges:
        return self._trees.setdefault(tree_path.name, TreeChanges())
