"""A scripted gateway's end of `Worker.Session`, for tests that speak to real workers."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import grpc

from engine.sampling_params import SamplingParams
from kvtransfer.sampling_wire import sampling_params_to_wire
from tandem.v1 import sampling_pb2, worker_pb2_grpc
from tandem.v1 import worker_pb2 as pb

PATIENCE_S = 60.0  # for what comes at once unless the machine stalls


@dataclass
class Seen:
    """What a worker said about one request."""

    token_ids: list[int] = field(default_factory=list)
    usage: pb.Usage | None = None
    stages: pb.StageTimes | None = None
    finish_reason: int = 0
    matched_token_id: int | None = None
    refused: pb.Refused | None = None
    need_prefill: list[pb.NeedPrefill] = field(default_factory=list)
    prompt_logprobs: sampling_pb2.PromptLogprobs | None = None

    @property
    def is_over(self) -> bool:
        return bool(self.finish_reason) or self.refused is not None


class GatewayEnd:
    """One session. `async with`."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.seen: dict[str, Seen] = {}
        self.load = pb.Load()
        self.ended: grpc.StatusCode | None = None
        self._changed = asyncio.Condition()

    async def __aenter__(self) -> "GatewayEnd":
        self._channel = grpc.aio.insecure_channel(self.address)
        self.stub = worker_pb2_grpc.WorkerStub(self._channel)
        self._call = self.stub.Session()
        self._reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.break_off()
        await self._reader
        await self._channel.close()

    def break_off(self) -> None:
        """As if the gateway died."""
        self._call.cancel()

    async def submit(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        prefill: tuple[str, str] | None = None,
        cached_on: tuple[str, str, int] | None = None,
        resume: Sequence[int] = (),
        timeout_ms: int = 0,
        cache_salt: str = "",
        choices: Mapping[str, int] | None = None,
    ) -> Seen:
        """`prefill` = (worker id, address); `cached_on` the same with a number of blocks; `choices`: seeds by id.

        What is said of choices is seen under their own ids; a refusal under that of the prompt.
        """
        plan = pb.Plan()
        if prefill is not None:
            plan.prefill_worker.CopyFrom(pb.Peer(worker_id=prefill[0], address=prefill[1]))
        if cached_on is not None:
            plan.cached_on.CopyFrom(pb.Peer(worker_id=cached_on[0], address=cached_on[1]))
            plan.num_cached_blocks = cached_on[2]
        self.seen.update({name: Seen() for name in (request_id, *(choices or ()))})
        submit = pb.Submit(
            request_id=request_id,
            prompt_token_ids=prompt,
            sampling_params=sampling_params_to_wire(params),
            plan=plan,
            resume_token_ids=resume,
            timeout_ms=timeout_ms,
            cache_salt=cache_salt,
            choices=[pb.Choice(request_id=name, seed=seed) for name, seed in (choices or {}).items()],
        )
        await self._call.write(pb.SessionRequest(submit=submit))
        return self.seen[request_id]

    async def assign(self, request_id: str, prefill: tuple[str, str] | None) -> None:
        assign = pb.Assign(request_id=request_id)
        if prefill is not None:
            assign.prefill_worker.CopyFrom(pb.Peer(worker_id=prefill[0], address=prefill[1]))
        await self._call.write(pb.SessionRequest(assign=assign))

    async def abort(self, *request_ids: str) -> None:
        await self._call.write(pb.SessionRequest(abort=pb.Abort(request_ids=request_ids)))

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits until what was heard makes it true."""
        async with asyncio.timeout(PATIENCE_S), self._changed:
            await self._changed.wait_for(condition)

    async def _read(self) -> None:
        try:
            async for response in self._call:
                self._take(response)
                async with self._changed:
                    self._changed.notify_all()
            self.ended = grpc.StatusCode.OK
        except grpc.aio.AioRpcError as exc:
            self.ended = exc.code()
        except asyncio.CancelledError:
            self.ended = grpc.StatusCode.CANCELLED
        async with self._changed:
            self._changed.notify_all()

    def _take(self, response: pb.SessionResponse) -> None:
        match response.WhichOneof("message"):
            case "step":
                for output in response.step.outputs:
                    self._take_output(output)
            case "refused":
                seen = self.seen[response.refused.request_id]
                assert not seen.is_over, response
                seen.refused = response.refused
            case "need_prefill":
                self.seen[response.need_prefill.request_id].need_prefill.append(response.need_prefill)
            case "load":
                self.load = response.load

    def _take_output(self, output: pb.RequestOutput) -> None:
        seen = self.seen[output.request_id]
        assert not seen.is_over, f"{output.request_id} ended twice"
        seen.token_ids.extend(output.token_ids)
        if output.HasField("usage"):
            assert seen.usage is None, f"usage of {output.request_id} came twice"
            seen.usage = output.usage
        if output.HasField("stages"):
            seen.stages = output.stages
        if output.HasField("matched_token_id"):
            seen.matched_token_id = output.matched_token_id
        if output.HasField("prompt_logprobs"):
            assert len(seen.token_ids) == 1, "they come with the first token"
            seen.prompt_logprobs = output.prompt_logprobs
        seen.finish_reason = output.finish_reason
