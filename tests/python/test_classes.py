"""Values that Python makes classes for: kept without pickle, and made again only where somebody vouches for the class."""

from __future__ import annotations

import abc
import argparse
import collections
import dataclasses
import datetime
import enum
import functools
import json
import pathlib
import types
import typing
import zoneinfo

import pytest
import torch
import towline
from towline import _classes, state

from .test_state import again

UTC = datetime.timezone.utc
Point = collections.namedtuple("Point", ["x", "y"])


class Colour(enum.Enum):
    RED = "red"
    BLUE = object()


class Level(enum.IntEnum):
    LOW = 1


class Rights(enum.Flag):
    READ = enum.auto()
    WRITE = enum.auto()


@dataclasses.dataclass
class Config:
    lr: float
    weights: torch.Tensor = dataclasses.field(default_factory=lambda: torch.zeros(2))
    where: pathlib.Path | None = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    __slots__ = ("n",)
    n: int


CLASSES = (Point, Colour, Level, Rights, Config, Frozen)


@pytest.fixture
def allowed():
    """The classes of this file, until the test is over."""
    towline.allow_classes(*CLASSES)
    yield
    _classes._allowed.clear()


@pytest.mark.parametrize(
    "value",
    [
        pathlib.Path("/a/b"), pathlib.Path("a") / "\udcff", pathlib.PurePosixPath("a/b"), pathlib.PureWindowsPath(r"c:\x"),
        datetime.datetime(2026, 1, 2, 3, 4, 5, 6), datetime.datetime(2026, 1, 2, tzinfo=UTC), datetime.date(2026, 1, 2),
        datetime.datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin")), datetime.time(3, 4),
        datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone(datetime.timedelta(hours=-5, minutes=-30))),
        datetime.timedelta(days=-1, microseconds=3), collections.deque([1, 2, "a"], maxlen=5), collections.deque(),
        collections.defaultdict(list, {"a": [1]}), collections.defaultdict(None, {1: 2}),
        argparse.Namespace(lr=0.1, path=pathlib.Path("x")), types.SimpleNamespace(a=1), 1 << 20_000, -(3**10_000),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_plain_values_need_no_class(value):
    back = again({"value": value, "list": [value]})
    assert type(back["value"]) is type(value) and back["value"] == value == back["list"][0]
    if isinstance(value, collections.deque):
        assert back["value"].maxlen == value.maxlen
    if isinstance(value, collections.defaultdict):
        assert back["value"].default_factory is value.default_factory
    if isinstance(value, datetime.datetime):
        assert back["value"].fold == value.fold and back["value"].utcoffset() == value.utcoffset()


VALUES = {
    "point": Point(1, torch.ones(2)), "colour": Colour.RED, "level": Level.LOW, "rights": Rights.READ | Rights.WRITE,
    "config": Config(0.1, torch.ones(3), pathlib.Path("x")), "frozen": Frozen(7), "keys": {Colour.BLUE: 1, Point(1, 2): 2},
}  # fmt: skip


def check(back: dict) -> None:
    assert type(back["point"]) is Point and back["point"].x == 1 and torch.equal(back["point"].y, torch.ones(2))
    assert back["colour"] is Colour.RED and back["level"] is Level.LOW and back["rights"] == Rights.READ | Rights.WRITE
    config = back["config"]
    assert type(config) is Config and (config.lr, config.where) == (0.1, pathlib.Path("x"))
    assert torch.equal(config.weights, torch.ones(3)) and back["frozen"] == Frozen(7)
    assert back["keys"] == VALUES["keys"]


def test_objects_of_classes_that_are_allowed(allowed, repository):
    assert b"pickle" not in state.describe(VALUES, pickle=True).document
    check(again(VALUES))
    with towline.Checkpointer(repository, "run") as checkpointer:
        checkpointer.save(1, VALUES).wait()
        check(checkpointer.restore())


def test_objects_of_classes_that_are_there_already():
    into = {
        "point": Point(0, torch.zeros(2)), "colour": Colour.BLUE, "level": Level.LOW, "rights": Rights.READ,
        "config": Config(1.0, torch.zeros(3)), "frozen": Frozen(0), "keys": {Colour.BLUE: 0, Point(1, 2): 0},
    }  # fmt: skip
    there = into["config"].weights, into["point"].y
    back = again(VALUES, into)
    check(back)
    assert back["config"].weights is there[0] and back["point"].y is there[1], "tensors are filled where they are"


@pytest.mark.parametrize("key", [key for key in VALUES if key != "keys"])
def test_a_name_in_stored_data_makes_nothing(key):
    value = {"here": [VALUES[key]]}
    with pytest.raises(towline.Mismatch, match=r"state\['here'\]\[0\] holds .*allow_classes") as caught:
        again(value)
    assert caught.value.place == "state['here'][0]" and caught.value.help
    # Nor does an object of another class, or kind.
    for other in (5, VALUES, VALUES["frozen" if key != "frozen" else "config"]):
        with pytest.raises(towline.Mismatch):
            again(value, {"here": [other]}, strict=False)
    # Who trusts pickles trusts this.
    assert type(again(value, pickle=True)["here"][0]) is type(VALUES[key])


@pytest.mark.parametrize(
    "name", ["os:system", "subprocess:Popen", "builtins:dict", "towline:Error", "nowhere:Thing", "tests:", ":", ""]
)
@pytest.mark.parametrize("kind", ["dataclass", "namedtuple", "Enum"])
def test_a_name_that_is_no_such_class_makes_nothing_even_where_pickles_are_trusted(name, kind):
    node = {"!": kind, "class": name, "v": [["a", 1]], "name": "A"}
    document = json.dumps({"towline": 1, "state": node}).encode()
    for pickle in (False, True):
        with pytest.raises(towline.Mismatch):
            state.restore(document, {}, lambda wanted: None, pickle=pickle)


def test_classes_that_changed(allowed):
    def changed(node, **said):
        document = json.dumps({"towline": 1, "state": {**node, **said}}).encode()
        return state.restore(document, {}, lambda wanted: None)

    config = {"!": "dataclass", "class": f"{__name__}:Config"}
    assert changed(config, v=[["lr", 0.5]]).where is None, "a new field has its default"
    # Classes are found where they were moved to.
    assert changed({"!": "dataclass", "class": "__main__:Config"}, v=[["lr", 0.5]]).lr == 0.5
    with pytest.raises(towline.Mismatch, match="its field lr was not saved"):
        changed(config, v=[])
    with pytest.raises(towline.Mismatch, match="more was saved, and it has no such field"):
        changed({"!": "dataclass", "class": f"{__name__}:Frozen"}, v=[["n", 1], ["more", 2]])
    with pytest.raises(towline.Mismatch, match=r"it has the fields \['x', 'y'\]"):
        changed({"!": "namedtuple", "class": f"{__name__}:Point"}, v=[["x", 1]])
    with pytest.raises(towline.Mismatch, match="it has no member GREEN"):
        changed({"!": "Enum", "class": f"{__name__}:Colour"}, name="GREEN")


def test_only_such_classes_are_allowed():
    for wrong in (int, torch.nn.Linear, dict, "Config", Config(1.0)):
        with pytest.raises(towline.UsageError, match="no dataclass, named tuple or enumeration"):
            towline.allow_classes(wrong)

    @towline.allow_classes
    @dataclasses.dataclass
    class Local:
        a: int = 1

    try:
        assert again(Local(2)) == Local(2)
    finally:
        _classes._allowed.clear()


def test_a_defaultdict_of_something_else_wants_one_like_it():
    value = {
        "counts": collections.defaultdict(
            lambda: collections.defaultdict(int), {"a": collections.defaultdict(int, b=1)}
        )
    }
    with pytest.raises(towline.Mismatch, match=r"state\['counts'\] holds a defaultdict of .*<lambda>.*`into`"):
        again(value)
    factory = lambda: 5  # noqa: E731
    back = again(value, {"counts": collections.defaultdict(factory)})["counts"]
    assert back == value["counts"] and back.default_factory is factory and back["a"]["other"] == 0


def nested(depth: int):
    value: object = 1
    for at in range(depth):
        value = [value] if at % 2 else {"a": value}
    return value


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ({"n": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])}, r"state\['n'\].*a nested tensor.*unbind"),
        (
            {"n": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)},
            r"state\['n'\].*nested",
        ),
        ({"deep": nested(2000)}, r"state\['deep'\]\[0\]\['a'\].* \.\.\. .*nested more than 128 levels deep"),
        (
            {"t": datetime.datetime(2026, 1, 2, tzinfo=type("Zone", (datetime.tzinfo,), {})())},
            r"state\['t'\].*datetime",
        ),
        ({"c": Config(1.0, where=open)}, r"state\['c'\]\.where"),
        ({"c": argparse.Namespace(a=[open])}, r"state\['c'\]\.a\[0\]"),
    ],
)
def test_what_cannot_be_kept_is_named(value, what):
    with pytest.raises(towline.UnsupportedValue, match=what):
        state.describe(value)


def test_what_is_nested_as_deep_as_may_be():
    value = nested(128)
    assert again(value) == value
    tuples: object = 1
    for _ in range(128):
        tuples = (tuples,)
    assert again(tuples, tuples) == tuples
    with pytest.raises(towline.UnsupportedValue, match="nested"):
        state.describe(nested(129))


class Selfish:
    """Its state is itself."""

    def state_dict(self):
        return self

    def load_state_dict(self, state):
        raise AssertionError


def test_a_state_that_never_ends_is_refused():
    with pytest.raises(towline.UnsupportedValue, match="holds itself"):
        state.describe({"a": Selfish()})


class Runner:
    """Base class of a dataclass that is none itself."""

    def command(self) -> str:
        return "ls"


@dataclasses.dataclass
class Job(Runner):
    n: int
    limit: typing.ClassVar[int] = 5
    ran: typing.ClassVar[list[object]] = []

    @staticmethod
    def double_it(n: int) -> int:
        return 2 * n

    @property
    def plugin(self) -> None:
        self.ran.append("get")

    @plugin.setter
    def plugin(self, value: object) -> None:
        self.ran.append(value)

    @functools.cached_property
    def double(self) -> int:
        return 2 * self.n


class Pair(typing.NamedTuple):
    a: int


class PairWithMore(Pair):
    @functools.cached_property
    def double(self) -> int:
        return 2 * self.a


def document_of(kind: str, cls: type, *pairs: list) -> bytes:
    node = {"!": kind, "class": _classes.named(cls), "v": list(pairs)}
    return json.dumps({"towline": 1, "state": {"at": node}}).encode()


@pytest.mark.parametrize(
    "name",
    ["plugin", "command", "__class__", "__dict__", "__init__", "__weakref__", "__eq__", "__anything__"],
)
@pytest.mark.parametrize("is_there", [False, True], ids=["allowed", "in into"])
def test_attributes_of_the_class_are_not_set(name, is_there):
    towline.allow_classes(Job)
    document = document_of("dataclass", Job, ["n", 1], [name, {"x": 1}])
    into = {"at": Job(0)} if is_there else None
    try:
        with pytest.raises(
            towline.Damaged, match=rf"at state\['at'\] a .*:Job with the attribute '{name}'.*expected"
        ) as caught:
            state.restore(document, {}, lambda wanted: None, into)
        assert caught.value.place == "state['at']" and caught.value.help
        if name.startswith("__"):
            with pytest.raises(towline.Damaged):
                state.restore(document, {}, lambda wanted: None, into, pickle=True)
    finally:
        _classes._allowed.clear()
    assert Job.ran == [] and Job(1).command() == "ls", "nothing of the class ran, nor was changed"


def test_a_name_in_stored_data_reads_no_attribute_of_what_is_there():
    document = document_of("dataclass", Job, ["n", 1], ["plugin", 5])
    with pytest.raises(towline.Damaged):
        state.restore(document, {}, lambda wanted: None, {"at": Job(0)})
    assert Job.ran == []


def test_attributes_that_are_no_fields_are_kept_unless_they_hide_something():
    job = Job(3)
    # A counter may begin as an attribute of the class.
    job.note, job._count, job.limit, _ = "kept", [1, torch.ones(2)], 7, job.double
    back = again(job, Job(0))
    assert (back.n, back.note, back._count[0], vars(back).keys()) == (3, "kept", 1, {"n", "note", "_count", "limit"})
    assert (back.limit, Job.limit) == (7, 5)
    assert torch.equal(back._count[1], torch.ones(2)) and back.double == 6, "a cached property is computed anew"
    # So it is for one that an earlier version saved.
    into = {"at": Job(0)}
    saved = document_of("dataclass", Job, ["n", 4], ["double", 100])
    assert state.restore(saved, {}, lambda wanted: None, into)["at"].double == 8


@pytest.mark.parametrize("name", ["double_it", "command", "__version"])
def test_an_object_that_could_not_be_restored_is_not_saved(name):
    job = Job(3)
    vars(job)[name] = 7
    with pytest.raises(
        towline.UnsupportedValue, match=rf"state\[0\] cannot be saved: .*\.Job with attributes .*: {name} \("
    ) as caught:
        state.describe([job])
    assert caught.value.place == "state[0]" and "pickle=True" in caught.value.help
    # With pickle=True all attributes are restored.
    described = state.describe([job], pickle=True)
    assert described.pickled == ["state[0]"] and described.classes == []
    assert vars(again([job], pickle=True)[0]) == {"n": 3, name: 7}


def test_what_an_earlier_version_saved_is_restored_for_those_who_trust_it():
    document = document_of("dataclass", Job, ["n", 1], ["command", 9])
    (back,) = state.restore(document, {}, lambda wanted: None, {"at": Job(0)}, pickle=True).values()
    assert (back.n, back.command, Job(0).command()) == (1, 9, "ls")


def test_a_named_tuple_with_more_than_its_fields_is_not_saved():
    pair = PairWithMore(1)
    assert pair.double == 2
    assert again(pair, PairWithMore(0)).double == 2, "a cached property is computed anew"
    pair.more = 1
    with pytest.raises(towline.UnsupportedValue, match="PairWithMore with attributes that cannot be restored: more "):
        state.describe(pair)
    assert again(pair, pickle=True).more == 1


def test_a_class_that_makes_nothing_is_named():
    class Abstract(abc.ABC):
        n: int = 1

        @abc.abstractmethod
        def run(self): ...

    towline.allow_classes(made := dataclasses.dataclass(Abstract))
    try:
        with pytest.raises(
            towline.Mismatch, match=r"state\['at'\] holds .*Abstract.* __new__ makes none without arguments"
        ):
            state.restore(document_of("dataclass", made), {}, lambda wanted: None)
    finally:
        _classes._allowed.clear()


@pytest.mark.parametrize("kind", [argparse.Namespace, types.SimpleNamespace])
@pytest.mark.parametrize("name", ["__dict__", "__class__", "__eq__", "_get_kwargs"])
def test_names_that_no_namespace_has(kind, name):
    if not hasattr(kind, name):
        assert again(kind(**{name: 1})) == kind(**{name: 1})
        return
    node = {"!": kind.__name__, "v": [["lr", 1], [name, 1]]}
    document = json.dumps({"towline": 1, "state": [node]}).encode()
    with pytest.raises(towline.Damaged, match=rf"state\[0\].*'{name}'") as caught:
        state.restore(document, {}, lambda wanted: None)
    assert caught.value.place == "state[0]"
    value = kind()
    vars(value)[name] = 1
    with pytest.raises(towline.UnsupportedValue, match=rf"state\[0\].*{kind.__name__} .*'{name}'"):
        state.describe([value])
