"""Between the messages of `tandem.v1.Generation` and what the gateway works with."""

from collections.abc import Sequence
from typing import TypeVar, cast

from cluster.text_generator import TextDelta
from cluster.text_request import PlannedText, TextOptions
from cluster.worker_info import WorkerStatus
from engine.executor import SampledToken
from tandem.v1 import generation_pb2, sampling_pb2

V = TypeVar("V")


class ChoiceMessages:
    """One choice of a call, as it grows."""

    def __init__(self, planned: PlannedText) -> None:
        self._request_id = planned.request_id
        self._num_prompt_tokens = len(planned.prompt_token_ids)
        self._wants_logprobs = planned.options.logprobs is not None
        self._num_top = planned.options.logprobs or 0
        self._texts: list[str] = []
        self._tokens: list[SampledToken] = []

    def add(self, delta: TextDelta) -> None:
        self._texts.append(delta.text)
        self._tokens.extend(delta.tokens)

    def chunk(self, delta: TextDelta) -> generation_pb2.GenerateResponse:
        """What a step added."""
        message = generation_pb2.GenerateStreamChunk(
            token_ids=[token.token_id for token in delta.tokens],
            text=delta.text,
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=len(self._tokens),
            cached_tokens=delta.num_cached_tokens,
            index=delta.index,
            logprobs=self._logprobs(delta.tokens),
        )
        return generation_pb2.GenerateResponse(request_id=self._request_id, chunk=message)

    def complete(self, delta: TextDelta) -> generation_pb2.GenerateResponse:
        """All of it, at its end."""
        assert delta.finish_reason is not None, f"choice {delta.index} has not ended"
        message = generation_pb2.GenerateComplete(
            output_ids=[token.token_id for token in self._tokens],
            text="".join(self._texts),
            finish_reason=delta.finish_reason.value,
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=len(self._tokens),
            cached_tokens=delta.num_cached_tokens,
            index=delta.index,
            logprobs=self._logprobs(self._tokens),
        )
        if isinstance(delta.matched_stop, str):
            message.matched_stop_str = delta.matched_stop
        elif delta.matched_stop is not None:
            message.matched_token_id = delta.matched_stop
        return generation_pb2.GenerateResponse(request_id=self._request_id, complete=message)

    def _logprobs(self, tokens: Sequence[SampledToken]) -> list[sampling_pb2.TokenLogprobs]:
        if not self._wants_logprobs:
            return []
        return [
            sampling_pb2.TokenLogprobs(
                logprob=token.logprob or 0.0,
                top_token_ids=[token_id for token_id, _ in token.top[: self._num_top]],
                top_logprobs=[logprob for _, logprob in token.top[: self._num_top]],
            )
            for token in tokens
        ]


def text_options(request: generation_pb2.GenerateRequest, timeout_s: float | None) -> TextOptions:
    """Absent fields mean what the .proto file says."""
    params = request.sampling_params

    def given(name: str, default: V) -> V:
        return cast("V", getattr(params, name)) if params.HasField(name) else default

    return TextOptions(
        n=given("n", 1),
        max_tokens=params.max_tokens if params.HasField("max_tokens") else None,
        min_tokens=given("min_tokens", 0),
        temperature=given("temperature", 1.0),
        top_p=given("top_p", 1.0),
        top_k=given("top_k", 0),
        min_p=given("min_p", 0.0),
        repetition_penalty=given("repetition_penalty", 1.0),
        presence_penalty=given("presence_penalty", 0.0),
        frequency_penalty=given("frequency_penalty", 0.0),
        logit_bias=dict(params.logit_bias),
        seed=params.seed if params.HasField("seed") else None,
        logprobs=params.logprobs if params.HasField("logprobs") else None,
        stop=tuple(stop for stop in params.stop if stop),
        stop_token_ids=tuple(params.stop_token_ids),
        ignore_eos=given("ignore_eos", False),
        skip_special_tokens=given("skip_special_tokens", True),
        include_stop_str_in_output=given("include_stop_str_in_output", False),
        cache_salt=request.cache_salt,
        priority=request.priority,
        timeout_s=timeout_s,
    )


def worker_info(worker: WorkerStatus) -> generation_pb2.WorkerInfo:
    """For GetServerInfo."""
    info = worker.info
    return generation_pb2.WorkerInfo(
        worker_id=info.worker_id if info else "",
        role=info.role.value if info else "",
        address=worker.address,
        instance_id=info.instance_id if info else "",
        ready=worker.ready,
    )


def worker_load(worker: WorkerStatus) -> generation_pb2.WorkerLoad | None:
    """For GetLoads; none of a worker that has not said."""
    info, load = worker.info, worker.load
    if info is None or load is None:
        return None
    return generation_pb2.WorkerLoad(
        worker_id=info.worker_id,
        role=info.role.value,
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_transferring=load.num_transferring,
        num_free_blocks=load.num_free_blocks,
        num_cached_blocks=load.num_cached_blocks,
        num_active_blocks=load.num_active_blocks,
    )
