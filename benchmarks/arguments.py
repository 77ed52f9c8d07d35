"""Arguments of a command line that are refused with a sentence: whole numbers, one or several."""

import argparse
from collections.abc import Callable


def whole_number(least: int = 1) -> Callable[[str], int]:
    """What `add_argument` takes as `type`; below `least`, or not a whole number, is an `ArgumentTypeError`."""

    def parse(text: str) -> int:
        number = _int(text, f"a whole number, not {text!r}")
        if number < least:
            raise argparse.ArgumentTypeError(f"at least {least}, not {text}")
        return number

    return parse


def whole_numbers(text: str) -> tuple[int, ...]:
    """At least one, each at least 1.

    Raises:
        argparse.ArgumentTypeError: they are not.
    """
    message = f"whole numbers with commas between them, not {text!r}"
    numbers = tuple(_int(number, message) for number in text.split(","))
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"numbers of at least 1, not {text}")
    return numbers


def _int(text: str, message: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(message) from error
