"""What a transaction of the file system changes, gathered to one commit for each tree."""

from __future__ import annotations

import contextlib
from typing import Any

import fsspec.transaction

from ._files import Writer
from ._trees import Home, TreePath


class Gathered:
    """Changes of one tree, as the engine takes them: it removes, then renames, then puts."""

    def __init__(self) -> None:
        self.put: dict[str, Writer] = {}
        self.remove: list[str] = []
        self.rename: list[tuple[str, str]] = []

    def drop(self, path: str) -> None:
        """Forgets a file that was written."""
        writer = self.put.pop(path, None)
        if writer is not None:
            writer.discard()


class Transaction(fsspec.transaction.Transaction):
    """What is written, renamed and removed until it ends becomes visible then, by one commit for each tree; or nothing of it, if
    it ends by an exception. Until then the file system shows trees as they were."""

    def __init__(self, fs: Any, **kwargs: Any):
        super().__init__(fs, **kwargs)
        self._fs = fs
        self._trees: dict[str, Gathered] = {}
        self._paths: dict[int, TreePath] = {}
        self._writers: list[Writer] = []

    def staged(self, tree_path: TreePath, writer: Writer) -> Writer:
        """A file is being written."""
        self._paths[id(writer)] = tree_path
        self._writers.append(writer)
        return writer

    def closed(self, writer: Writer) -> None:
        """A file was written; it stays staged."""
        tree_path = self._paths.pop(id(writer))
        tree = self._tree(tree_path)
        tree.drop(tree_path.inner)
        tree.put[tree_path.inner] = writer

    def removes(self, tree_path: TreePath) -> bool:
        """Takes back a file that the transaction wrote, if it is one."""
        tree = self._tree(tree_path)
        if tree_path.inner not in tree.put:
            return False
        tree.drop(tree_path.inner)
        self._clear(tree_path)
        return True

    def renames(self, source: TreePath, target: TreePath) -> bool:
        """Renames a file that the transaction wrote, if it is one."""
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
        """Changes what is in a tree."""
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
        """Removes what a file that the transaction wrote would have replaced."""
        tree = self._tree(tree_path)
        home: Home = self._fs.home
        there = home.find(tree_path.path)
        if there.name == tree_path.name and home.entry(there) is not None and tree_path.inner not in tree.remove:
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

    def _publish(self, fs: Any, name: str, tree: Gathered) -> None:
        with contextlib.ExitStack() as staged:
            put = [(path, staged.enter_context(writer.pieces())) for path, writer in tree.put.items()]
            if put or tree.remove or tree.rename:
                fs.home.amend(name, put, tree.remove, tree.rename)

    def _tree(self, tree_path: TreePath) -> Gathered:
        return self._trees.setdefault(tree_path.name, Gathered())
