"""The Checkpointer: what each promise means, and what happens when things go wrong."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
import towline

from . import servers


def training(seed: int = 0) -> dict:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 8))
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01), "step": 0}


def train(state: dict, steps: int) -> list[str]:
    losses = []
    for _ in range(steps):
        torch.manual_seed(state["step"])
        state["optimizer"].zero_grad()
        loss = state["model"](torch.randn(4, 64)).pow(2).mean()
        loss.backward()
        state["optimizer"].step()
        state["step"] += 1
        losses.append(loss.item().hex())
    return losses


def large(mib: int = 64, seed: int = 0) -> dict:
    return {f"layer{at}": torch.full((1 << 20,), float(seed * 100 + at)) for at in range(mib // 4)}


def run_script(text: str, *args: str, **wanted) -> subprocess.Popen:
    """Python in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", textwrap.dedent(text), *args]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, **wanted)


def test_a_run_resumes_bit_for_bit(repository):
    whole = train(training(), 8)
    with towline.Checkpointer(repository, "run") as checkpointer:
        assert checkpointer.restore() is None and checkpointer.steps() == []
        state = training()
        before = train(state, 5)
        checkpointer.save(5, state, metrics={"loss": 0.25})
    state = training(seed=9)
    checkpointer = towline.Checkpointer(repository, "run")
    state.update(checkpointer.restore(into=state))
    assert (checkpointer.step, state["step"]) == (5, 5)
    assert before + train(state, 3) == whole
    checkpointer.close()


def test_what_is_saved_is_what_was_there_when_save_returned(repository):
    state = large()
    with towline.Checkpointer(repository, "run") as checkpointer:
        handle = checkpointer.save(1, state)
        for tensor in state.values():
            tensor.fill_(-1.0)
        handle.wait("durable")
        back = checkpointer.restore(1)
    assert all(torch.equal(back[f"layer{at}"], torch.full((1 << 20,), float(at))) for at in range(16))


def test_in_the_background_the_optimizer_waits_for_the_copy(repository):
    state = training()
    train(state, 2)
    want = {key: value.clone() for key, value in state["model"].state_dict().items()}
    with towline.Checkpointer(repository, "run", stage="background") as checkpointer:
        checkpointer.protect(state["optimizer"])
        for step in range(2, 6):
            checkpointer.save(step, state)
            train(state, 1)
        back = checkpointer.restore(2)
        assert checkpointer.steps() == [2, 3, 4, 5]
    assert all(torch.equal(back["model"][key], want[key]) for key in want)


def test_promises_come_in_order_and_can_be_awaited(repository):
    with towline.Checkpointer(repository, "run") as checkpointer:
        handle = checkpointer.save(1, large())
        assert handle.wait("staged") is handle
        with pytest.raises(towline.UsageError, match="durable"):
            handle.wait("soon")
        assert handle.wait("local", timeout=60) and handle.wait("durable", timeout=60) and handle.done()
        assert handle.report.logical_bytes > 64 << 20 and "durable" in repr(handle)
        phase, done, total, moved = handle.progress()
        assert done == total > 64 << 20 and moved > 0 and phase


def test_saves_wait_for_the_one_stage_or_are_left_out(repository):
    state = large(256)
    with towline.Checkpointer(repository, "run", when_busy="skip") as checkpointer:
        handles = [checkpointer.save(step, state) for step in range(20)]
        kept = [handle.step for handle in handles if handle is not None]
        assert handles[0] is not None and None in handles
        checkpointer.wait()
        assert checkpointer.steps() == kept


def test_memory_does_not_grow_over_saves(tmp_path):
    repository = towline.open(tmp_path / "repository", memory="128M")
    state = large(128)

    def resident() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) << 10

    with towline.Checkpointer(repository, "run", keep_last=1) as checkpointer:
        for step in range(3):
            checkpointer.save(step, state)
        checkpointer.wait()
        before = resident()
        for step in range(3, 30):
            state["layer0"].fill_(step)
            checkpointer.save(step, state)
        checkpointer.wait()
        assert resident() - before < 100 << 20
    assert checkpointer.steps() == [29]


def test_a_state_larger_than_what_can_be_staged_is_saved_all_the_same(repository, monkeypatch):
    monkeypatch.setattr(towline.Checkpointer, "_fits", lambda self, length: False)
    small = towline.open(repository.url, memory="64M")
    state = {**large(128), "turned": torch.arange(12.0).view(3, 4).t()}
    with towline.Checkpointer(small, "run", keep_last=1) as checkpointer:
        with pytest.warns(UserWarning, match="before save"):
            checkpointer.save(0, {"layer0": torch.zeros(32 << 20)})
            handle = checkpointer.save(1, state)
        assert handle.done() and handle.report and checkpointer.steps() == [1]
        back = checkpointer.restore()
    assert all(torch.equal(back[key], state[key]) for key in state)


def test_choices_and_retention(repository):
    with towline.Checkpointer(repository, "run", keep_last=2, keep_min=["loss"]) as checkpointer:
        for step, loss in enumerate([3.0, 1.0, 2.0, 2.5, 2.75]):
            checkpointer.save(step, {"at": torch.tensor(step)}, metrics={"loss": loss}).wait()
    with towline.Checkpointer(repository, "run") as checkpointer:
        assert checkpointer.steps() == [1, 3, 4]
        for choice, step in {"latest": 4, "min=loss": 1, "max=loss": 4, "upto=3": 3, 3: 3}.items():
            assert checkpointer.restore(choice)["at"] == step == checkpointer.step
        with pytest.raises(towline.NotFound, match=r"no step 2 \(saved are \[1, 3, 4\]\)"):
            checkpointer.restore(2)
        with pytest.raises(FileNotFoundError):
            checkpointer.restore("min=accuracy")


def comes_to(checkpointer, steps):
    """Waits until the steps are these: they expire after the save."""
    for _ in range(200):
        if checkpointer.steps() == steps:
            return
        time.sleep(0.05)
    assert checkpointer.steps() == steps


def test_a_training_that_goes_back_keeps_what_it_saves_then(repository, caplog):
    with towline.Checkpointer(repository, "run", keep_last=2, keep_min=["loss"]) as checkpointer:
        for step, loss in {100: 3.0, 200: 1.0, 300: 2.0, 400: 9.0}.items():
            checkpointer.save(step, {"at": torch.tensor(step)}, metrics={"loss": loss}).wait()
        comes_to(checkpointer, [200, 300, 400])
    with towline.Checkpointer(repository, "run", keep_last=2, keep_min=["loss"]) as checkpointer:
        assert checkpointer.restore("min=loss")["at"] == 200
        checkpointer.close()
    assert towline.open(repository.url).runs("run")[0].steps[-1].step == 400, "reading alone gives up nothing"
    with towline.Checkpointer(repository, "run", keep_last=3, keep_min=["loss"]) as checkpointer:
        checkpointer.restore("min=loss")
        checkpointer.save(500, {"at": torch.tensor(500)}, metrics={"loss": 8.0}).wait()
    assert checkpointer.steps() == [200, 300, 400, 500] and not caplog.text.count("gives up"), (
        "an evaluation in between"
    )
    repository.remove("run/step-500")
    with towline.Checkpointer(repository, "run", keep_last=2, keep_min=["loss"]) as checkpointer:
        checkpointer.restore("min=loss")
        checkpointer.save(250, {"at": torch.tensor(250)}, metrics={"loss": 1.5}).wait()
        comes_to(checkpointer, [200, 250])
        assert "gives up the later steps 300, 400" in caplog.text
        checkpointer.save(300, {"at": torch.tensor(-300)}, metrics={"loss": 1.4}).wait()
        comes_to(checkpointer, [200, 250, 300])
        assert checkpointer.restore()["at"] == -300


def test_a_step_that_no_checkpointer_saved_is_said_to_be_one(repository, tmp_path):
    (tmp_path / "checkpoint-5").mkdir()
    (tmp_path / "checkpoint-5" / "trainer_state.json").write_text("{}")
    labels = {"watch.entry": "checkpoint-5"}
    repository.save(tmp_path / "checkpoint-5", "run/step-5", labels=labels, framework="transformers")
    with towline.Checkpointer(repository, "run") as checkpointer:
        for step in ("latest", 5):
            with pytest.raises(towline.NotFound) as raised:
                checkpointer.restore(step)
            text = str(raised.value)
            assert "run/step-5 was not saved by a Checkpointer, but as a checkpoint of transformers" in text
            assert (
                "from checkpoint-5" in text and "`towline restore run/step-5 DIR`" in text and "world_size" not in text
            )
    # Of other ranks it is a question of the ranks.
    (tmp_path / "state.json").write_text("{}")
    repository.save(tmp_path, "third/step-1")
    checkpointer = towline.Checkpointer(repository, "third", rank=1, world_size=2, attempt="1")
    with checkpointer, pytest.raises(towline.NotFound, match="was third saved with rank=1 and world_size=2"):
        checkpointer.restore()


@pytest.mark.parametrize(
    "rules", [{"keep_last": 0}, {"keep_last": -1}, {"keep_last": "3"}, {"keep_every": 2.5}, {"keep_min": [1]}]
)
def test_rules_of_retention_are_checked_at_once(repository, rules):
    with pytest.raises(towline.UsageError, match=next(iter(rules))):
        towline.Checkpointer(repository, "run", **rules)


def test_a_metric_may_be_a_text_and_a_tensor_with_a_gradient(repository):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with towline.Checkpointer(repository, "run", keep_min="loss") as checkpointer:
            for step, loss in enumerate([3.0, 1.0, 2.0]):
                metrics = {"loss": torch.tensor(loss, requires_grad=True)}
                checkpointer.save(step, {"at": torch.tensor(step)}, metrics=metrics).wait()
            assert checkpointer.steps() == [1, 2]


@pytest.mark.parametrize("compression", ["auto", "if-faster", "predict", "off"])
def test_how_small_a_step_is_stored_can_be_said(repository, compression):
    state = {"a": torch.zeros(1 << 20)}
    with towline.Checkpointer(repository, "run", compression=compression) as checkpointer:
        report = checkpointer.save(1, state).wait().report
        assert torch.equal(checkpointer.restore()["a"], state["a"])
    # On a store that is fast enough the word in between may mean either.
    if compression != "if-faster":
        assert (report.stored_bytes < 1 << 20) is (compression in ("auto", "predict"))


def test_other_words_for_compression_are_refused_before_anything_is_saved(repository):
    for word in ("of", "fast", 9, None, True, False):
        with pytest.raises(towline.UsageError, match="'predict' or 'off'"):
            towline.Checkpointer(repository, "run", compression=word)
        with pytest.raises(towline.UsageError, match="'predict' or 'off'"):
            repository.save(repository.url, "name", compression=word)
    assert repository.ls() == []


def test_runs_in_runs_have_steps_of_their_own(repository):
    with towline.Checkpointer(repository, "run/inner") as inner, towline.Checkpointer(repository, "run") as outer:
        inner.save(1, {"a": torch.ones(3)}).wait()
        assert (outer.steps(), inner.steps(), outer.restore()) == ([], [1], None)
        outer.save(2, {"a": torch.ones(3)}).wait()
        assert (outer.steps(), inner.steps()) == ([2], [1])


def test_ranks_make_a_step_together(repository):
    def rank(at: int) -> None:
        with towline.Checkpointer(repository, "run", at, 3, attempt="first") as checkpointer:
            checkpointer.save(7, {"rank": at, "shard": torch.full((1000,), float(at))})

    with towline.Checkpointer(repository, "run", 0, 3, attempt="first") as checkpointer:
        for at in (2, 0):
            rank(at)
        assert checkpointer.steps() == [] and checkpointer.restore() is None, "half a step is no step"
        rank(1)
        assert checkpointer.steps() == [7]
    for at in range(3):
        with towline.Checkpointer(repository, "run", at, 3, attempt="second") as checkpointer:
            back = checkpointer.restore()
            assert back["rank"] == at and torch.equal(back["shard"], torch.full((1000,), float(at)))
    with towline.Checkpointer(repository, "run", 0, 2) as checkpointer, pytest.raises(towline.NotFound):
        checkpointer.restore(8)


def test_what_cannot_be_kept_is_an_error_and_saves_nothing(repository):
    with towline.Checkpointer(repository, "run") as checkpointer:
        with pytest.raises(towline.UnsupportedValue, match=r"state\['f'\]"):
            checkpointer.save(1, {"f": open})
        assert checkpointer.steps() == []
    with pytest.raises(ValueError, match="rank 3"):
        towline.Checkpointer(repository, "run", 3, 3)
    with pytest.raises(ValueError, match="blocking"):
        towline.Checkpointer(repository, "run", stage="never")


def test_a_save_that_waits_for_one_that_fails_raises_its_failure(repository, tmp_path):
    checkpointer = towline.Checkpointer(repository, "run")
    checkpointer.save(1, {"a": torch.ones(4)}).wait()
    (tmp_path / "repository").rename(tmp_path / "gone")
    (tmp_path / "repository").write_text("a file where the repository was")
    checkpointer.save(2, {"a": torch.ones(4)})
    with pytest.raises(towline.SaveFailed, match="run/step-2"):
        checkpointer.save(3, {"a": torch.ones(4)})
    (tmp_path / "repository").unlink()
    (tmp_path / "gone").rename(tmp_path / "repository")
    checkpointer.save(4, {"a": torch.ones(4)}).wait()
    assert checkpointer.steps() == [1, 4]
    checkpointer.close()


def test_a_failed_background_save_raises_at_the_next_call(repository, tmp_path):
    checkpointer = towline.Checkpointer(repository, "run")
    handle = checkpointer.save(1, {"a": torch.ones(4)})
    handle.wait()
    (tmp_path / "repository").rename(tmp_path / "gone")
    (tmp_path / "repository").write_text("a file where the repository was")
    handle = checkpointer.save(2, {"a": torch.ones(5)})
    while not handle.done():
        time.sleep(0.01)
    with pytest.raises(towline.SaveFailed, match="run/step-2") as caught:
        checkpointer.save(3, {"a": torch.ones(6)})
    assert isinstance(caught.value.__cause__, towline.Error)
    with pytest.raises(towline.SaveFailed):
        handle.wait("durable")
    (tmp_path / "repository").unlink()
    (tmp_path / "gone").rename(tmp_path / "repository")
    checkpointer.save(4, {"a": torch.ones(7)}).wait()
    assert checkpointer.steps() == [1, 4]
    checkpointer.close()


def test_what_is_closed_saves_no_more(repository):
    checkpointer = towline.Checkpointer(repository, "run")
    checkpointer.save(1, {"a": torch.ones(4)})
    checkpointer.close()
    checkpointer.close()
    with pytest.raises(towline.UsageError, match="run/step-2 cannot be saved: this Checkpointer is closed"):
        checkpointer.save(2, {"a": torch.ones(4)})
    assert checkpointer.steps() == [1] and torch.equal(checkpointer.restore()["a"], torch.ones(4))


def test_two_processes_on_one_run(repository):
    """Who commits a step second is told; nothing of either is lost silently."""
    a, b = (towline.Checkpointer(repository, "run") for _ in range(2))
    a.save(1, {"who": "a", "w": torch.zeros(1000)}).wait()
    b.save(2, {"who": "b", "w": torch.zeros(1000)}).wait()
    assert a.steps() == b.steps() == [1, 2]
    assert a.restore(2)["who"] == "b" and b.restore(1)["who"] == "a"
    a.close()
    b.close()


def test_two_processes_that_save_one_step(repository):
    """The first to commit it has it, whole; the other is told, whether they overlap or not."""
    a, b = (towline.Checkpointer(repository, "run") for _ in range(2))
    a.save(1, {"who": "a"}).wait()
    with pytest.raises(towline.Conflict, match="run/step-1 was saved by another process") as caught:
        b.save(1, {"who": "b"}).wait()
    assert isinstance(caught.value, towline.SaveFailed) and caught.value.kind == "conflict"
    assert isinstance(caught.value.__cause__, towline.Conflict) and a.restore(1)["who"] == "a"
    # Whoever saved or found a step replaces it: a training that goes back.
    a.save(1, {"who": "a again"}).wait()
    b.restore()
    b.save(1, {"who": "b"}).wait()
    with towline.Checkpointer(repository, "run") as later:
        assert later.restore(1)["who"] == "b"
        later.save(1, {"who": "later"}).wait()
    with pytest.raises(towline.SaveFailed, match="by another process"):
        b.save(1, {"who": "b"}).wait()
    # A step that somebody removed is anybody's.
    repository.remove("run/step-1")
    b.save(1, {"who": "b"}).wait()
    assert b.restore(1)["who"] == "b"
    a.close()
    b.close()


def test_two_saves_of_one_step_at_once_have_one_outcome(repository):
    makers = [towline.Checkpointer(repository, "run") for _ in range(4)]
    for step in range(3):
        handles = [
            maker.save(step, {"who": at, "w": torch.full((1 << 18,), float(at))}) for at, maker in enumerate(makers)
        ]
        errors = []
        for handle in handles:
            try:
                handle.wait()
                errors.append(None)
            except towline.Conflict as error:
                errors.append(str(error))
        (winner,) = (at for at, error in enumerate(errors) if error is None)
        assert all("was saved by another process" in error for error in errors if error is not None), errors
        back = towline.Checkpointer(repository, "run").restore(step)
        assert back["who"] == winner and back["w"].eq(winner).all()
    for maker in makers:
        maker.close()


def test_the_state_in_a_killed_process_is_whole_or_not_there(repository):
    script = """
        import os, sys, torch, towline
        checkpointer = towline.Checkpointer(sys.argv[1], "run")
        for step in range(1000):
            state = {f"layer{at}": torch.full((1 << 18,), float(step)) for at in range(16)}
            checkpointer.save(step, state)
            print(step, flush=True)
    """
    process = run_script(script, repository.url)
    for line in process.stdout:
        if int(line) == 4:
            break
    time.sleep(0.05)
    process.kill()
    process.wait()
    with towline.Checkpointer(repository, "run") as checkpointer:
        steps = checkpointer.steps()
        assert steps == list(range(len(steps))) and len(steps) >= 3
        for step in steps:
            assert all(
                torch.equal(tensor, torch.full((1 << 18,), float(step)))
                for tensor in checkpointer.restore(step).values()
            )
    assert repository.verify(data=True)["damaged"] == []


@pytest.mark.parametrize("way", ["exit", "sigterm", "exception"])
def test_an_end_finishes_what_is_unfinished(repository, way):
    script = """
        import os, sys, time, torch, towline
        checkpointer = towline.Checkpointer(sys.argv[1], "run", stage="background")
        state = {f"layer{at}": torch.full((1 << 20,), 5.0) for at in range(32)}
        checkpointer.save(5, state)
        print("saving", flush=True)
        while sys.argv[2] == "sigterm":
            # One long sleep is not interrupted by a signal that comes right before it.
            time.sleep(0.1)
        if sys.argv[2] == "exception":
            raise RuntimeError("the loop broke")
    """
    process = run_script(script, repository.url, way, stderr=subprocess.PIPE)
    assert process.stdout.readline() == "saving\n"
    if way == "sigterm":
        process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == {"exit": 0, "sigterm": 143, "exception": 1}[way]
    with towline.Checkpointer(repository, "run") as checkpointer:
        assert torch.equal(checkpointer.restore()["layer31"], torch.full((1 << 20,), 5.0))


def test_ctrl_c_ends_a_wait(repository, tmp_path, request):
    # What runs in a shell's background inherits that SIGINT means nothing.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    (tmp_path / "tree").mkdir()
    with open(tmp_path / "tree" / "large", "wb") as file:
        for _ in range(200):
            file.write(os.urandom(1 << 20))
    main = threading.main_thread().ident
    timer = threading.Timer(0.1, lambda: signal.pthread_kill(main, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        for _ in range(100):
            repository.save(tmp_path / "tree", "name", compression="auto")
            repository.remove("name")
    assert repository.verify()["damaged"] == []


def _child(repository, queue) -> None:
    try:
        with towline.Checkpointer(repository, "child") as checkpointer:
            checkpointer.save(1, {"a": torch.arange(1000)})
        queue.put(repository.tensors("child/step-1")["a"].numpy().sum())
    except BaseException as error:
        queue.put(repr(error))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_children_use_a_repository_of_the_parent(repository, method):
    with towline.Checkpointer(repository, "parent") as checkpointer:
        checkpointer.save(1, {"a": torch.ones(3)})
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            child = context.Process(target=_child, args=(repository, queue), daemon=True)
            child.start()
        assert queue.get(timeout=60) == 499500
        child.join(60)
        assert child.exitcode == 0
        assert checkpointer.restore()["a"].sum() == 3


def test_repositories_are_pickled_by_address(repository):
    again = pickle.loads(pickle.dumps(repository))
    assert again.id == repository.id and repr(again) == repr(repository)


def test_what_is_local_survives_a_store_that_goes_away(tmp_path, monkeypatch):
    endpoint, url = servers.s3(monkeypatch)
    line = servers.Line(endpoint)
    repository = towline.open(url, memory="128M", endpoint=line.endpoint)
    checkpointer = towline.Checkpointer(repository, "run", spool=tmp_path / "spool")
    checkpointer.save(1, {"a": torch.ones(1000)}).wait("durable", timeout=60)
    line.cut()
    handle = checkpointer.save(2, {"a": torch.full((1000,), 2.0)})
    handle.wait("local", timeout=60)
    assert not handle.done()
    until = time.monotonic() + 60
    while handle.error is None and time.monotonic() < until:
        time.sleep(0.05)
    assert isinstance(handle.error, towline.Unreachable), "the handle says why"
    # Training goes on.
    later = checkpointer.save(3, {"a": torch.full((1000,), 3.0)})
    line.mend()
    handle.wait("durable", timeout=120)
    later.wait("durable", timeout=120)
    assert checkpointer.steps() == [1, 2, 3] and checkpointer.restore(2)["a"][0] == 2
    assert list((tmp_path / "spool").rglob("*.json")) == []
    checkpointer.close()


def test_what_was_local_when_a_process_died_becomes_durable_with_the_next(tmp_path, monkeypatch):
    endpoint, url = servers.s3(monkeypatch)
    towline.open(url, endpoint=endpoint)
    script = """
        import sys, torch, towline
        url, endpoint, spool = sys.argv[1:]
        repository = towline.open(url, memory="128M", endpoint=endpoint)
        checkpointer = towline.Checkpointer(repository, "run", spool=spool)
        print("open", flush=True)
        sys.stdin.readline()
        checkpointer.save(4, {"a": torch.full((1000,), 4.0)}, metrics={"loss": 0.5}).wait("local")
        print("local", flush=True)
        sys.stdin.readline()
    """
    line = servers.Line(endpoint)
    process = run_script(script, url, line.endpoint, str(tmp_path / "spool"), stdin=subprocess.PIPE)
    assert process.stdout.readline() == "open\n"
    line.cut()
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "local\n"
    process.kill()
    process.wait()
    repository = towline.open(url, memory="128M", endpoint=endpoint)
    with towline.Checkpointer(repository, "run", spool=tmp_path / "spool") as checkpointer:
        assert checkpointer.steps() == [4] and checkpointer.restore("min=loss")["a"][999] == 4


def test_a_full_disk_while_spooling_leaves_nothing(tmp_path, monkeypatch):
    from towline import spool

    def full(file, view):
        file.write(view[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(spool, "_write", full)
    with pytest.raises(OSError, match="No space"):
        spool.put(str(tmp_path / "spool"), "run/step-1", {}, [("state.json", [b"x" * 100])])
    assert [path for path in (tmp_path / "spool").rglob("*") if path.is_file()] == []
