"""Running requests on an engine to their end, without a server around it."""

from collections.abc import Callable, Iterable

from engine.engine import Engine
from engine.errors import QueueFull
from engine.request import Request


def generate(engine: Engine, requests: Iterable[Request], clock: Callable[[], float]) -> dict[str, list[int]]:
    """Steps until all requests have ended; each one's whole output, with what it was resumed with.

    Args:
        clock: seconds; asked once a step.

    Raises:
        ValueError: a request that the engine refuses; those added before it stay.
    """
    outputs: dict[str, list[int]] = {}
    for request in requests:
        while True:
            try:
                engine.add_request(request)
                break
            except QueueFull:
                _step(engine, clock, outputs)
        outputs[request.request_id] = list(request.output_token_ids)
    while engine.has_work:
        _step(engine, clock, outputs)
    return outputs


def _step(engine: Engine, clock: Callable[[], float], outputs: dict[str, list[int]]) -> None:
    for output in engine.step(clock()).outputs:
        outputs[output.request_id].append(output.token.token_id)
