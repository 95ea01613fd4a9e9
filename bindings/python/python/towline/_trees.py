"""Repositories for the file system: paths of a name and a path in its tree, open trees, and changes of trees."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import posixpath
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from . import _replacing, _towline
from . import repository as repositories
from .errors import Conflict, NotFound

#: A piece of a file: bytes, or the address and length of memory.
Piece = Any

#: Maximum number of trees that stay open; fewer, if they take more than the memory of the repository.
_TREES = 16

#: Maximum number of links that lead to each other, as in Linux (path_resolution(7)).
_LINKS = 40

_STEP = re.compile(r"step-[0-9]+")


class InTheWay(Conflict, FileExistsError):
    """A folder exists where a file should be written, or the other way round."""


class TreePath(NamedTuple):
    """A path of the file system, split in two."""

    #: Name of the tree; empty for a path above all names.
    name: str
    #: Path in the tree; empty for the tree itself.
    inner: str
    #: Version of the name; None if nothing is saved under it.
    version: int | None = None

    @property
    def path(self) -> str:
        return f"{self.name}/{self.inner}" if self.inner else self.name


class Entry(NamedTuple):
    """A file, folder or link of a tree."""

    kind: str
    size: int
    mode: int
    mtime_ns: int
    target: str | None


#: Entry of the root of a tree.
FOLDER = Entry("directory", 0, 0o755, 0, None)


class Tree:
    """Snapshot of a tree: its entries by path."""

    def __init__(self, opened: Any):
        self.opened = opened
        self.entries: dict[str, Entry] = {}
        self.children: dict[str, list[str]] = {"": []}
        for path, *entry in opened.entries():
            if not path:
                continue
            self.entries[path] = Entry(*entry)
            self.children.setdefault(path.rpartition("/")[0], []).append(path)

    def entry(self, path: str) -> Entry | None:
        return self.entries.get(path) if path else FOLDER

    def resolved(self, path: str) -> tuple[str, Entry] | None:
        """Path and entry of the file or folder at `path`, through links within the tree; None if a link leads nowhere."""
        for _ in range(_LINKS):
            entry = self.entry(path)
            if entry is None or entry.target is None:
                return None if entry is None else (path, entry)
            path = posixpath.normpath(posixpath.join(posixpath.dirname(path), entry.target))
            if path.startswith(("/", "..")):
                return None
        return None

    def below(self, path: str) -> Iterator[tuple[str, Entry]]:
        """All entries below the folder `path`."""
        start = f"{path}/" if path else ""
        return ((there, entry) for there, entry in self.entries.items() if there.startswith(start))


class SharedRepository:
    """An open repository, its open trees and locks, shared by all file systems of one URL in a process."""

    def __init__(self, url: str | None, opening: dict[str, Any]):
        self._url, self._opening = url, opening
        self._lock = threading.Lock()
        self._repository: repositories.Repository | None = None
        self._trees: OrderedDict[str, tuple[int, Tree]] = OrderedDict()
        self._locks: dict[str, threading.Lock] = {}
        self._waiting: dict[str, list[_Put]] = {}
        #: Empty folders that this process created; the repository does not store them.
        self.made: dict[str, None] = {}

    @property
    def repository(self) -> repositories.Repository:
        with self._lock:
            if self._repository is None:
                self._repository = repositories.open(self._url, **self._opening)
            return self._repository

    @property
    def engine(self) -> Any:
        return self.repository._engine

    def find(self, path: str) -> TreePath:
        """Splits an existing `path` at the longest saved name that it begins with. A step below that name which is not in its
        tree belongs to no name."""
        name, at, rest = path.partition("@")
        if at:
            choice, _, inner = rest.partition("/")
            chosen = self.engine.resolve(f"{name}@{choice}")
            return TreePath(f"{name}@{choice}", inner, (self.engine.find(chosen) or (None, None))[1])
        found = self.engine.find(path) if path else None
        if found is None:
            return TreePath("", path)
        tree_path = TreePath(found[0], path[len(found[0]) + 1 :], found[1])
        step = _step_end(tree_path.inner)
        if step is not None and self.tree(tree_path).entry(tree_path.inner[:step]) is None:
            return TreePath("", path)
        return tree_path

    def place(self, path: str) -> TreePath:
        """Splits the `path` of a file to write: see `TowlineFileSystem`."""
        tree_path = self.find(path)
        if tree_path.name:
            return tree_path
        end = _step_end(path)
        if end is None or end == len(path):
            above = (at for at, char in enumerate(path) if char == "/")
            end = _above_partitions(path, next((at for at in above if path[:at] in self.made), path.rfind("/")))
        if end <= 0:
            raise PermissionError(
                f"towline://{path}: a file lies in a tree, which has a name: write to towline://NAME/{path or 'FILE'}"
            )
        return TreePath(path[:end], path[end + 1 :])

    def tree(self, tree_path: TreePath) -> Tree:
        """Opens the tree of a `tree_path`, in its version or a newer one."""
        with self._lock:
            version, tree = self._trees.get(tree_path.name, (None, None))
            if tree is not None and version == tree_path.version:
                self._trees.move_to_end(tree_path.name)
                return tree
        tree, memory = Tree(self.engine.open_tree(tree_path.name)), self.engine.memory()
        with self._lock:
            self._trees[tree_path.name] = (tree.opened.version, tree)
            self._trees.move_to_end(tree_path.name)
            while len(self._trees) > _TREES or (len(self._trees) > 1 and self._kept() > memory):
                self._trees.popitem(last=False)
        return tree

    def _kept(self) -> int:
        """Bytes of memory of the open trees."""
        return sum(tree.opened.weight for _, tree in self._trees.values())

    def entry(self, tree_path: TreePath) -> Entry | None:
        """Entry at a `tree_path`; None if there is none."""
        if not tree_path.name or not tree_path.inner:
            return FOLDER if tree_path.name else None
        return self.tree(tree_path).entry(tree_path.inner)

    def names(self, folder: str) -> dict[str, int]:
        """Names below a folder, or all, with their versions."""
        return dict(self.engine.names(folder))

    def read(self, tree: Tree, ranges: list[tuple[str, int, int]]) -> list[bytes]:
        """Reads ranges of files of one tree at once."""
        read: list[bytes] = self._retrying(tree, lambda opened: opened.read(ranges))
        return read

    def read_into(self, tree: Tree, path: str, start: int, view: memoryview) -> None:
        """Fills `view` with the content of a file from `start` on."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(view))
        self._retrying(tree, lambda opened: opened.read_into(path, start, start + len(view), address))

    def _retrying(self, tree: Tree, work: Callable[[Any], Any]) -> Any:
        """Runs `work` with an open tree; retries once if the tree was repacked meanwhile."""
        try:
            return work(tree.opened)
        except NotFound:
            again = self.engine.open_tree(tree.opened.name)
            if again.manifest != tree.opened.manifest:
                raise
            tree.opened = again
            return work(again)

    def amend(
        self,
        name: str,
        put: Iterable[tuple[str, list[Piece]]] = (),
        remove: Iterable[str] = (),
        rename: Iterable[tuple[str, str]] = (),
        keep: bool = False,
    ) -> None:
        """Changes the tree `name` in one commit. With `keep`, `undelete` can restore the old tree."""
        with self._lock_of(name):
            self._amend(name, list(put), list(remove), list(rename), keep)

    def graft(self, source: TreePath, target: TreePath) -> None:
        """Adds the file or folder at `source` to the tree of `target` in one commit; it is neither read nor stored again."""
        with self._lock_of(target.name), _in_the_way_of(target.name, source.name):
            self.engine.graft(source.name, source.inner, target.name, target.inner)

    def put(self, name: str, path: str, pieces: list[Piece]) -> None:
        """Writes one file. Files that threads write while a commit is in progress share the next commit."""
        mine = _Put(path, pieces)
        with self._lock:
            self._waiting.setdefault(name, []).append(mine)
        with self._lock_of(name):
            if mine.done:
                return
            with self._lock:
                others = [one for one in self._waiting.pop(name, []) if one is not mine]
            if others:
                batch = [mine, *others]
                try:
                    # If two files have the same path, the later one wins.
                    self._amend(name, list({one.path: (one.path, one.pieces) for one in batch}.values()), [], [])
                except Exception:
                    # One file may have made the commit fail: now each thread commits its own.
                    pass
                else:
                    for one in others:
                        one.done = True
                    return
            self._amend(name, [(path, pieces)], [], [])

    def _lock_of(self, name: str) -> threading.Lock:
        with self._lock:
            return self._locks.setdefault(name, threading.Lock())

    def _amend(
        self,
        name: str,
        put: Sequence[_towline.File],
        remove: list[str],
        rename: list[tuple[str, str]],
        keep: bool = False,
    ) -> None:
        written = [*(path for path, _ in put), *(path for _, path in rename)]
        old = _replacing.replaced(lambda: self._current(name), written, self.read)
        # Paths that the change itself removes or moves are not removed a second time.
        gone = [*remove, *(path for path, _ in rename)]
        old = [path for path in old if not any(f"{path}/".startswith(f"{one}/") for one in gone)]
        with _in_the_way_of(name):
            self.engine.amend(name, put, [*remove, *old], rename, repositories.save_options(), keep or bool(old))

    def _current(self, name: str) -> Tree | None:
        found = self.engine.find(name)
        return self.tree(TreePath(name, "", found[1])) if found is not None and found[0] == name else None


@contextlib.contextmanager
def _in_the_way_of(name: str, *others: str) -> Iterator[None]:
    """Raises InTheWay for a conflict at a path of the tree `name`, which is not one of the name itself or of `others`."""
    try:
        yield
    except Conflict as error:
        if error.place in (None, name, *others):
            raise
        in_the_way = InTheWay(*error.args)
        in_the_way.place, in_the_way.help = f"{name}/{error.place}", error.help
        raise in_the_way from None


class _Put:
    """A file to be written to a tree."""

    def __init__(self, path: str, pieces: list[Piece]):
        self.path, self.pieces, self.done = path, pieces, False


_open: dict[str, SharedRepository] = {}
_open_lock = threading.Lock()


def shared_repository(url: str | None, opening: dict[str, Any]) -> SharedRepository:
    """The open repository of a URL in this process."""
    url = repositories.default_url() if url is None else os.fspath(url)
    key = json.dumps([url, sorted(opening.items())], default=str)
    with _open_lock:
        return _open.setdefault(key, SharedRepository(url, opening))


def _forked() -> None:
    """Resets the shared state in a forked child: its locks may be held by threads of the parent for ever."""
    global _open, _open_lock
    _open, _open_lock = {}, threading.Lock()


os.register_at_fork(after_in_child=_forked)


def _above_partitions(path: str, end: int) -> int:
    """End of the folder above all partitions `key=value` in `path[:end]`; `end` if there are none."""
    first = path.find("=", 0, max(end, 0))
    above = path.rfind("/", 0, first) if first > 0 else -1
    return above if above > 0 else end


def _step_end(path: str) -> int | None:
    """End of the first segment `step-N`; None if there is none."""
    at = 0
    for segment in path.split("/"):
        at += len(segment)
        if _STEP.fullmatch(segment):
            return at
        at += 1
    return None
