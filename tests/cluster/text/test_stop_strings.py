"""Stop strings, against the plain reading of the rule on the whole text."""

from hypothesis import given
from hypothesis import strategies as st

from cluster.text.stop_strings import StopMatch, StopMatcher


def oracle(text: str, stops: list[str], include_stop: bool) -> tuple[str, str | None]:
    """The text ends at the stop string that is complete first; of several, at the longest."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return (text[:end] if include_stop else text[: end - len(stop)]), stop
    return text, None


def feed(matcher: StopMatcher, pieces: list[str]) -> tuple[str, str | None]:
    out = ""
    for piece in pieces:
        found = matcher.push(piece)
        if isinstance(found, StopMatch):
            return out + found.text, found.stop
        out += found
    return out + matcher.flush(), None


_AB = st.text("ab", max_size=24)


@given(
    pieces=st.lists(st.text("abc", max_size=4), max_size=16),
    stops=st.lists(st.text("abc", max_size=5), max_size=4),
    include_stop=st.booleans(),
)
def test_pieces_give_what_the_whole_text_gives(pieces: list[str], stops: list[str], include_stop: bool) -> None:
    matcher = StopMatcher(stops, include_stop=include_stop)
    assert feed(matcher, pieces) == oracle("".join(pieces), stops, include_stop)


@given(pieces=st.lists(_AB, max_size=8), stops=st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=3))
def test_no_beginning_of_a_stop_string_leaves_before_it_is_decided(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    seen = left = ""
    for piece in pieces:
        seen += piece
        found = matcher.push(piece)
        if isinstance(found, StopMatch):
            return
        left += found
        kept = seen[len(left) :]
        assert seen.startswith(left)
        assert any(stop.startswith(kept) for stop in stops) or not kept
        # Nothing more than necessary is kept back.
        for start in range(len(left)):
            assert not any(stop.startswith(seen[start:]) for stop in stops)


def test_stop_string_across_pieces_is_never_emitted() -> None:
    matcher = StopMatcher(["the end"])
    assert matcher.push("and the") == "and "
    assert matcher.push(" e") == ""
    assert matcher.push("nd of it") == StopMatch("", "the end")


def test_text_that_only_looked_like_a_stop_string_leaves_later() -> None:
    matcher = StopMatcher(["the end"])
    assert matcher.push("the e") == ""
    assert matcher.push("gg") == "the egg"


def test_stop_string_itself_leaves_when_it_is_to_be_included() -> None:
    assert StopMatcher(["b"], include_stop=True).push("abc") == StopMatch("ab", "b")


def test_empty_stop_strings_stop_nothing() -> None:
    matcher = StopMatcher(["", ""])
    assert matcher.push("text") == "text"
    assert matcher.flush() == ""
