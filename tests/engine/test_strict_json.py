"""JSON and nothing but JSON."""

import pytest

from engine.strict_json import parse_json


def test_json_is_read_with_its_numbers_and_the_order_of_its_keys():
    value = parse_json('{"b": [1, 2.5, -1e3, 123456789012345678901], "a": {"x": null, "é": true}}')
    assert value == {"b": [1, 2.5, -1000.0, 123456789012345678901], "a": {"x": None, "é": True}}
    assert list(value) == ["b", "a"]


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity"])
def test_what_python_alone_takes_for_a_number_is_refused(word):
    with pytest.raises(ValueError, match=f"^{word} is no number of JSON$"):
        parse_json(f'[1, {{"a": {word}}}]')


@pytest.mark.parametrize("number", ["1e999", "-1e999"])
def test_number_beyond_a_double_is_refused(number):
    with pytest.raises(ValueError, match=f"^{number} is out of range$"):
        parse_json(number)


def test_nesting_has_an_end():
    with pytest.raises(RecursionError):
        parse_json("[" * 100_000)
