"""What a request can end with instead of tokens: one tree, and one place where foreign errors enter it.

    GenerationError
    ├── InvalidRequest      400  INVALID_ARGUMENT    the caller's fault; `param` names the field
    ├── ModelNotFound       404  NOT_FOUND           another model is served here
    ├── QueueFull           429  RESOURCE_EXHAUSTED  too many requests; come again after `retry_after_s`
    ├── Cancelled           499  CANCELLED           the client left, or does not read what it asked for
    ├── WorkerFailed        500  INTERNAL            a worker could not do it; `leg` and `worker_id` name which
    │   └── WorkerLost      503  UNAVAILABLE         the worker is gone or going: another may take the request
    ├── NoWorker            503  UNAVAILABLE         nobody is there to do it; the message says who is missing
    └── DeadlineExceeded    504  DEADLINE_EXCEEDED   its time is up

The gateway's skins (HTTP, gRPC) render an error from its four class attributes and never look at its type. A worker's
status, over a broken stream or in a `Refused`, becomes one of these in `error_from_status`, and nowhere else.
"""

from enum import Enum
from typing import ClassVar

import grpc


class Leg(Enum):
    """Whose part of the work failed; the values are what messages say."""

    PREFILL = "prefill worker"
    DECODE = "decode worker"


class GenerationError(Exception):
    """A request ended without (all of) its tokens.

    Args:
        message: one sentence for the client.
        param: the field of the request that is at fault, if one is.
    """

    http_status: ClassVar[int] = 500
    grpc_code: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL
    openai_type: ClassVar[str] = "server_error"
    openai_code: str | None = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequest(GenerationError):
    """The request cannot be served as it is; the same request will fail again.

    Args:
        code: OpenAI's machine-readable word, such as `context_length_exceeded`.
    """

    http_status = 400
    grpc_code = grpc.StatusCode.INVALID_ARGUMENT
    openai_type = "invalid_request_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message, param=param)
        self.openai_code = code


class ModelNotFound(GenerationError):
    """The request names a model that is not served here."""

    http_status = 404
    grpc_code = grpc.StatusCode.NOT_FOUND
    openai_type = "invalid_request_error"
    openai_code = "model_not_found"


class QueueFull(GenerationError):
    """As many requests as may be in flight are; nothing was started."""

    http_status = 429
    grpc_code = grpc.StatusCode.RESOURCE_EXHAUSTED
    openai_type = "rate_limit_error"
    openai_code = "queue_full"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float = 1.0) -> None:
        super().__init__(message, param=param)
        self.retry_after_s = retry_after_s


class Cancelled(GenerationError):
    """The request was aborted on its client's account."""

    http_status = 499
    grpc_code = grpc.StatusCode.CANCELLED
    openai_type = "invalid_request_error"
    openai_code = "cancelled"


class WorkerFailed(GenerationError):
    """A worker could not do its part, and no repair was left."""

    openai_code = "worker_failed"

    def __init__(
        self, message: str, *, param: str | None = None, leg: Leg | None = None, worker_id: str | None = None
    ) -> None:
        super().__init__(message, param=param)
        self.leg = leg
        self.worker_id = worker_id


class WorkerLost(WorkerFailed):
    """The worker is gone or takes no more requests; nothing was wrong with this one."""

    http_status = 503
    grpc_code = grpc.StatusCode.UNAVAILABLE
    openai_code = "worker_lost"


class NoWorker(GenerationError):
    """No worker that could take the request is ready."""

    http_status = 503
    grpc_code = grpc.StatusCode.UNAVAILABLE
    openai_code = "no_worker"


class DeadlineExceeded(GenerationError):
    """The request's deadline passed before its last token."""

    http_status = 504
    grpc_code = grpc.StatusCode.DEADLINE_EXCEEDED
    openai_code = "deadline_exceeded"


_BY_STATUS: dict[grpc.StatusCode, type[GenerationError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.OUT_OF_RANGE: InvalidRequest,
    grpc.StatusCode.NOT_FOUND: ModelNotFound,
    grpc.StatusCode.RESOURCE_EXHAUSTED: QueueFull,
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    # The three that say "not here, not now": draining, shutting down, stream broken.
    grpc.StatusCode.UNAVAILABLE: WorkerLost,
    grpc.StatusCode.FAILED_PRECONDITION: WorkerLost,
    grpc.StatusCode.ABORTED: WorkerLost,
}

_STATUS_BY_NUMBER: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}


def error_from_status(
    code: grpc.StatusCode | int, message: str, *, leg: Leg | None = None, worker_id: str | None = None
) -> GenerationError:
    """A worker's status as an error of ours; codes that say nothing about the request are `WorkerFailed`.

    Args:
        code: of a gRPC call, or its number (google.rpc.Code) as `Refused` carries it.
    """
    status = _STATUS_BY_NUMBER.get(code) if isinstance(code, int) else code
    kind = _BY_STATUS.get(status, WorkerFailed) if status is not None else WorkerFailed
    if issubclass(kind, WorkerFailed):
        who = " ".join(part for part in (leg.value if leg else "worker", worker_id) if part)
        return kind(f"{who}: {message}", leg=leg, worker_id=worker_id)
    return kind(message)
