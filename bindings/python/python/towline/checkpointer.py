"""Checkpoints of a training loop: saved while it goes on, restored in three lines.

save ----> staged ----> local ----> durable
           (copied)     (on this    (committed in
                         node's      the repository)
                         disk)
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import threading
import time
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from . import _given, _progress, _shutdown, _torch, _towline, retention, spool
from . import state as states
from ._attempts import Attempts
from ._devices import gpus
from ._documents import read_document
from ._staging import Job, Staging
from .errors import Conflict, Error, Exhausted, NotFound, SaveFailed, Timeout, Unreachable, UsageError
from .handle import PROMISES, Handle, raise_failed
from .reports import SaveReport
from .repository import Compression, Repository, save_options
from .repository import open as open_repository
from .retention import Retention

if TYPE_CHECKING:
    import torch

TENSORS, DOCUMENT = "state.safetensors", "state.json"


class Checkpointer:
    """Saves the steps of one run of training, and restores them.

    `repo` is a repository or its address, `run` the run's name. Of `world_size` ranks each has one, with its own `rank`: a
    step is there once all have saved their part, and no collective is needed. `attempt` identifies the present start of all
    ranks: parts of different attempts are never mixed. By default ranks of torch.distributed agree on it through its store,
    and others have it from torchrun. Where there is neither, give one that is another whenever the ranks start again: else a
    step that an earlier start saved in whole or in part is refused as a Conflict when it is saved with other content.

    A process that goes back replaces the steps that it saved or found. Of two processes that save one step the first to commit
    it has it, whole, and the other fails with Conflict: a step that another process saved since this Checkpointer began, or last
    restored, is not replaced.

    `stage` is `"blocking"` (a save returns when the state is copied) or `"background"` (it returns at once, and the state must
    not change before the copy is made: see `protect`). A save that comes before the last one's copy is free waits for that, or
    with `when_busy="skip"` is left out and returns None.

    `keep_last`, `keep_every`, `keep_min` and `keep_max` say which steps outlive later ones; by default all. What the others leave
    behind is deleted in the background by rank 0, unless `collect` is False: then, and where the store refuses deletes, names
    expire, and `Repository.collect` or `towline collect` with rights to delete frees the space. Steps are stored as
    small as can be; with `compression="if-faster"` raw while the store takes bytes faster than they are made smaller, with False
    raw always. `spool` is the folder where states wait for a repository that is not on this node; by default in the user's cache.
    """

    def __init__(
        self,
        repo: Repository | str | os.PathLike[str] | None,
        run: str,
        rank: int = 0,
        world_size: int = 1,
        *,
        stage: str = "blocking",
        when_busy: str = "wait",
        attempt: str | None = None,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_min: Iterable[str] = (),
        keep_max: Iterable[str] = (),
        key_every: int | None = None,
        compression: Compression = None,
        collect: bool = True,
        spool: str | os.PathLike[str] | None = None,
        pickle: bool = False,
        on_sigterm: bool = True,
    ):
        if not 0 <= rank < world_size:
            raise UsageError(f"rank {rank} is none of {world_size} ranks")
        _given.check_run(run)
        _one_of("stage", stage, ("blocking", "background"))
        _one_of("when_busy", when_busy, ("wait", "skip"))
        # Says now what is wrong with it.
        save_options(compression=compression)
        self.repository = repo if isinstance(repo, Repository) else open_repository(repo)
        self.run, self.rank, self.world_size = run, rank, world_size
        self.stage, self.when_busy, self.pickle = stage, when_busy, pickle
        self.key_every, self.compression = key_every, compression
        #: The step that `restore` restored last.
        self.step: int | None = None
        #: Paths in its `into` that the step lacked, and those of the step that `into` lacked.
        self.missing_keys: list[str] = []
        self.unexpected_keys: list[str] = []
        self._attempts = Attempts(attempt) if world_size > 1 else None
        self._retention = Retention(keep_last, keep_every, keep_min, keep_max, collect=collect)
        self._staging = Staging()
        self._work: queue.Queue[Any] = queue.Queue()
        self._handles: list[Handle] = []
        self._protected: Handle | None = None
        self._process = os.getpid()
        self._spool = None if self.repository._engine.is_local() else _spool_folder(self.repository, spool)
        self._saver: threading.Thread | None = None
        self._closed = False
        _shutdown.watch(self)
        if on_sigterm:
            _shutdown.exit_on_sigterm()
        if self._spool is not None:
            self._save_left_over()
        #: The version of each step that this process knows of; of names in `_unsure` it may have saved another since.
        self._seen: dict[str, int] | None = None
        self._unsure: set[str] = set()
        self._look()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        try:
            self.close()
        except Error:
            if kind is None:
                raise

    def save(
        self,
        step: int,
        state: Any,
        metrics: Mapping[str, float] | None = None,
        *,
        stage: str | None = None,
        progress: _progress.Progress = None,
    ) -> Handle | None:
        """Saves `state` as this step; returns a handle when it is staged, or at once where it is staged in the background.

        `progress` is called with `(phase, done, total, moved)`, in bytes, some times a second until the step is durable, in a
        thread of its own; True draws a bar instead, where there is a terminal or a notebook.

        Raises UnsupportedValue for a state that cannot be kept, UsageError for a step that is no whole number or a metric that
        is not finite, and SaveFailed if an earlier save failed meanwhile, which no `wait` raised: then this step is not saved.
        """
        step = _given.step_number(step)
        return self._save_as(f"{self.run}/step-{step}", step, state, metrics, stage=stage, progress=progress)

    def _save_as(
        self,
        name: str,
        step: int,
        state: Any,
        metrics: Mapping[str, float] | None,
        *,
        stage: str | None = None,
        labels: Mapping[str, str] | None = None,
        stateful: bool = True,
        progress: _progress.Progress = None,
    ) -> Handle | None:
        stage = stage or self.stage
        _one_of("stage", stage, ("blocking", "background"))
        _progress.check(progress)
        options = self._save_options(metrics, labels)
        _given.check_save(name, options)
        self._check()
        if self._closed:
            raise UsageError(f"{name} cannot be saved: this Checkpointer is closed (make another one)")
        described = states.describe(state, self.pickle, stateful)
        job = Job(Handle(name, step), described, options, progress)
        if not self._can_stage(job.length):
            return self._save_unstaged(job)
        timeout = 0 if self.when_busy == "skip" else None
        job.stage = self._staging.take(job.length, timeout)
        if job.stage is None:
            return None
        try:
            job.options.update(self._part(name))
            if stage == "blocking":
                job.fill(self._staging)
        except BaseException:
            job.stage.release()
            raise
        if stage == "background":
            self._protected = job.handle
        self._made(name)
        self._handles.append(job.handle)
        self._start()
        self._work.put(job)
        return job.handle

    def prepare(self, state: Any) -> None:
        """Makes the memory ready, in the background, that `state` is going to be staged in, so that the first save blocks no
        longer than later ones: call it some time before. `restore` does it by itself."""
        self._check()
        if self._closed:
            raise UsageError("nothing can be prepared: this Checkpointer is closed (make another one)")
        leaves = states.describe(state, self.pickle).leaves
        self._prepare(sum(leaf.length for leaf in leaves), gpus(leaf.tensor for leaf in leaves))

    def _prepare(self, length: int, devices: set[torch.device]) -> None:
        # A save says what there is no memory for.
        if self._can_stage(length):
            with contextlib.suppress(MemoryError):
                self._staging.prepare(length, devices)

    def protect(self, optimizer: torch.optim.Optimizer) -> None:
        """Makes `optimizer.step()` wait until a save that is staged in the background has its copy."""
        me = weakref.ref(self)

        def wait_until_staged(*_: Any) -> None:
            checkpointer = me()
            if checkpointer is not None and checkpointer._protected is not None:
                with contextlib.suppress(SaveFailed):
                    checkpointer._protected._await("staged")
                checkpointer._protected = None

        optimizer.register_step_pre_hook(wait_until_staged)

    def steps(self) -> list[int]:
        """The steps that are saved, in order."""
        return retention.steps(self.repository, self.run)

    def restore(
        self,
        step: int | str = "latest",
        into: Any = None,
        map_location: str | torch.device | None = None,
        *,
        strict: bool = True,
        cast: bool = False,
        prepare: bool = True,
        progress: _progress.Progress = None,
    ) -> Any:
        """The state as it was at `step`: a number, `"latest"`, `"upto=N"`, `"min=METRIC"` or `"max=METRIC"`. Every byte is
        checked. None, if the latest is asked for and there is none.

        Tensors that stand at the same place in `into` are filled in place, and objects with `load_state_dict` there take their
        state: pass what is passed to `save`. Others come on the CPU, or at `map_location`. `self.step` is the step then.

        What `into` has and the step lacks is a Mismatch, which names it, before anything is filled; with `strict=False` it stays
        as it is, and modules take what they know. `missing_keys` and `unexpected_keys` list what either side lacks;
        what only the step has is no error outside of modules, as it is part of what is returned. With `cast` numbers of another
        precision are converted to that of `into`, as an fp32 step for a bf16 model.

        Objects of dataclasses, named tuples and enumerations are made only if `into` has one like it there, or
        `towline.allow_classes` was given the class. `progress` is as for `save`.

        With `into` the memory for the first save is made ready meanwhile, as by `prepare`; `prepare=False` says that nothing is
        going to be saved.
        """
        _progress.check(progress)
        self._finish_pending()
        engine = self.repository._engine
        if _given.is_step(step):
            step = _given.step_number(step)
        try:
            name = engine.resolve(f"{self.run}/step-{step}" if isinstance(step, int) else f"{self.run}@{step}")
            document = read_document(self.repository, name, self._path(DOCUMENT))
        except NotFound as error:
            if step == "latest" and not self.steps():
                return None
            raise self._explained(error, step) from error
        reading = Reading(into, map_location, self.pickle, strict, cast, progress)
        read = read_state(self.repository, name, self._path(TENSORS), document, reading)
        self.step, self.missing_keys, self.unexpected_keys = (
            int(name.rpartition("step-")[2]),
            read.missing,
            read.unexpected,
        )
        self._look()
        if into is not None and prepare and not self._closed and os.getpid() == self._process:
            self._prepare(read.bytes, read.gpus)
        return read.state

    def wait(self, promise: str = "durable", timeout: float | None = None) -> None:
        """Waits for every save so far, as `Handle.wait`, and then raises what failed."""
        for handle in list(self._handles):
            with contextlib.suppress(SaveFailed):
                handle._await(promise, timeout)
        # A later failure is raised by the next save.
        waited = [handle for handle in self._handles if promise not in handle._kept]
        self._handles = [handle for handle in self._handles if not handle.done() or handle._is_unraised()]
        raise_failed(waited)
        for handle in waited:
            if not handle._raised:
                # It is on this node's disk, and stays there for the next process.
                handle.wait(promise)

    def close(self, timeout: float | None = None) -> None:
        """Waits until every save is durable, and raises what failed. Saves of a store that does not answer stay local, and the
        next Checkpointer of this run on this node makes them durable."""
        if self._closed or os.getpid() != self._process:
            return
        self._closed = True
        self._work.put(None)
        until = None if timeout is None else time.monotonic() + timeout
        if self._saver is not None:
            while self._saver.is_alive():
                self._saver.join(0.5)
                if until is not None and time.monotonic() >= until:
                    break
        if self._saver is None or not self._saver.is_alive():
            self._staging.close()
            self._retention.close(None if until is None else until - time.monotonic())
        _shutdown.forget(self)
        for handle in self._handles:
            if "durable" in handle._kept or (handle.done() and "local" not in handle._kept):
                continue
            kept = "it is on this node's disk" if "local" in handle._kept else "it is lost"
            warnings.warn(
                f"towline: {handle.name} is not durable: {kept}: {handle.error or 'out of time'}", stacklevel=2
            )
        self._check()

    def _path(self, file: str) -> str:
        return file if self.world_size == 1 else f"rank-{self.rank:05}/{file}"

    def _explained(self, error: NotFound, step: int | str) -> Error:
        there = self.steps()
        if isinstance(step, int) and step not in there:
            return NotFound(f"{self.run} has no step {step} (saved are {there or 'none'})")
        return NotFound(f"{error} (was {self.run} saved by a Checkpointer of rank {self.rank} of {self.world_size}?)")

    def _can_stage(self, length: int) -> bool:
        return length <= self.repository._engine.memory() or self._fits(length)

    def _fits(self, length: int) -> bool:
        """May as much be staged? The budget is the engine's; a stage is memory of the node's beside it."""
        available = 0
        with contextlib.suppress(OSError, ValueError, StopIteration), open("/proc/meminfo", encoding="ascii") as lines:
            available = int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) << 10
        # What is there to stage in is used again.
        return length <= (available + self._staging.length) // 2

    def _save_unstaged(self, job: Job) -> Handle:
        warnings.warn(
            f"towline: {job.handle.name} is {job.length} bytes, more than can be staged beside the memory budget of "
            f"{self.repository._engine.memory()}: it is saved before save() returns",
            stacklevel=3,
        )
        self._finish_pending()
        held = [leaf.tensor.contiguous().cpu() for leaf in job.described.leaves]
        order = sorted(range(len(held)), key=lambda at: job.starts[at])
        pieces: list[Any] = [job.header]
        pieces += [(held[at].data_ptr(), _torch.nbytes(held[at])) for at in order if _torch.nbytes(held[at])]
        files = [(self._path(TENSORS), pieces), (self._path(DOCUMENT), [job.described.document])]
        name = job.handle.name
        with _progress.counting(job.progress, name) as counters, self._own(name) as expected:
            options = {**job.options, **self._part(name), **expected}
            if counters is not None:
                options["progress"] = counters
            report = self.repository._engine.save_files(files, name, options)
            job.handle.report = SaveReport.read(json.loads(report))
        self._made(name)
        job.handle._keep(*PROMISES)
        self._expire()
        return job.handle

    def _save_options(self, metrics: Mapping[str, float] | None, labels: Mapping[str, str] | None) -> dict[str, Any]:
        return save_options(
            metrics,
            world_size=self.world_size,
            framework="pytorch",
            labels=labels,
            key_every=self.key_every,
            compression=self.compression,
        )

    def _part(self, name: str) -> dict[str, Any]:
        """What is options of a step's part, where ranks save parts."""
        return {} if self._attempts is None else {"part": (self.rank, self._attempts.at(name))}

    def _made(self, name: str) -> None:
        if self._attempts is not None:
            self._attempts.made(name)

    def _start(self) -> None:
        if self._saver is None or not self._saver.is_alive():
            self._saver = threading.Thread(target=self._run, name="towline-saver", daemon=True)
            self._saver.start()

    def _run(self) -> None:
        """The saver's thread: one save after the other."""
        while (job := self._work.get()) is not None:
            try:
                if not job.staged:
                    job.fill(self._staging)
                with _progress.following(job.progress, job.handle.name, job.handle.progress):
                    self._save(job)
            except BaseException as error:
                if job.stage is not None:
                    job.stage.release()
                job.handle._fail(error)

    def _save(self, job: Job) -> None:
        engine, handle, options, stage = self.repository._engine, job.handle, job.options, job.taken()
        kept = None
        if self._spool is not None:
            try:
                kept = spool.put(self._spool, handle.name, options, self._files_on_disk(job))
                handle._keep("local")
            except OSError as error:
                # Such as a full disk, which the repository does not need.
                warnings.warn(f"towline: {handle.name} is not kept on this node's disk: {error}", stacklevel=2)
        files: list[_towline.File] = [
            (self._path(TENSORS), [job.header, stage]),
            (self._path(DOCUMENT), [job.described.document]),
        ]
        try:
            with self._own(handle.name) as expected:
                handle._saving = engine.begin_save_files(files, handle.name, {**options, **expected})
                handle._saving.wait()
                handle.report = SaveReport.read(json.loads(handle._saving.result() or "{}"))
        except (Unreachable, Exhausted) as error:
            if kept is None:
                raise
            handle._fail(error, over=False)
            # It is on the disk: the next step may be staged meanwhile.
            stage.release()
            self._retry(handle, kept)
        if kept is not None:
            spool.remove(kept)
        handle.error = None
        handle._keep("local", "durable")
        self._expire()

    def _files_on_disk(self, job: Job) -> list[tuple[str, list[Any]]]:
        staged = (job.taken().address, job.length)
        return [(self._path(TENSORS), [job.header, staged]), (self._path(DOCUMENT), [job.described.document])]

    def _retry(self, handle: Handle, kept: str) -> None:
        """The store does not answer: what is local waits until it does, or until the loop ends."""
        pause = 1.0
        while not self._closed:
            time.sleep(pause)
            pause = min(pause * 2, 60.0)
            try:
                handle.report = spool.save(self.repository, kept)
                return
            except (Unreachable, Exhausted) as error:
                handle._fail(error, over=False)
        raise handle.error or Error("it ended without a result")

    def _save_left_over(self) -> None:
        """Makes durable what an earlier process of this run left on this node's disk."""
        if self._spool is None:
            return
        for kept in spool.left(self._spool, self.run, self.rank):
            try:
                if not spool.outdated(self.repository, kept):
                    spool.save(self.repository, kept)
            except Error as error:
                warnings.warn(f"towline: a step left at {kept} is not durable yet: {error}", stacklevel=3)
                continue
            spool.remove(kept)

    def _expire(self) -> None:
        if self.rank == 0:
            self._retention.expire(self.repository, self.run)

    def _finish_pending(self) -> None:
        """Waits for what goes on, but not for a store that does not answer."""
        # In a forked child nothing goes on.
        pending = list(self._handles) if os.getpid() == self._process else []
        for handle in pending:
            while not handle.done() and handle.error is None:
                with contextlib.suppress(SaveFailed, Timeout):
                    handle._await("durable", timeout=0.5)

    def _check(self) -> None:
        """Raises what failed since the last call."""
        if os.getpid() != self._process:
            raise UsageError("a Checkpointer belongs to the process that made it: make another in the child")
        over, self._handles = self._handles, [handle for handle in self._handles if not handle.done()]
        raise_failed(over)

    def _look(self) -> None:
        """Notes which steps there are: this process may replace them."""
        try:
            self._seen = dict(self.repository._engine.names(self.run))
        except Error:
            # A store that is away may be back when there is something to save; then it is not known who saved what.
            self._seen = None

    @contextlib.contextmanager
    def _own(self, name: str) -> Iterator[dict[str, Any]]:
        """Options for a name that is saved in the block, so that no other process's step is replaced. Parts of
        ranks have attempts for that."""
        if self._attempts is not None or self._seen is None or not name.startswith(f"{self.run}/"):
            yield {}
            return
        version = self._version(name)
        if version and name not in self._unsure and self._seen.get(name) != version:
            raise Conflict(
                f"{name} was saved by another process since this Checkpointer began: it stays as it is (give each process a "
                "run of its own, or its rank and world_size; to replace it, make another Checkpointer)"
            )
        # If this fails it may be saved all the same, and only the answer is lost.
        self._unsure.add(name)
        try:
            yield {"version": version}
        except Conflict:
            self._unsure.discard(name)
            raise
        with contextlib.suppress(Error):
            self._seen[name] = self._version(name)
            self._unsure.discard(name)

    def _version(self, name: str) -> int:
        """The version that a name has; 0 if it is not there."""
        found = self.repository._engine.find(name)
        return found[1] if found is not None and found[0] == name else 0


class Reading(NamedTuple):
    """How a state is read: see `Checkpointer.restore`."""

    into: Any = None
    map_location: str | torch.device | None = None
    pickle: bool = False
    strict: bool = True
    cast: bool = False
    progress: _progress.Progress = None


class Read(NamedTuple):
    """A state that was read, how long its tensors are, the GPUs that they went to, and what it and `into` lacked."""

    state: Any
    bytes: int
    gpus: set[torch.device]
    missing: list[str]
    unexpected: list[str]


def read_state(
    repository: Repository,
    name: str,
    path: str,
    document: bytes,
    how: Reading,
) -> Read:
    """The state whose document is given and whose tensors are the file at `path` of the tree `name`."""
    engine = repository._engine
    tensors = [tensor for tensor in json.loads(engine.tensors(name)) if tensor["path"] == path]
    held = {tensor["name"]: (tensor["dtype"], tuple(tensor["shape"])) for tensor in tensors}

    restoring = states.Restoring(
        document, held, how.into, how.map_location, how.pickle, strict=how.strict, cast=how.cast
    )
    leaves = restoring.leaves.items()
    wants = [(key, path, None, tensor.data_ptr(), _torch.nbytes(tensor)) for key, tensor in leaves]
    wants = [want for want in wants if want[-1]]
    with _progress.counting(how.progress, name) as counters:
        if wants:
            engine.read_tensors(name, wants, counters)
    length = sum(tensor["bytes"] for tensor in tensors)
    return Read(restoring.state(), length, restoring.gpus, restoring.missing, restoring.unexpected)


def _one_of(what: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UsageError(f"{what} is {' or '.join(map(repr, choices))}, not {value!r}")


def _spool_folder(repository: Repository, given: str | os.PathLike[str] | None) -> str:
    name = repository._engine.spool_name()
    if given is not None:
        return os.path.join(os.fspath(given), name)
    return os.path.join(os.path.dirname(repository._engine.cache()), name, "spool")
