"""What an engine refuses beside bad input, which is a `ValueError`."""


class QueueFull(Exception):
    """As many requests are waiting as are allowed to; the same request may be taken later."""

    def __init__(self, max_waiting: int) -> None:
        super().__init__(f"{max_waiting} requests are waiting already, and no more may")
        self.max_waiting = max_waiting
