"""fsspec file system `towline://`, for every library that takes fsspec URLs: pandas, pyarrow, `datasets`,
`dcp.save(state, checkpoint_id="towline://run-7/step-100")`.

    towline://NAME/PATH

is the file PATH of the tree NAME, in the repository `storage_options={"repo": URL}`, by default `$TOWLINE_REPO`. For the rule
that splits a new path into NAME and PATH see `TowlineFileSystem`.
"""

from __future__ import annotations

import contextlib
import posixpath
import shutil
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any

from fsspec.compression import compr
from fsspec.core import get_compression
from fsspec.registry import register_implementation
from fsspec.spec import AbstractFileSystem

from ._changes import Transaction
from ._files import BLOCK, Compressed, Reader, Text, Writer
from ._trees import Entry, SharedRepository, Tree, TreePath, shared_repository
from .errors import NotFound

#: Minimum and maximum block size.
_BLOCKS = (64 << 10, 32 << 20)


class TowlineFileSystem(AbstractFileSystem):
    """File system of saved trees.

    A path is a saved NAME, then a path in its tree. NAME is the longest saved name that the path begins with. Exception: a step
    (`step-N`) that is not in that tree is a separate, new name. If no saved name matches, NAME is, for a new file:

    - the path up to the first segment `step-N`;
    - else the topmost folder above the file that this process created (`mkdir`, `makedirs`);
    - else the folder of the file; for folders `key=value`, which are partitions of a table, the folder above all of them.

    So every file is in a folder: `towline://FILE` is refused. Selectors such as `towline://RUN@latest/PATH` are read-only.

    A file becomes visible when it is closed, whole or not at all, in a commit of its own. All changes in `with fs.transaction:`
    become visible at its end, in one commit for each tree. Many processes may write files of one tree at the same time. Folders
    exist if files are in them; an empty folder from `makedirs` exists only in this process.

    Options: `repo`, by default `$TOWLINE_REPO`; `memory`, `cache`, `endpoint`, `region`, `allow_http` and `create` as for
    `towline.open`.
    """

    protocol = "towline"
    root_marker = ""
    transaction_type = Transaction

    def __init__(
        self,
        repo: str | None = None,
        *,
        memory: int | str | None = None,
        create: bool | None = None,
        cache: str | None = None,
        endpoint: str | None = None,
        region: str | None = None,
        allow_http: bool = False,
        **options: Any,
    ):
        if "storage_options" in options:
            raise TypeError("unknown option storage_options: fsspec.open(url, repo=...) takes its options directly")
        super().__init__(**options)
        opening = {
            "memory": memory,
            "create": create,
            "cache": cache,
            "endpoint": endpoint,
            "region": region,
            "allow_http": allow_http,
        }
        self._repo = repo
        self._options = {key: value for key, value in opening.items() if value is not None}

    @property
    def shared(self) -> SharedRepository:
        """The open repository, shared by all file systems of this URL in the process."""
        return shared_repository(self._repo, self._options)

    @property
    def fsid(self) -> str:
        """Id of the file system, the same for every URL of a repository."""
        return f"towline-{self.shared.repository.id}"

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(one) for one in path]
        stripped = super()._strip_protocol(path).lstrip("/")
        return posixpath.normpath(stripped) if "//" in stripped else stripped

    # Looking

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        if not path:
            return _folder("")
        tree_path = self.shared.find(path)
        entry = self.shared.entry(tree_path)
        if entry is not None:
            return self._described(tree_path, entry)
        if self._made(path) or self.shared.names(path):
            return _folder(path)
        raise FileNotFoundError(f"towline://{path}")

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        path = self._strip_protocol(path)
        start = f"{path}/" if path else ""
        found: dict[str, dict[str, Any]] = {}
        for below in [*self.shared.names(path), *list(self.shared.made)]:
            if below.startswith(start) and below != path:
                child = start + below[len(start) :].partition("/")[0]
                found[child] = _folder(child)
        tree_path, entry = self.shared.find(path), None
        if tree_path.name:
            tree = self.shared.tree(tree_path)
            entry = tree.entry(tree_path.inner)
            if entry is not None and entry.kind != "directory" and not found:
                return [self._described(tree_path, entry)] if detail else [path]
            for child in tree.children.get(tree_path.inner, ()):
                place = tree_path._replace(inner=child)
                found[place.path] = self._described(place, tree.entries[child])
        if not found and entry is None and path and not self._made(path):
            raise FileNotFoundError(f"towline://{path}")
        return [found[name] for name in sorted(found)] if detail else sorted(found)

    def find(
        self, path: str, maxdepth: int | None = None, withdirs: bool = False, detail: bool = False, **kwargs: Any
    ) -> Any:
        path = self._strip_protocol(path)
        if maxdepth is not None and maxdepth < 1:
            raise ValueError("maxdepth must be at least 1")
        found = {}
        # A link that leads to no file of the tree cannot be read, so it is only listed.
        kinds = ("file", "directory") if withdirs else ("file",)
        for name, info in self._below(path):
            depth = name.count("/") - path.count("/") + (0 if path else 1)
            if (maxdepth is None or depth <= maxdepth) and info["type"] in kinds:
                found[name] = info
        # With `withdirs`, fsspec includes the folder itself.
        if path and (withdirs or (not found and self.isfile(path))):
            with contextlib.suppress(FileNotFoundError):
                found[path] = self.info(path)
        return {name: found[name] for name in sorted(found)} if detail else sorted(found)

    def _below(self, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yields all entries below a folder."""
        start = f"{path}/" if path else ""
        tree_path, names = self.shared.find(path), self.shared.names(path)
        for below in [*names, *(made for made in list(self.shared.made) if made.startswith(start) and made != path)]:
            parts = below[len(start) :].split("/")
            for end in range(1, len(parts) + 1):
                folder = start + "/".join(parts[:end])
                yield folder, _folder(folder)
        trees = [tree_path] if tree_path.name else []
        for tree_path in trees + [TreePath(name, "", version) for name, version in names.items()]:
            for inner, entry in self.shared.tree(tree_path).below(tree_path.inner):
                place = tree_path._replace(inner=inner)
                yield place.path, self._described(place, entry)

    def _described(self, tree_path: TreePath, entry: Entry) -> dict[str, Any]:
        """Description of an entry. A link to a file of the tree is that file, as in fsspec's local file system; others have the
        type "link"."""
        link = entry
        if entry.target is not None:
            found = self.shared.tree(tree_path).resolved(tree_path.inner)
            if found is not None and found[1].kind == "file":
                entry = found[1]
        info = {"name": tree_path.path, "size": entry.size, "type": entry.kind, "mode": entry.mode}
        if entry.kind == "directory":
            return info
        info["mtime"] = link.mtime_ns / 1e9
        if link.target is not None:
            info.update(islink=True, destination=link.target)
        return info

    def created(self, path: str) -> datetime:
        return self.modified(path)

    def modified(self, path: str) -> datetime:
        info = self.info(path)
        if "mtime" not in info:
            raise IsADirectoryError(f"towline://{self._strip_protocol(path)}")
        return datetime.fromtimestamp(info["mtime"], tz=timezone.utc)

    def _made(self, path: str) -> list[str]:
        """Folders at and below `path` that this process created."""
        return [made for made in list(self.shared.made) if made == path or made.startswith(f"{path}/")]

    def _file(self, path: str) -> tuple[TreePath, Tree, Entry]:
        tree_path = self.shared.find(self._strip_protocol(path))
        if tree_path.name:
            tree = self.shared.tree(tree_path)
            found = tree.resolved(tree_path.inner)
            if found is not None and found[1].kind == "file":
                return tree_path._replace(inner=found[0]), tree, found[1]
        if self.isdir(path):
            raise IsADirectoryError(f"towline://{self._strip_protocol(path)}")
        raise FileNotFoundError(f"towline://{self._strip_protocol(path)}")

    # Reading

    def open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | str | None = None,
        cache_options: dict[str, Any] | None = None,
        compression: str | None = None,
        **kwargs: Any,
    ) -> Any:
        if "b" not in mode:
            text = {key: kwargs.pop(key) for key in ("encoding", "errors", "newline") if key in kwargs}
            mode = mode.replace("t", "") + "b"
            return Text(self.open(path, mode, block_size, cache_options, compression, **kwargs), **text)
        opened = super().open(path, mode, block_size, cache_options, **kwargs)
        word = get_compression(self._strip_protocol(path), compression)
        if word is None:
            return opened
        through = compr[word](opened, mode=mode[0])
        return Compressed(opened, through) if isinstance(opened, Writer) else through

    def _open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | str | None = None,
        autocommit: bool = True,
        cache_options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        path = self._strip_protocol(path)
        if mode == "rb":
            tree_path, tree, entry = self._file(path)
            block = block_size if isinstance(block_size, int) else BLOCK
            block = min(max(block, _BLOCKS[0]), _BLOCKS[1])
            return Reader(self, path, self.shared, (tree, tree_path.inner), entry.size, block)
        if mode not in ("wb", "ab", "xb"):
            raise ValueError(f"a file of towline:// is opened to be read or written, not {mode!r}")
        if self.isdir(path):
            raise IsADirectoryError(f"towline://{path}")
        if mode == "xb" and self.exists(path):
            raise FileExistsError(f"towline://{path}")
        begin = self.cat_file(path) if mode == "ab" and self.exists(path) else b""
        tree_path = self.shared.place(path)
        if not autocommit:
            return self.transaction.staged(tree_path, Writer(self, path, self.transaction.closed, begin))

        def publish(writer: Writer) -> None:
            if mode == "xb" and self.exists(path):
                raise FileExistsError(f"towline://{path}")
            with writer.pieces() as pieces:
                self.shared.put(tree_path.name, tree_path.inner, pieces)

        return Writer(self, path, publish, begin)

    def cat(self, path: str | list[str], recursive: bool = False, on_error: str = "raise", **kwargs: Any) -> Any:
        """Reads a file, or several, by path; with `recursive` also the files in folders."""
        paths = self.expand_path(path, recursive=recursive)
        if paths == [self._strip_protocol(path)] and not recursive:
            return self.cat_file(paths[0], **kwargs)
        paths = [one for one in paths if not (recursive and self.isdir(one))]
        got = self.cat_ranges(paths, None, None, on_error="raise" if on_error == "raise" else "return")
        found = zip(paths, got, strict=True)
        return {one: data for one, data in found if on_error != "omit" or not isinstance(data, Exception)}

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        found: list[bytes] = self.cat_ranges([path], [start], [end], on_error="raise")
        return found[0]

    def cat_ranges(
        self,
        paths: list[str],
        starts: Any,
        ends: Any,
        max_gap: int | None = None,
        on_error: str = "return",
        **kwargs: Any,
    ) -> list[Any]:
        """Reads ranges of many files; all ranges of one tree at once, each chunk once."""
        starts = starts if isinstance(starts, (list, tuple)) else [starts] * len(paths)
        ends = ends if isinstance(ends, (list, tuple)) else [ends] * len(paths)
        if not len(paths) == len(starts) == len(ends):
            raise ValueError("there must be as many starts and ends as paths")
        out: list[Any] = [None] * len(paths)
        trees: dict[str, tuple[Tree, list[tuple[int, tuple[str, int, int]]]]] = {}
        for number, (path, start, end) in enumerate(zip(paths, starts, ends, strict=True)):
            try:
                tree_path, tree, entry = self._file(path)
            except OSError as error:
                if on_error == "raise":
                    raise
                out[number] = error
                continue
            wanted = (tree_path.inner, *_range(start, end, entry.size))
            trees.setdefault(tree_path.name, (tree, []))[1].append((number, wanted))
        for tree, ranges in trees.values():
            read: list[Any]
            try:
                read = list(self.shared.read(tree, [one for _, one in ranges]))
            except Exception as error:
                if on_error == "raise":
                    raise
                read = [error] * len(ranges)
                if len(ranges) > 1:
                    # Reads them one by one, so that only damaged ones are errors.
                    read = [self._tried(tree, one) for _, one in ranges]
            for (number, _), found in zip(ranges, read, strict=True):
                out[number] = found
        return out

    def _tried(self, tree: Tree, wanted: tuple[str, int, int]) -> Any:
        try:
            return self.shared.read(tree, [wanted])[0]
        except Exception as error:
            return error

    # Changing

    def pipe(self, path: str | dict[str, bytes], value: bytes | None = None, **kwargs: Any) -> None:
        """Writes bytes to a file; or, given a dict, to the file of each path, in one commit for each tree."""
        if not isinstance(path, dict) or self._intrans or set(kwargs) - {"mode"}:
            super().pipe(path, value, **kwargs)
            return
        trees: dict[str, dict[str, bytes]] = {}
        for one, data in path.items():
            one = self._strip_protocol(one)
            if self.isdir(one):
                raise IsADirectoryError(f"towline://{one}")
            if kwargs.get("mode") == "create" and self.exists(one):
                raise FileExistsError(f"towline://{one}")
            tree_path = self.shared.place(one)
            trees.setdefault(tree_path.name, {})[tree_path.inner] = bytes(data)
        for name, files in trees.items():
            self.shared.amend(name, [(inner, [data]) for inner, data in files.items()])
        return

    def mkdir(self, path: str, create_parents: bool = True, **kwargs: Any) -> None:
        path = self._strip_protocol(path)
        if self.exists(path):
            raise FileExistsError(f"towline://{path}")
        if not create_parents and not self.exists(self._parent(path)):
            raise FileNotFoundError(f"towline://{self._parent(path)}")
        self.shared.made[path] = None

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        path = self._strip_protocol(path)
        if self.exists(path) and not (exist_ok and self.isdir(path)):
            raise FileExistsError(f"towline://{path}")
        if path:
            self.shared.made[path] = None

    def rmdir(self, path: str) -> None:
        path = self._strip_protocol(path)
        if self.info(path)["type"] != "directory":
            raise NotADirectoryError(f"towline://{path}")
        if self.ls(path, detail=False):
            raise OSError(f"towline://{path} is not empty")
        self._remove(path)

    def rm_file(self, path: str) -> None:
        self.rm(path)

    def rm(self, path: str | list[str], recursive: bool = False, maxdepth: int | None = None) -> None:
        """Removes files, and with `recursive` folders. To remove a whole tree, its name is removed. The root is not removed."""
        paths = path if isinstance(path, list) else [path]
        if not all(self._strip_protocol(one) for one in paths):
            raise ValueError(
                "towline://: the root is not removed, as every name would be: "
                "remove the names one by one, each by rm(name, recursive=True); ls('') lists them"
            )
        for one in paths:
            magic = any(char in one for char in "*?[")
            for found in self.expand_path(one) if magic else [self._strip_protocol(one)]:
                if self._intrans and self.transaction.removes(self.shared.place(found)):
                    continue
                if self.info(found)["type"] == "directory" and not recursive:
                    raise IsADirectoryError(f"towline://{found}: remove it with recursive=True")
                self._remove(found)

    def _remove(self, path: str) -> None:
        self._forget_made(path)
        tree_path, names = self.shared.find(path), list(self.shared.names(path))
        if tree_path.name and tree_path.inner:
            if self.shared.entry(tree_path) is not None:
                self._change(tree_path.name, remove=[tree_path.inner])
        elif tree_path.name:
            names.append(tree_path.name)
        if names:
            self._remove_trees([path])

    def _remove_trees(self, names: list[str]) -> None:
        """Removes the trees at and below `names` in one commit, which one `undelete --recursive` takes back."""
        self._check_outside_transaction()
        with contextlib.suppress(NotFound):
            self.shared.engine.remove_all(names, True)

    def _forget_made(self, path: str) -> None:
        for made in self._made(path):
            self.shared.made.pop(made, None)

    def cp_file(self, path1: str, path2: str, **kwargs: Any) -> None:
        if self.isdir(path1):
            self.makedirs(path2, exist_ok=True)
        else:
            self._inherit_labels(path1, path2)
            with self.open(path1, "rb") as source, self.open(path2, "wb") as target:
                shutil.copyfileobj(source, target, 4 << 20)

    def _inherit_labels(self, path1: str, path2: str) -> None:
        """The tree of `path2` gets the labels of that of `path1` before it gets its content."""
        source, target = self.shared.find(path1).name, self.shared.place(path2).name
        if source and target and source != target:
            self.shared.repository.inherit_labels(source, target)

    def mv(self, path1: Any, path2: Any, recursive: bool = False, maxdepth: int | None = None, **kwargs: Any) -> None:
        """Moves a file or folder without copying data. Within a tree this is one commit, from one tree to another two: an
        addition with links, empty folders and permissions, then a removal that `undelete` can take back."""
        if isinstance(path1, list) or isinstance(path2, list):
            super().mv(path1, path2, recursive=recursive, maxdepth=maxdepth, **kwargs)
            return None
        into = isinstance(path2, str) and path2.endswith("/")
        path1, path2 = self._strip_protocol(path1), self._strip_protocol(path2)
        if self._intrans and self.transaction.renames(self.shared.place(path1), self.shared.place(path2)):
            return None
        info = self.info(path1)
        if path1 == path2:
            return None
        if into or self.isdir(path2):
            path2 = posixpath.join(path2, posixpath.basename(path1))
        source, is_folder = self.shared.find(path1), info["type"] == "directory"
        if is_folder and f"{path2}/".startswith(f"{path1}/"):
            raise ValueError(f"towline://{path1} cannot be moved into itself")
        target = self._new_place(path2, is_folder)
        if source.inner and target.name == source.name and target.inner:
            return self._change(source.name, rename=[(source.inner, target.inner)])
        if is_folder and not source.inner and not self.shared.find(path2).name:
            return self._rename(path1, path2)
        return self._move_between(path1, source, target)

    rename = mv

    def _new_place(self, path: str, is_folder: bool) -> TreePath:
        """Splits the `path` of a file or folder to write, as for a file in that folder."""
        if not is_folder:
            return self.shared.place(path)
        within = self.shared.place(f"{path}/file")
        return within._replace(inner=within.inner.rpartition("/")[0])

    def _move_between(self, path1: str, source: TreePath, target: TreePath) -> None:
        """Moves the file, folder or trees at `path1`, which `source` splits, to another tree."""
        self._check_outside_transaction()
        found = [source] if source.name and self.shared.entry(source) is not None else []
        found += [TreePath(name, "") for name in self.shared.names(path1)]
        for one in found:
            inner = posixpath.join(target.inner, one.path[len(path1) :].lstrip("/"))
            self.shared.graft(one, target._replace(inner=inner.rstrip("/")))
        self._forget_made(path1)
        # Only what was moved: others may have saved or removed at and below `path1` meanwhile.
        for one in found:
            if one.inner:
                self._change(one.name, remove=[one.inner], keep=True)
        trees = [one.name for one in found if not one.inner]
        if trees:
            try:
                self.shared.engine.remove_all(trees, False)
            except NotFound:
                for tree in trees:
                    with contextlib.suppress(NotFound):
                        self.shared.repository.remove(tree)

    def _rename(self, path1: str, path2: str) -> None:
        """Renames the trees at and below `path1` to names that begin with `path2`."""
        self._check_outside_transaction()
        tree_path = self.shared.find(path1)
        for name in [*([tree_path.name] if tree_path.name == path1 else []), *self.shared.names(path1)]:
            self.shared.repository.copy(name, path2 + name[len(path1) :])
            self.shared.repository.remove(name)
        for made in self._made(path1):
            self.shared.made.pop(made, None)
            self.shared.made[path2 + made[len(path1) :]] = None

    def _change(
        self,
        name: str,
        remove: list[str] | None = None,
        rename: list[tuple[str, str]] | None = None,
        keep: bool = False,
    ) -> None:
        if self._intrans:
            self.transaction.change(name, remove or [], rename or [])
            return None
        return self.shared.amend(name, (), remove or (), rename or (), keep)

    def _check_outside_transaction(self) -> None:
        if self._intrans:
            raise ValueError("a transaction changes files within trees; move and remove whole trees outside of it")

    def touch(self, path: str, truncate: bool = True, **kwargs: Any) -> None:
        if truncate or not self.exists(path):
            with self.open(path, "wb"):
                pass

    def invalidate_cache(self, path: str | None = None) -> None:
        """Does nothing: listings are always current."""


def _folder(path: str) -> dict[str, Any]:
    return {"name": path, "size": 0, "type": "directory"}


def _range(start: int | None, end: int | None, size: int) -> tuple[int, int]:
    """Start and end of a range; as in slices, negative numbers count from the end."""
    start, end, _ = slice(start, end).indices(size)
    return start, max(start, end)


# The wheel has an entry point for it; a package that is only on the path has none.
register_implementation("towline", TowlineFileSystem)
