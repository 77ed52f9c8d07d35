"""A caller's value, quoted in a message."""


def shorten(value: object, limit: int = 60) -> str:
    """As Python writes it, and not much of it."""
    text = repr(value)
    return text if len(text) <= limit else text[:limit] + "…"
