from __future__ import annotations

import math
from typing import Any

import pytest

from lazyio.engine.models.config import Config
from lazyio.errors import ModelError

GIVEN = {
    "layers": 4,
    "eps": 1e-6,
    "tied": False,
    "act": "silu",
    "kinds": ["a", "b"],
    "ids": [2, 0],
    "spread": [0.5, 1],
    "none": None,
    "rope": {"theta": 100},
}


def test_values_of_each_type():
    config = Config(GIVEN)
    assert config.integer("layers") == 4
    assert config.number("eps") == 1e-6
    assert config.number("layers") == 4.0
    assert config.flag("tied", True) is False
    assert config.name("act", ("gelu", "silu")) == "silu"
    assert config.names("kinds", ("a", "b"), 2) == ["a", "b"]
    assert config.integers("ids") == [2, 0]
    assert config.numbers("spread", count=2) == [0.5, 1.0]
    assert config.part("rope").number("theta") == 100.0


def test_what_is_absent_or_null_has_its_default():
    config = Config(GIVEN)
    assert config.integer("none", 7) == config.integer("absent", 7) == 7
    assert config.numbers("absent", [0.25], count=1) == [0.25]
    assert config.part("absent").number("theta", 2.0) == 2.0
    assert not config.has("none")
    assert config.has("tied")
    config.expect(none=3, absent=3, tied=False)


@pytest.mark.parametrize("key", ["absent", "none"])
def test_without_a_default_a_key_must_be_there(key: str):
    with pytest.raises(ModelError, match=rf"{key}.*an integer, 1 or more"):
        Config(GIVEN).integer(key)


@pytest.mark.parametrize("value", [0, -1, 1.0, "4", True, [4]])
def test_no_integer(value: Any):
    with pytest.raises(ModelError, match=r"layers = .*an integer, 1 or more"):
        Config({"layers": value}).integer("layers")


@pytest.mark.parametrize("value", [0, -1.0, math.inf, math.nan, "1", False])
def test_no_number(value: Any):
    with pytest.raises(ModelError, match=r"eps = .*a number above 0"):
        Config({"eps": value}).number("eps")


@pytest.mark.parametrize("value", [0, 1, "true"])
def test_no_flag(value: Any):
    with pytest.raises(ModelError, match="true or false"):
        Config({"tied": value}).flag("tied")


@pytest.mark.parametrize("value", ["relu", 3, ["silu"]])
def test_a_name_that_is_not_known(value: Any):
    with pytest.raises(ModelError, match='"gelu" or "silu"'):
        Config({"act": value}).name("act", ("gelu", "silu"))


@pytest.mark.parametrize("value", [["a"], ["a", "c"], ["a", ["b"]], "ab", {"a": 1, "b": 2}])
def test_a_list_of_other_names(value: Any):
    with pytest.raises(ModelError, match='a list of 2 of "a" or "b"'):
        Config({"kinds": value}).names("kinds", ("a", "b"), 2)


@pytest.mark.parametrize("value", [[1, -1], [1.0, 2], [True, 1], 3, [1]])
def test_a_list_of_no_integers(value: Any):
    with pytest.raises(ModelError, match="a list of 2 integers, none negative"):
        Config({"ids": value}).integers("ids", count=2)


@pytest.mark.parametrize("value", [[1, "1"], [math.nan, 1], [1]])
def test_a_list_of_no_numbers(value: Any):
    with pytest.raises(ModelError, match="a list of 2 numbers"):
        Config({"spread": value}).numbers("spread", count=2)


def test_what_lies_inside_is_named_with_where_it_lies():
    with pytest.raises(ModelError, match=r"lacks rope\.factor"):
        Config(GIVEN).part("rope").number("factor")
    with pytest.raises(ModelError, match="layers = 4; it must be an object"):
        Config(GIVEN).part("layers")


def test_another_value_than_the_one_that_is_followed():
    with pytest.raises(ModelError, match="act = 'silu'; only \"gelu\" can be run here"):
        Config(GIVEN).expect(tied=False, act="gelu")


def test_configurations_by_number():
    config = Config({"layers": {"05": {"size": 3}, "11": {}}})
    assert list(config.numbered("layers")) == [5, 11]
    assert config.numbered("layers")[5].integer("size") == 3
    assert config.numbered("absent") == {}
    with pytest.raises(ModelError, match=r"lacks layers\.11\.size"):
        config.numbered("layers")[11].integer("size")
    with pytest.raises(ModelError, match=r"layers = .*its keys must be numbers"):
        Config({"layers": {"five": {}}}).numbered("layers")


def test_a_key_that_is_not_among_those_that_are_followed():
    config = Config({"05": {"size": 3, "skip": ["mlp"]}})
    config.part("05").only("size", "skip")
    with pytest.raises(ModelError, match=r'05\.skip = .*no key other than "size"'):
        config.part("05").only("size")


def test_one_integer_for_all_or_a_list_of_one_for_each():
    assert Config({"width": 8}).integer_of_each("width", 3) == [8, 8, 8]
    assert Config({"width": [8, 8, 16]}).integer_of_each("width", 3) == [8, 8, 16]
    with pytest.raises(ModelError, match="a list of 3 integers"):
        Config({"width": [8]}).integer_of_each("width", 3)
    with pytest.raises(ModelError, match="an integer, 1 or more"):
        Config({"width": "8"}).integer_of_each("width", 3)
