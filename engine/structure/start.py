"""The state in which a text of a grammar begins."""

import re

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

# Work for one mask is bounded by the library's own defaults. These are for what takes memory: expressions, and states
# of the lexer, a sequence's own, one to two kilobytes each.
_LIMITS = LLParserLimits(initial_lexer_fuel=200_000, max_lexer_states=50_000, verbose_errors=False)

_LONGEST_REASON = 300
_PREAMBLE = re.compile(r'^(?:at (\d+)\(\d+\): )?(?:failed to (?:compile JSON schema|parse "%json"): )?')


def start_of(grammar: str, tokenizer: LLTokenizer) -> LLMatcher:
    """A matcher that has consumed nothing, its first mask computed.

    Raises:
        ValueError: the grammar is no good, in the library's words; or no text has it.
    """
    start = LLMatcher(tokenizer, grammar, log_level=0, limits=_LIMITS)
    if start.is_error():
        raise ValueError(shortened(start.get_error()))
    start.compute_bitmask()
    if start.is_error():
        raise ValueError("no text has this structure" if is_dead_end(start) else shortened(start.get_error()))
    return start


def is_dead_end(failed: LLMatcher) -> bool:
    """Whether nothing may follow, not even the end: the text began well and cannot be completed."""
    return "NoExtension" in failed.get_error()


def shortened(error: str) -> str:
    """One line of the library's many: what the regex parser found, else the first, without its preamble.

    Of that it keeps which line of the grammar is meant, but for the first: most grammars have but one.
    """
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    reasons = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    reason = _PREAMBLE.sub("", reasons[0] if reasons else lines[0] if lines else "it is not supported")
    preamble = _PREAMBLE.match(lines[0]) if lines else None
    if preamble is not None and preamble[1] not in (None, "1"):
        reason = f"in line {preamble[1]}: {reason}"
    return reason if len(reason) <= _LONGEST_REASON else reason[:_LONGEST_REASON] + "…"
