"""Restores into what is there: what does not fit is told, by its path, and nothing is filled then."""

from __future__ import annotations

import collections

import pytest
import torch
import towline

from .test_state import again, same


def model(dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)).to(dtype)


@pytest.mark.parametrize(
    ("value", "into", "missing"),
    [
        ({"a": 1}, {"a": 0, "scaler": {"scale": 2.0}}, ["state['scaler']"]),
        ({"a": {"b": 1}}, {"a": {"b": 0, "c": 0}}, ["state['a']['c']"]),
        ({"a": 1}, {"a": torch.zeros(2)}, ["state['a']"]),
        ({"a": None}, {"a": torch.nn.Linear(2, 2)}, ["state['a']"]),
        ({"a": 1.0}, {"a": {"b": torch.zeros(2)}}, ["state['a']"]),
        ({"a": [torch.ones(1)]}, {"a": [torch.zeros(1), torch.zeros(1)]}, ["state['a'][1]"]),
        ({1: 0}, {1: 0, 2: 0}, ["state[2]"]),
        ({"a": 1}, collections.defaultdict(int, a=0, b=0), ["state['b']"]),
    ],
)
def test_what_the_state_lacks_is_named(value, into, missing):
    with pytest.raises(towline.Mismatch, match="strict=False") as caught:
        again({"first": torch.ones(2), **value}, {"first": torch.zeros(2), **into})
    assert list(caught.value.missing_keys) == missing and all(path in str(caught.value) for path in missing)
    assert isinstance(caught.value, (RuntimeError, ValueError)), "as torch raises, and as it always was"
    again(value, into, strict=False)


def test_a_value_where_a_tensor_is_wanted_is_named():
    with pytest.raises(
        towline.Mismatch, match=r"holds no tensor, as `into` does, but a plain value at state\['step'\]"
    ) as caught:
        again({"step": 3}, {"step": torch.zeros(())})
    assert "lacks" not in str(caught.value) and list(caught.value.missing_keys) == ["state['step']"]


def test_nothing_is_filled_if_something_is_missing(repository):
    with towline.Checkpointer(repository, "run") as checkpointer:
        checkpointer.save(1, {"w": torch.ones(3), "more": torch.ones(2)}).wait()
        into = {"w": torch.zeros(3), "ema": torch.full((3,), 5.0)}
        with pytest.raises(towline.Mismatch, match=r"lacks state\['ema'\].*holds state\['more'\]"):
            checkpointer.restore(into=into)
        assert torch.equal(into["w"], torch.zeros(3))
        back = checkpointer.restore(into=into, strict=False)
        assert torch.equal(into["w"], torch.ones(3)) and torch.equal(into["ema"], torch.full((3,), 5.0))
        assert set(back) == {"w", "more"}
        assert checkpointer.missing_keys == ["state['ema']"] and checkpointer.unexpected_keys == ["state['more']"]
        # What only the step has is part of what is returned.
        assert set(checkpointer.restore(into={"w": torch.zeros(3)})) == {"w", "more"}
        assert checkpointer.missing_keys == [] and checkpointer.unexpected_keys == ["state['more']"]


@pytest.mark.parametrize("key", ["0.weight", "1.running_mean"])
def test_a_module_that_differs_is_named_before_it_is_filled(key):
    saved = model(seed=1)
    lacking = {name: tensor for name, tensor in saved.state_dict().items() if name != key}
    for value, path in (
        (lacking, f"lacks state['m']['{key}']"),
        ({**saved.state_dict(), "odd": torch.ones(1)}, "holds state['m']['odd']"),
    ):
        into = model()
        before = {name: tensor.clone() for name, tensor in into.state_dict().items()}
        with pytest.raises(towline.Mismatch) as caught:
            again({"m": value}, {"m": into})
        assert path in str(caught.value)
        assert all(torch.equal(tensor, before[name]) for name, tensor in into.state_dict().items())
        again({"m": value}, {"m": into}, strict=False)
        assert torch.equal(into.state_dict()["0.bias"], saved.state_dict()["0.bias"])


class Renamed(torch.nn.Linear):
    """As models of old versions: it takes keys that it does not give."""

    def _load_from_state_dict(self, state_dict, prefix, *args):
        if prefix + "kernel" in state_dict:
            state_dict[prefix + "weight"] = state_dict.pop(prefix + "kernel")
        super()._load_from_state_dict(state_dict, prefix, *args)


def test_a_module_with_its_own_way_is_left_to_it():
    into = torch.nn.Sequential(Renamed(2, 2))
    again({"m": {"0.kernel": torch.ones(2, 2), "0.bias": torch.ones(2)}}, {"m": into})
    assert torch.equal(into[0].weight, torch.ones(2, 2))
    with pytest.raises(towline.Mismatch, match=r"(?s)state\['m'\] does not take .*0\.odd") as caught:
        again({"m": {"0.odd": torch.ones(2, 2), "0.bias": torch.ones(2)}}, {"m": into})
    assert caught.value.place == "state['m']"


@pytest.mark.parametrize("fault", [AttributeError("no attribute"), IndexError("list index"), TypeError("none")])
def test_an_object_that_fails_at_a_saved_state_does_not_take_it(fault):
    class Failing(torch.nn.Linear):
        def load_state_dict(self, *_, **__):
            raise fault

    with pytest.raises(towline.Mismatch, match=r"state\['m'\] does not take the saved state") as caught:
        again({"m": torch.nn.Linear(2, 2)}, {"m": Failing(2, 2)})
    assert caught.value.place == "state['m']" and caught.value.__cause__ is fault


def test_optimizers_take_what_they_lack():
    def trained(seed):
        made = model(seed=seed)
        return {"model": made, "optimizer": torch.optim.AdamW(made.parameters())}

    one, two = trained(1), trained(2)
    one["model"](torch.randn(5, 4)).sum().backward()
    one["optimizer"].step()
    again(one, two)
    assert len(two["optimizer"].state) == 4
    fewer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    with pytest.raises(towline.Mismatch, match=r"state\['optimizer'\] does not take"):
        again(one, {"optimizer": fewer})


def test_precision_is_converted_where_that_is_asked_for(repository):
    saved, into = model(seed=1), model(torch.bfloat16)
    with towline.Checkpointer(repository, "run") as checkpointer:
        checkpointer.save(1, {"m": saved, "n": torch.arange(3)}).wait()
        with pytest.raises(
            towline.Mismatch, match=r"state\['m'\]\['0.weight'\].*\(cast=True converts it to torch.bfloat16\)"
        ):
            checkpointer.restore(into={"m": into})
        checkpointer.restore(into={"m": into}, cast=True)
        for name, tensor in into.state_dict().items():
            assert torch.equal(tensor, saved.state_dict()[name].to(tensor.dtype)), name
        # Other numbers, or other shapes, are none of a precision.
        for wrong in (torch.zeros(3), torch.zeros(3, dtype=torch.int32), torch.zeros(4, dtype=torch.int64)):
            with pytest.raises(towline.Mismatch, match=r"state\['n'\] does not fit") as caught:
                checkpointer.restore(into={"n": wrong}, cast=True)
            assert "cast" not in caught.value.help and "leave it out" in caught.value.help


def test_tensors_lie_in_memory_as_they_did(repository):
    image = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    value = {
        "image": image,
        "turned": torch.arange(12.0).view(3, 4).t(),
        "wide": torch.randn(2, 3, 4, dtype=torch.complex128).permute(2, 0, 1),
        "conv": torch.nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last),
        "tied": image,
    }
    with towline.Checkpointer(repository, "run") as checkpointer:
        checkpointer.save(1, value).wait()
        back = checkpointer.restore()
    for key in ("image", "turned", "wide"):
        assert same(back[key], value[key]) and back[key].stride() == value[key].stride(), key
    assert back["image"].is_contiguous(memory_format=torch.channels_last)
    assert back["conv"]["weight"].stride() == value["conv"].weight.stride()
    back["tied"].fill_(3)
    assert back["image"].eq(3).all(), "what shared memory shares it again"


def test_gaps_in_memory_are_not_kept():
    value = {"slice": torch.arange(10.0)[::2], "column": torch.arange(6.0).view(3, 2)[:, 0]}
    back = again(value)
    assert all(same(back[key], value[key]) and back[key].is_contiguous() for key in value)


def test_dicts_are_updated_in_place_as_by_torch(repository):
    saved, tensor = model(seed=1), torch.ones(2)
    inner, training = {"epoch": 0, "own": 1}, {"m": model(seed=2), "w": torch.zeros(2), "step": 0, "own": 7, "extra": 5}
    training["loop"] = inner
    target = training["w"]
    with towline.Checkpointer(repository, "run") as checkpointer:
        assert checkpointer.restore(into=training) is None and training["step"] == 0
        checkpointer.save(3, {"m": saved, "w": tensor, "step": 3, "own": 7, "loop": {"epoch": 2}, "more": [1]}).wait()
        before = dict(training)
        with pytest.raises(towline.Mismatch):
            checkpointer.restore(into=training)
        assert training == before
        back = checkpointer.restore(into=training, strict=False)
    assert (training["step"], training["extra"], training["more"], inner) == (3, 5, [1], {"epoch": 2, "own": 1})
    assert training["loop"] is inner and training["w"] is target and torch.equal(target, tensor)
    assert training["m"] is before["m"] is back["m"] and torch.equal(back["m"][0].weight, saved[0].weight)
    assert checkpointer.missing_keys == ["state['extra']", "state['loop']['own']"]
    assert checkpointer.unexpected_keys == ["state['more']"]


def test_an_expanded_tensor_of_into_is_refused_before_anything_is_filled(tmp_path):
    checkpointer = towline.Checkpointer(str(tmp_path / "repository"), "run")
    checkpointer.save(1, {"a": torch.ones(3), "x": torch.ones(1).expand(4), "z": torch.ones(2)}).wait("durable")
    into = {"a": torch.zeros(3), "x": torch.zeros(1).expand(4), "z": torch.zeros(2)}
    with pytest.raises(towline.Mismatch, match=r"x'?\]? is an expanded tensor.*contiguous"):
        checkpointer.restore(into=into)
    assert not any(tensor.any() for tensor in into.values())
    into["x"] = into["x"].contiguous()
    checkpointer.restore(into=into)
    assert all(tensor.all() for tensor in into.values())
    checkpointer.close()
