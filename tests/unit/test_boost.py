"""The boost switch: levels, modes, precedence, errors, warnings; no state in between."""

from __future__ import annotations

import doctest
import warnings

import pytest

from adasum_hvd import boost
from adasum_hvd.base import ops
from adasum_hvd.boost import Boost, switch

# The tutorial's second listing.
TUTORIAL = {
    "boost": {
        "mode": "manual",
        "less_bn": False,
        "grad_freeze": False,
        "adasum": True,
        "grad_accumulation": False,
        "dim_reduce": False,
    }
}


class Job:
    """The attributes of a framework's module that the switch uses."""

    def __init__(self, ranks: int, group_op: str = "average", group_size: int = 8):
        self._ranks = ranks
        self._settings = {
            "group_op": group_op,
            "group_size": group_size,
            "kernels": "x",
        }

    def size(self) -> int:
        return self._ranks

    def settings(self) -> dict[str, object]:
        return self._settings


def quiet(*arguments, **options) -> Boost:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return switch(*arguments, **{"gradients_mean": True, **options})


def manual(**flags) -> dict:
    """Return a dictionary that overrides all flags of levels O1 and O2."""
    others = {"less_bn": False, "grad_freeze": False, "adasum": False}
    return {"boost": {"mode": "manual", **others, **flags}}


def test_levels():
    assert quiet() == quiet("O0") == Boost()
    with pytest.warns(UserWarning, match="turns on grad_freeze, less_bn") as caught:
        assert not switch("O1", gradients_mean=True).adasum
    assert len(caught) == 1
    with pytest.warns(UserWarning, match="turns on grad_freeze, less_bn"):
        assert switch("O2").adasum


def test_tutorial():
    assert quiet("O2", TUTORIAL) == Boost(adasum=True)
    assert quiet("O1", TUTORIAL) == Boost(adasum=True)


def test_level_o0_turns_nothing_on():
    """As in MindSpore, which returns before it reads the dictionary; but with a warning."""
    every = {"boost": {"mode": "enable_all"}}
    accumulated = {
        **manual(grad_accumulation=True),
        "grad_accumulation": {"grad_accumulation_step": 4},
    }
    for config, names in (
        (TUTORIAL, "adasum"),
        (accumulated, "grad_accumulation"),
        (every, "adasum, dim_reduce, grad_accumulation, grad_freeze, less_bn"),
    ):
        match = f'level "O0" turns nothing on, but the dictionary has {names}; pass'
        with pytest.warns(UserWarning, match=match):
            assert switch("O0", config, gradients_mean=True) == Boost()
    with pytest.warns(UserWarning, match="dictionary has adasum") as caught:
        assert switch(boost_config_dict=TUTORIAL, gradients_mean=True) == Boost()
    assert len(caught) == 1 and caught[0].filename == __file__
    for silent in ({}, {"boost": {"mode": "auto"}}, manual()):
        assert quiet("O0", silent) == Boost()


def test_manual_overrides_the_level_and_keeps_the_rest():
    with pytest.warns(UserWarning, match="grad_freeze, less_bn"):
        off = {"boost": {"mode": "manual", "adasum": False}}
        assert not switch("O2", off).adasum
    with pytest.warns(UserWarning, match="turns on less_bn, which"):
        keeps = {"boost": {"mode": "manual", "grad_freeze": False}}
        assert switch("O2", keeps).adasum
    with pytest.warns(UserWarning, match=r"nothing reads boost\.adasom; remove"):
        assert not switch("O1", manual(adasom=True)).adasum


def test_auto_ignores_flags_loudly():
    for flag in ("adasum", "dim_reduce"):
        match = rf'nothing reads boost\.{flag}; .*set the mode to "manual"'
        with pytest.warns(UserWarning, match=match):
            assert not switch("O1", {"boost": {flag: True}}).adasum


def test_enable_and_disable_all():
    assert quiet("O2", {"boost": {"mode": "disable_all"}}) == Boost()
    with pytest.raises(
        NotImplementedError,
        match=r"got dim_reduce, grad_freeze, less_bn.*dim_reduce would exclude",
    ):
        switch("O1", {"boost": {"mode": "enable_all"}})


@pytest.mark.parametrize("flag", ["less_bn", "grad_freeze", "dim_reduce"])
def test_algorithms_elsewhere(flag):
    with pytest.raises(NotImplementedError, match=f"got {flag}, which"):
        switch("O1", manual(adasum=True, **{flag: True}))


def test_accumulation():
    config = manual(grad_accumulation=True, adasum=True)
    config["grad_accumulation"] = {"grad_accumulation_step": 4}
    with pytest.warns(UserWarning, match="divide the loss by 4") as caught:
        assert switch("O1", config, gradients_mean=True).accumulation_steps == 4
    assert len(caught) == 1
    assert quiet("O1", manual(grad_accumulation=True)).accumulation_steps == 1
    config["boost"]["grad_accumulation"] = False
    config["grad_accumulation"]["grad_accumulation_step"] = 0  # not read
    with pytest.warns(UserWarning, match="nothing reads grad_accumulation"):
        assert switch("O1", config).accumulation_steps == 1


def test_gradients_mean_is_not_mindspores_default():
    with pytest.warns(UserWarning, match="summed by MindSpore's default") as caught:
        unset = switch("O1", TUTORIAL)
    assert len(caught) == 1
    assert unset == quiet("O1", TUTORIAL)
    assert not quiet("O1", TUTORIAL, gradients_mean=False).gradients_mean


def test_common():
    common = {"common": {"device_number": 4}}
    assert quiet("O1", {**TUTORIAL, **common}).init_arguments() == {
        "group_op": "average",
        "group_size": 4,
    }
    summed = quiet("O1", TUTORIAL, gradients_mean=False)
    assert summed.init_arguments() == {"group_op": "sum", "group_size": 8}
    with pytest.warns(UserWarning, match=r"nothing reads adasum, common\.devices"):
        off = switch("O0", {"common": {"devices": 4}, "adasum": True})
    assert off.init_arguments() == {}
    splits = {"common": {"gradient_split_groups": [50, 100]}}  # buckets have sizes here
    with pytest.warns(UserWarning, match=r"reads common\.gradient_split_groups"):
        switch("O2", splits)


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        (("O3",), ValueError, "boost_level: expected one of O0, O1, O2, but got 'O3'"),
        (("O0", {"boost": {"mode": "all"}}), ValueError, "one of auto, manual.*'all'"),
        (
            ("O0", manual(adasum=1)),
            TypeError,
            "boost adasum: expected a bool, but got 1",
        ),
        (("O0", [1]), TypeError, "boost_config_dict: expected a dict"),
        (
            ("O0", None, 0),
            TypeError,
            "gradients_mean: expected a bool, but got 0",
        ),
        ((["O2"],), ValueError, r"boost_level: expected one of .* but got \['O2'\]"),
        (("O0", []), TypeError, "boost_config_dict: expected a dict"),
        (("O0", {"boost": "auto"}), TypeError, r"\['boost'\]: expected a dict"),
        (("O0", {"common": {"device_number": 0}}), ValueError, "at least 1, but got 0"),
        (("O0", {"common": {"device_number": 8.0}}), TypeError, "expected an int"),
    ],
)
def test_bad_input(arguments, error, match):
    with pytest.raises(error, match=match):
        switch(*arguments)


def test_the_deprecated_name_of_the_level():
    with pytest.warns(DeprecationWarning, match="replaced by boost_level"):
        assert switch(boost_config_dict=TUTORIAL, acc_level="O2").adasum


def test_no_state_between_calls():
    quiet("O1", TUTORIAL)
    with pytest.warns(UserWarning, match="grad_freeze, less_bn"):
        assert switch("O2") == Boost(adasum=True)
    assert quiet("O0") == Boost()


def test_optimizer_arguments():
    with_adasum = quiet("O1", TUTORIAL)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert with_adasum.optimizer_arguments(Job(16)) == {
            "op": ops.AdasumDelta,
            "backward_passes_per_step": 1,
        }
        # The seed turns AdaSum off, silently, unless ranks // 8 is a power of two above 1.
        assert with_adasum.optimizer_arguments(Job(24))["op"] is ops.AdasumDelta
        assert Boost().optimizer_arguments(Job(4, "adasum", 0))["op"] is ops.Average
    assert Boost(gradients_mean=False).optimizer_arguments(Job(4))["op"] is ops.Sum
    both = Boost(adasum=True, accumulation_steps=4).optimizer_arguments(Job(16))
    assert both == {"op": ops.AdasumDelta, "backward_passes_per_step": 4}
    with pytest.raises(RuntimeError, match=r"call hvd\.init\(\*\*boost.init_arguments"):
        with_adasum.optimizer_arguments(Job(16, "adasum", 0))


def test_examples():
    assert doctest.testmod(boost).failed == 0
