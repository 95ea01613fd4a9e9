"""Checkpoints of a training loop: saved in the background, restored in one call.

save ----> staged ----> local ----> durable
           (copied      (written    (committed in
            to host      to this     the repository)
            memory)      node's
                         disk)
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import threading
import time
import uuid
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from . import (
    _arguments,
    _backlog,
    _origins,
    _progress,
    _shutdown,
    _torch,
    _towline,
    retention,
    spool,
)
from . import state as states
from ._afterwards import Afterwards
from ._attempts import Attempts
from ._backlog import Backlog, Calls, Waiting, finish, only_here
from ._devices import gpus
from ._documents import document_in
from ._left import LeftSteps
from ._mixing import Mixing
from ._owners import Owner
from ._reading import DOCUMENT, TENSORS, Reading, read_state, saved_otherwise
from ._staging import Job, Staging
from ._unresumed import UnresumedSteps
from ._versions import snapshot
from .errors import Busy, Conflict, Error, Exhausted, Mismatch, NotFound, SaveFailed, Timeout, Unreachable, UsageError
from .handle import LEVELS, Handle, raise_failed
from .reports import SaveReport
from .repository import Compression, Repository, check_compression, opened, save_options
from .retention import Branch, GivenUp, Retention
from .spool import Unusable, set_aside

if TYPE_CHECKING:
    import torch


class Checkpointer:
    """Saves the steps of one training run, and restores them. For a training loop of your own; with Accelerate use
    `towline.accelerate.AccelerateCheckpointer`, with Lightning or Hugging Face's Trainer their plugins.

    `repo` is a Repository or its URL, `run` the name of the run. A missing repository is created, with a warning in the log,
    unless this user had one in this folder, whose disk may not be mounted: NotFound. `create` is as for `towline.open`.

    Ranks: each creates a Checkpointer with its own `rank`. A step becomes visible once all `world_size` ranks have saved their
    part; no collective is needed. `attempt` identifies a start of the job, since parts that different starts saved must not be
    mixed. By default the ranks agree on one through the store of torch.distributed, or else take it from torchrun, srun or
    mpirun. Without these, `save` raises UsageError: pass a text that all ranks share and that changes at every start. Ranks that
    were given one, or have it from a launcher, must all restore the same step before their first save, or none: this tells apart
    starts that resumed from different steps, even if they use one `attempt`. Two that resumed from the same step with the same
    `attempt` are not told apart. `restore` raises Mismatch for a step of another `world_size`: a rank restores what it saved.

    Resuming: a process that restores an earlier step may replace the later steps that it saved or found. If it then saves a step
    before the last of them, it gives them up: they are removed right before that save, so that no restart resumes them, and
    `Repository.undelete` restores them for 7 days; kept by a rule below or not. If two processes save
    the same step, the first commit wins and the other save fails with Conflict: a step that another process saved after this
    Checkpointer was created, or after its last restore, is not replaced. Nor is one that another Checkpointer saved before, also
    one in this process, if this one restores nothing: a training that begins anew uses another run name.

    Staging: with `stage="blocking"` `save` returns when the state is copied to host memory; with `"background"` it returns at
    once, and the state must not change before it is copied (see `protect`). One state is staged at a time: a save waits until
    the memory of the one before is free, or with `when_busy="skip"` skips the step and returns None.

    Retention: the last `keep_last` steps, every `keep_every`th, and those with the smallest (`keep_min`) or largest (`keep_max`)
    value of a metric are kept; without these arguments, all are. Rank 0 deletes the others in the background. With
    `collect=False`, or if the store refuses deletes, only their names are removed: run `Repository.collect` or `towline collect`
    with delete permission to free the space.

    Storage: a step is stored as its differences to an earlier step, every `key_every`th step whole. `compression` is `"auto"` (as
    small as possible), `"if-faster"` (uncompressed while the store takes bytes faster than they can be compressed), `"predict"`
    (for runs that save each step: weights and second moments are predicted from the step before, so that reading a step reads
    those back to its key step) or `"off"`.
    `spool` is a folder on this node that holds states until they are uploaded; by default `$XDG_STATE_HOME/towline/spool`, else
    `~/.local/state/towline/spool`. States of a running process are left to it: another one may restore meanwhile. It is not
    used if the repository itself is a folder on this node. If the store does not take a step, `close`, the end of a with block
    and the end of the process retry it for `close_retry` seconds. `pickle` also allows values that can only be pickled. With
    `on_sigterm`, SIGTERM raises SystemExit, so that saves are finished, unless the program handles SIGTERM.
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
        keep_min: str | Iterable[str] = (),
        keep_max: str | Iterable[str] = (),
        key_every: int | None = None,
        compression: Compression = "auto",
        collect: bool = True,
        spool: str | os.PathLike[str] | None = None,
        pickle: bool = False,
        on_sigterm: bool = True,
        create: bool | None = None,
        close_retry: float = 60.0,
    ):
        if not 0 <= rank < world_size:
            raise UsageError(f"rank {rank} is out of range for world_size {world_size}")
        _arguments.check_run(run)
        _one_of("stage", stage, ("blocking", "background"))
        _one_of("when_busy", when_busy, ("wait", "skip"))
        check_compression(compression)
        _arguments.check_close_retry(close_retry)
        self.repository = opened(repo, create=create, caller="towline.Checkpointer")
        self.run, self.rank, self.world_size = run, rank, world_size
        self.stage, self.when_busy, self.pickle = stage, when_busy, pickle
        self.key_every, self.compression = key_every, compression
        #: Step that the last `restore` loaded.
        self.step: int | None = None
        #: Of the last `restore`, as from torch's load_state_dict: paths that only `into` has, and paths that only the step has.
        self.missing_keys: list[str] = []
        self.unexpected_keys: list[str] = []
        self._attempts = Attempts(attempt) if world_size > 1 else None
        self._retention = Retention(keep_last, keep_every, keep_min, keep_max, collect=collect)
        self._staging = Staging()
        self._work: queue.Queue[Any] = queue.Queue()
        self._handles: list[Handle] = []
        self._protected: Handle | None = None
        #: `Job.settled` of the step that was staged last.
        self._settled = threading.Event()
        self._settled.set()
        self._process = os.getpid()
        self._spool = None if self.repository._engine.is_local() else _spool_folder(self.repository, spool)
        self._unusable, self._owner = Unusable(), Owner()
        self._backlog = Backlog(
            Calls(self._check_origin, self._give_up, set_aside, self._upload, self._expire), self.repository.url
        )
        #: Ids of starts whose steps are, or were, in the spool: the first is this Checkpointer's, if there is only one rank.
        self._starts = [] if world_size > 1 else [uuid.uuid4().hex]
        #: True while a save waits for the staging memory.
        self._wanted = False
        self._saver: threading.Thread | None = None
        self._closed, self._close_retry = False, close_retry
        #: Time (of time.monotonic) until which a closed Checkpointer retries saves.
        self._ends = 0.0
        _shutdown.watch(self)
        if on_sigterm:
            _shutdown.exit_on_sigterm()
        #: Version of each step that this process knows. For names in `_unsure`, its own save may have made a newer one.
        self._seen: dict[str, int] | None = None
        self._unsure: set[str] = set()
        self._branch, self._mixing = Branch(), Mixing(self.repository, run, self._is_of_start)
        self._afterwards = Afterwards(self.repository, run, self._retention, self._mixing)
        self._unresumed = UnresumedSteps(self.repository, run, "call restore() before the first save", self._is_left)
        if self._spool is not None:
            self._save_pending()
        self._look()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        try:
            self.close()
        except Error as error:
            if kind is None:
                raise
            warnings.warn(f"towline: {error}", stacklevel=2)

    def save(
        self,
        step: int,
        state: Any,
        metrics: Mapping[str, float] | None = None,
        *,
        stage: str | None = None,
        progress: _progress.Progress = None,
    ) -> Handle | None:
        """Saves `state` as this step. Returns a Handle once the state is staged, or at once with `stage="background"`; None if
        the step was skipped (`when_busy="skip"`).

        `progress` is called as `progress(phase, done, total, moved)`, in bytes, several times a second until the step is durable,
        from its own thread. True draws a progress bar instead, if there is a terminal or a notebook.

        Raises UnsupportedValue for a state that cannot be saved, and UsageError for a step that is no integer or a metric that is
        not finite. Raises SaveFailed if an earlier save failed and no `wait` has raised that yet, and SaveConflict if the run had
        the step when this Checkpointer was created, and nothing was restored; this step is then not saved.
        """
        step = _arguments.step_number(step)
        self._unresumed.check(f"{self.run}/step-{step}")
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
        _arguments.check_save(name, options)
        if self._attempts is not None:
            self._attempts.current()
        self._check(name)
        if self._closed:
            raise UsageError(f"{name} cannot be saved: this Checkpointer is closed (create a new one)")
        described = states.describe(state, self.pickle, stateful)
        job = Job(Handle(name, step), described, options, progress, self._branch.saved(name, step))
        if not self._can_stage(job.length):
            return self._save_unstaged(job)
        timeout = 0 if self.when_busy == "skip" else None
        self._wanted = timeout is None
        try:
            job.stage = self._staging.take(job.length, timeout)
        finally:
            self._wanted = False
        if job.stage is None:
            return None
        try:
            # The step before may have failed since this call began.
            self._settled.wait()
            self._check(name)
            self._sign(job)
            if stage == "blocking":
                job.fill(self._staging)
        except BaseException:
            job.stage.release()
            raise
        if stage == "background":
            self._protected = job.handle
        self._made(name)
        self._handles.append(job.handle)
        self._settled = job.settled
        self._start()
        self._work.put(job)
        return job.handle

    def prepare(self, state: Any) -> None:
        """Allocates the staging memory for `state` in the background, so that the first save blocks no longer than later ones.
        Call it some time before that save. `restore` calls it by itself."""
        self._check()
        if self._closed:
            raise UsageError("nothing can be prepared: this Checkpointer is closed (create a new one)")
        leaves = states.describe(state, self.pickle).leaves
        self._prepare(sum(leaf.length for leaf in leaves), gpus(leaf.tensor for leaf in leaves))

    def _prepare(self, length: int, devices: set[torch.device]) -> None:
        # If there is not enough memory, the save reports it.
        if self._can_stage(length):
            with contextlib.suppress(MemoryError):
                self._staging.prepare(length, devices)

    def protect(self, optimizer: torch.optim.Optimizer) -> None:
        """Makes `optimizer.step()` wait until the state that is being staged in the background is copied."""
        me = weakref.ref(self)

        def wait_until_staged(*_: Any) -> None:
            checkpointer = me()
            if checkpointer is not None and checkpointer._protected is not None:
                with contextlib.suppress(SaveFailed):
                    checkpointer._protected._await("staged")
                checkpointer._protected = None

        optimizer.register_step_pre_hook(wait_until_staged)

    def steps(self) -> list[int]:
        """All saved steps, in order."""
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
        """Returns the state at `step`: a number, `"latest"`, `"upto=N"`, `"min=METRIC"` or `"max=METRIC"`. Every byte is
        verified. Returns None if `step` is `"latest"` and nothing is saved yet. Sets `self.step` to the step restored.

        Pass as `into` what you pass to `save`. As with `torch.distributed.checkpoint.load`, it is loaded in place: tensors are
        filled, objects with `load_state_dict` load their state, and values in dicts are replaced. The result is the same state.
        All other tensors are created on the CPU, or on `map_location`.

        Raises Mismatch, before anything is changed, if `into` has a key that the step lacks. With `strict=False` such values stay
        as they are, and modules load with `strict=False`. A key that only the step has is an error only within a module;
        elsewhere it is added. As after torch's `load_state_dict`, the attributes `missing_keys` and `unexpected_keys` list both.
        `cast` converts tensors to the precision of `into`, such as an fp32 step for a bf16 model.

        Dataclasses, named tuples and enumerations are created only if `into` has an object of the class at the same place, or
        the class was given to `towline.allow_classes`. `progress` is as for `save`.

        With `into`, the staging memory for the first save is allocated in the background, as by `prepare`. Pass `prepare=False`
        if nothing is going to be saved.
        """
        _progress.check(progress)
        self._finish_pending()
        engine = self.repository._engine
        if _arguments.is_step(step):
            step = _arguments.step_number(step)
        name = None
        try:
            name = engine.resolve(f"{self.run}/step-{step}" if isinstance(step, int) else f"{self.run}@{step}")
            tree, _ = snapshot(engine, name, lambda tree: self._check_world_size(tree.name))
            document = document_in(self.repository, tree, self._path(DOCUMENT))
        except NotFound as error:
            if step == "latest" and not self.steps():
                return None
            if name is None and not isinstance(step, int):
                raise
            raise self._explained(error, step, name) from error
        found = int(name.rpartition("step-")[2])
        # Before anything is loaded: the store may not answer.
        waiting = [handle.name for handle in self._handles if not handle.done()]
        left = [kept.step for kept, _ in list(self._backlog.left)]
        later = retention.later(self.repository, self.run, found, waiting, step == "latest", left)
        reading = Reading(into, map_location, self.pickle, strict, cast, progress)
        read = read_state(self.repository, tree, self._path(TENSORS), document, reading)
        self.step, self.missing_keys, self.unexpected_keys = found, read.missing, read.unexpected
        self._unresumed.resumed()
        self._look()
        self._branch.restored(found, later)
        if self._attempts is not None:
            self._attempts.resumed(found, tree.version)
        if into is not None and prepare and not self._closed and os.getpid() == self._process:
            self._prepare(read.bytes, read.gpus)
        return read.state

    def wait(self, level: str = "durable", timeout: float | None = None) -> None:
        """Waits until every save so far is `"staged"`, `"local"` or `"durable"`; then raises SaveFailed if one failed."""
        for handle in list(self._handles):
            with contextlib.suppress(SaveFailed):
                handle._await(level, timeout)
        # A later failure is raised by the next save.
        waited = [handle for handle in self._handles if level not in handle._reached]
        self._handles = [handle for handle in self._handles if not handle.done() or handle._is_unraised()]
        raise_failed(waited)
        for handle in waited:
            if not handle._raised:
                # The step is on this node's disk, and stays there for the next process.
                handle.wait(level)

    def close(self, timeout: float | None = None) -> None:
        """Waits until every save is durable, or `timeout` seconds; raises SaveFailed if one failed. If the store takes no bytes,
        it retries for `close_retry` seconds. Then it raises SaveFailed, too: the steps stay in the spool, and the next
        Checkpointer of this run on this node uploads them."""
        if self._closed or os.getpid() != self._process:
            return
        self._ends = time.monotonic() + self._close_retry
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
            self._afterwards.close(self._ends, until)
        _shutdown.forget(self)
        open_ones = [handle for handle in self._handles if "durable" not in handle._reached]
        for handle in open_ones:
            if not handle.done() and "local" not in handle._reached:
                warnings.warn(f"towline: {handle.name} is not durable: it is lost: out of time", stacklevel=2)
        only_here = [handle for handle in open_ones if "local" in handle._reached]
        try:
            self._check()
        except SaveFailed:
            if only_here:
                warnings.warn(f"towline: {self._only_here(only_here)}", stacklevel=2)
            raise
        if only_here:
            raise self._only_here(only_here) from only_here[0].error

    def _only_here(self, handles: list[Handle]) -> SaveFailed:
        """Exception for steps that are only in the spool."""
        spool = self._spool or ""
        arguments = [repr(self.repository.url), repr(self.run)]
        if self.world_size > 1:
            arguments += [f"rank={self.rank}", f"world_size={self.world_size}"]
        if os.path.dirname(spool) != _default_spool():
            arguments.append(f"spool={os.path.dirname(spool)!r}")
        upload = f"towline.Checkpointer({', '.join(arguments)}).close()"
        remedy = f"run `{upload}` on this node, or start the training here again: both upload them"
        return only_here(handles, self.repository.url, spool, remedy)

    def _patience(self, is_wanted: bool = False) -> float | None:
        """Seconds without progress after which the upload of a step in the spool ends: another state waits for its memory, or
        `close` waits for it."""
        if is_wanted:
            return _backlog.SILENCE.total_seconds()
        return max(self._close_retry, _backlog.SLOW.total_seconds()) if self._closed else None

    def _path(self, file: str) -> str:
        return file if self.world_size == 1 else f"rank-{self.rank:05}/{file}"

    def _explained(self, error: NotFound, step: int | str, name: str | None) -> Error:
        there = self.steps()
        if isinstance(step, int) and step not in there:
            return NotFound(f"{self.run} has no step {step} (saved are {there or 'none'})")
        other = None if name is None else saved_otherwise(self.repository, name)
        if other is not None:
            return other
        return NotFound(f"{error} (was {self.run} saved with rank={self.rank} and world_size={self.world_size}?)")

    def _check_world_size(self, name: str) -> None:
        """Raises Mismatch for a step of another number of ranks: each rank restores the state that it saved."""
        saved = next((one.world_size for one in self.repository.ls(name) if one.name == name), None)
        if saved is None or saved == self.world_size:
            return
        help = (
            f"start with world_size={saved}, or save with towline.dcp.StorageWriter, whose steps any number of ranks can load; "
            f"`towline.Checkpointer(REPO, RUN, rank=R, world_size={saved}).restore(STEP)` returns the state of rank R"
        )
        error = Mismatch(
            f"{name} has the states of world_size={saved} ranks, one for each, and this Checkpointer has "
            f"world_size={self.world_size} ({help})"
        )
        error.place, error.help = name, help
        raise error

    def _can_stage(self, length: int) -> bool:
        return length <= self.repository._engine.memory() or self._fits(length)

    def _fits(self, length: int) -> bool:
        """Is there memory on the node to stage `length` bytes? The staging memory does not count against the engine's budget."""
        available = 0
        with contextlib.suppress(OSError, ValueError, StopIteration), open("/proc/meminfo", encoding="ascii") as lines:
            available = int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) << 10
        # The current staging memory is reused.
        return length <= (available + self._staging.length) // 2

    def _save_unstaged(self, job: Job) -> Handle:
        warnings.warn(
            f"towline: {job.handle.name} is {job.length} bytes, too large to be staged in addition to the memory budget of "
            f"{self.repository._engine.memory()}: it is saved before save() returns",
            stacklevel=3,
        )
        self._finish_pending()
        held = [leaf.tensor.contiguous().cpu() for leaf in job.described.leaves]
        order = sorted(range(len(held)), key=lambda at: job.starts[at])
        pieces: list[Any] = [job.header]
        pieces += [(held[at].data_ptr(), _torch.nbytes(held[at])) for at in order if _torch.nbytes(held[at])]
        name = job.handle.name
        self._sign(job)
        files = [(self._path(TENSORS), pieces), (self._path(DOCUMENT), [job.document])]
        self._check_order(job)
        self._give_up(job.given_up)
        with _progress.counting(job.progress, name) as counters, self._own(name) as expected:
            options = {**job.options, **expected}
            if counters is not None:
                options["progress"] = counters
            report = self.repository._engine.save_files(files, name, options)
            job.handle.report = SaveReport.read(json.loads(report))
        self._made(name)
        job.handle._reach(*LEVELS)
        self._expire()
        self._afterwards.wait(_backlog.SILENCE.total_seconds())
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

    def _sign(self, job: Job) -> None:
        """Adds the id of this start to a state; and the options for this rank's part of the step, if there are several ranks."""
        if self._attempts is None:
            job.document = _origins.signed(job.described.document, self._starts[0])
            return
        start = self._attempts.current()
        job.document = _origins.signed(job.described.document, start)
        job.options["part"] = (self.rank, self._attempts.for_save(job.handle.name))
        if start not in self._starts:
            self._starts.append(start)

    def _made(self, name: str) -> None:
        self._mixing.saved(name)
        if self._attempts is not None:
            self._attempts.record(name)

    def _start(self) -> None:
        if self._saver is None or not self._saver.is_alive():
            self._saver = threading.Thread(target=self._run, name="towline-saver", daemon=True)
            self._saver.start()

    def _run(self) -> None:
        """Runs the saver thread: one save after the other."""
        while True:
            job = self._work.get()
            if job is None:
                self._backlog.close(self._ends)
                self._owner.release()
                return
            try:
                if not job.staged:
                    job.fill(self._staging)
                with _progress.following(job.progress, job.handle.name, job.handle.progress):
                    self._save(job)
            except BaseException as error:
                if job.stage is not None:
                    job.stage.release()
                job.handle._fail(error)
                job.settled.set()

    def _save(self, job: Job) -> None:
        engine, handle, options, stage = self.repository._engine, job.handle, job.options, job.taken()
        given_up = None if job.given_up is None or job.given_up.removed else job.given_up
        kept = None
        origin = _origins.known(self._seen, self._starts)
        if self._spool is not None:
            try:
                recorded = {**options, **self._known(handle.name, given_up)}
                files_on_disk = self._files_on_disk(job)
                kept = spool.put(self._spool, handle.name, recorded, files_on_disk, given_up, origin, self._owner)
                handle._reach("local")
                self._unusable.ended()
            except OSError as error:
                # For example, the disk is full; the save to the repository needs no space there.
                self._unusable.tell(self._spool, handle.name, error)
        if kept is None:
            self._check_order(job)
        waiting = None if kept is None else Waiting(handle, kept, given_up, origin)
        if waiting is not None and self._backlog.follow(waiting):
            stage.release()
            job.settled.set()
            return
        files: list[_towline.File] = [
            (self._path(TENSORS), [job.header, stage]),
            (self._path(DOCUMENT), [job.document]),
        ]
        try:
            # A step in the spool does not wait for a store that hangs: others wait for its memory.
            limit = None if kept is None else _backlog.SILENCE
            self._give_up(given_up, limit)
            with self._own(handle.name, limit) as expected:
                handle._saving = engine.begin_save_files(files, handle.name, {**options, **expected})
                if waiting is None:
                    handle.report = finish(handle._saving, lambda: None)
                else:
                    silent = partial(self._backlog.silent, waiting)
                    handle.report = finish(handle._saving, lambda: self._patience(self._wanted), silent)
        except (Unreachable, Exhausted, Conflict) as error:
            if waiting is None or kept is None:
                raise
            if isinstance(error, Conflict) and not isinstance(error, Busy):
                # Another process has the step: the next one on this node must not replace it.
                spool.remove(kept)
                handle._drop()
                raise
            # The state is in the spool: its memory is free for the next step.
            stage.release()
            self._backlog.add(waiting, error)
            job.settled.set()
            return
        except BaseException:
            if kept is not None:
                self._backlog.leave(kept, handle)
            raise
        if kept is not None:
            spool.remove(kept)
        handle.error = None
        handle._reach("local", "durable")
        self._backlog.durable(handle)
        job.settled.set()
        self._expire()

    def _check_origin(self, waiting: Waiting, limit: timedelta) -> None:
        """Raises Superseded for a step of the backlog if another process has continued the run."""
        _origins.check(self.repository, self.run, waiting.origin, self._is_own, limit)

    def _is_own(self, name: str, version: int) -> bool:
        """True if this Checkpointer saved the step, or an earlier one of this rank from the same spool."""
        if self._seen is not None and self._seen.get(name) == version:
            return True
        return self._is_of_start(name)

    def _is_of_start(self, name: str) -> bool:
        """True if this start, whose ranks share its id, saved the step, or one whose steps are or were in the same spool."""
        return _origins.start_of(self.repository, name, self._path(DOCUMENT), _backlog.SILENCE) in self._starts

    def _is_left(self, name: str) -> bool:
        """True if a process that left steps in the spool saved this one."""
        return len(self._starts) > 1 and self._is_of_start(name)

    def _upload(self, waiting: Waiting) -> SaveReport:
        """Uploads a step of the backlog."""
        handle = waiting.handle
        with self._own(handle.name, _backlog.SILENCE) as expected:
            handle._saving = spool.begin_save(self.repository, waiting.kept, expected)
            return finish(handle._saving, self._patience)

    def _files_on_disk(self, job: Job) -> list[tuple[str, list[Any]]]:
        staged = (job.taken().address, job.length)
        return [(self._path(TENSORS), [job.header, staged]), (self._path(DOCUMENT), [job.document])]

    def _save_pending(self) -> None:
        """Uploads the steps that an earlier process of this run left in the spool."""
        if self._spool is None:
            return
        left = LeftSteps(self.repository, self.run, self.rank, self._spool, self._backlog)
        self._starts += [start for start in left.starts() if start not in self._starts]
        left.upload(self._is_own)

    def _expire(self) -> None:
        if self.rank == 0:
            self._afterwards.request()

    def _give_up(self, given_up: GivenUp | None, limit: timedelta | None = None) -> None:
        """As `retention.give_up`. Every rank calls this before its part: the first one removes the steps, and parts of a step
        begin after that."""
        if given_up is None or given_up.removed:
            return
        retention.give_up(self.repository, self.run, given_up, limit)
        self._backlog.drop_left(given_up)
        for name in given_up.versions:
            if self._seen is not None:
                self._seen.pop(name, None)

    def _finish_pending(self) -> None:
        """Waits for pending saves, except those whose store does not answer."""
        # A forked child has no saver thread.
        pending = list(self._handles) if os.getpid() == self._process else []
        for handle in pending:
            while not handle.done() and handle.error is None:
                with contextlib.suppress(SaveFailed, Timeout):
                    handle._await("durable", timeout=0.5)

    def _check(self, name: str | None = None) -> None:
        """Raises the saves that failed since the last call; `name` is then not saved either."""
        if os.getpid() != self._process:
            raise UsageError("a Checkpointer cannot be used in a forked child: create a new one there")
        over, self._handles = self._handles, [handle for handle in self._handles if not handle.done()]
        raise_failed(over, name)

    def _look(self) -> None:
        """Records the current steps: this process may replace them."""
        try:
            self._seen = dict(self.repository._engine.names(self.run, _backlog.SILENCE))
        except Error:
            # The store may be back at the next save; without the record, no step is protected from being replaced.
            self._seen = None
        self._mixing.begin(self._seen)
        self._unresumed.begin(self._seen if self._attempts is None else None)

    @contextlib.contextmanager
    def _own(self, name: str, limit: timedelta | None = None) -> Iterator[dict[str, Any]]:
        """Options for a save of `name` within the block that make it fail rather than replace another process's step. With
        several ranks, attempts do that instead. Raises Unreachable if the store does not answer within `limit`."""
        if self._seen is None or not self._is_protected(name):
            yield {}
            self._unresumed.saved(name)
            return
        version = self._version(name, limit)
        if version and name not in self._unsure and self._seen.get(name) != version:
            raise _saved_by_another(name)
        # If the save fails, it may still have committed, and only the answer was lost.
        self._unsure.add(name)
        try:
            yield {"version": version}
        except Conflict as error:
            self._unsure.discard(name)
            if self._version(name, limit) != version:
                raise _saved_by_another(name) from error
            raise
        self._unresumed.saved(name)
        with contextlib.suppress(Error):
            self._seen[name] = self._version(name, _backlog.VERSION)
            self._unsure.discard(name)

    def _check_order(self, job: Job) -> None:
        """Raises Unreachable for a step that is not in the spool, if it gives up steps while there are some in the spool: those
        would become durable later, and count as the latest."""
        if job.given_up is not None and self._backlog:
            raise Unreachable(
                f"{job.handle.name} would replace later steps, but {len(self._backlog)} earlier saves wait in {self._spool} "
                "until the store answers (save it again once they are durable, or free space there)"
            )

    def _known(self, name: str, given_up: GivenUp | None) -> dict[str, Any]:
        """As `_own`, for a save by a later process, which removes the steps `given_up` first: by what this one knows, without
        asking the store."""
        if not self._is_protected(name):
            return {}
        if given_up is not None and name in given_up.versions:
            return {"version": 0}
        if self._seen is None or name in self._unsure:
            return {}
        return {"version": self._seen.get(name, 0)}

    def _is_protected(self, name: str) -> bool:
        """True for a step that only this process should save: one of this run, and not of several ranks."""
        return self._attempts is None and name.startswith(f"{self.run}/")

    def _version(self, name: str, limit: timedelta | None) -> int:
        """Current version of a name; 0 if it does not exist."""
        found = self.repository._engine.find(name, limit)
        return found[1] if found is not None and found[0] == name else 0


def _saved_by_another(name: str) -> Conflict:
    """Conflict for a step that must not be replaced."""
    error = Conflict(
        f"{name} was saved by another process since this Checkpointer began: it is not replaced (give each process its "
        "own run, or its rank and world_size; to replace the step, restore a step first)"
    )
    error.place, error.help = name, "give each process its own run, or its rank and world_size"
    return error


def _one_of(what: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UsageError(f"{what} is {' or '.join(map(repr, choices))}, not {value!r}")


def _spool_folder(repository: Repository, given: str | os.PathLike[str] | None) -> str:
    name = repository._engine.spool_name()
    if given is not None:
        return os.path.join(os.fspath(given), name)
    return os.path.join(_default_spool(), name)


def _default_spool() -> str:
    return os.path.join(_state_folder(), "spool")


def _state_folder() -> str:
    """This user's folder for data that must outlive processes and caches: XDG_STATE_HOME
    (https://specifications.freedesktop.org/basedir-spec/latest/)."""
    state = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return os.path.join(state, "towline")
