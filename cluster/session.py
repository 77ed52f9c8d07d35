"""The gateway's end of a session with a worker: one bidirectional stream, the lease of all requests on it.

A session is open from the worker's first message, its load, on: no request is sent before it is known whether the
worker takes any. While it is open, prompts are submitted to it, each with a stream for every choice, and the worker's
messages are handed to the streams as they arrive. However it ends (the worker closes it, dies, breaks the protocol, or
the gateway lets go), every stream still on it fails with `WorkerLost`, and the worker aborts them on its side by
itself. A session that has ended stays so: another connection is another session.
"""

import asyncio
from typing import Protocol

import grpc

from cluster import wire
from cluster.channel import describe_failure
from cluster.errors import Cancelled, GenerationError, Leg, WorkerLost, error_from_status
from cluster.prompt_streams import PromptStreams
from cluster.request_stream import RequestStream
from cluster.session_messages import NeedPrefill, Output
from cluster.worker_info import Role, WorkerInfo, WorkerLoad
from tandem.v1 import worker_pb2 as pb
from tandem.v1 import worker_pb2_grpc

# Engine steps that a client may be behind before its request is aborted.
DEFAULT_MAX_BUFFERED = 4096


class SessionListener(Protocol):
    """Who is told about the session as a whole."""

    def session_opened(self, session: "Session") -> None: ...

    def session_load(self, session: "Session", load: WorkerLoad) -> None: ...

    def session_closed(self, session: "Session") -> None:
        """Called before any of its requests fails, so that none is sent to the same worker again."""
        ...


class Session:
    """One connection's session; `run` is its life."""

    def __init__(
        self, worker: WorkerInfo, listener: SessionListener, *, max_buffered: int = DEFAULT_MAX_BUFFERED
    ) -> None:
        self.worker = worker
        self.is_open = False
        self._listener = listener
        self._max_buffered = max_buffered
        self._prompts: dict[str, PromptStreams] = {}  # by id, until all their streams have ended
        self._by_choice: dict[str, PromptStreams] = {}  # likewise
        self._outgoing: asyncio.Queue[pb.SessionRequest] = asyncio.Queue()
        self._leg = Leg.PREFILL if worker.role is Role.PREFILL else Leg.DECODE

    @property
    def num_requests(self) -> int:
        """Sequences that have not ended."""
        return sum(len(prompt.living) for prompt in self._prompts.values())

    # --- its life

    async def run(self, stub: worker_pb2_grpc.WorkerStub) -> None:
        """Opens the session and serves it to its end.

        Raises:
            WorkerLost: always, unless cancelled; says how it ended.
        """
        call = stub.Session()
        writer = asyncio.create_task(self._write(call))
        reason = "the gateway let go of it"
        try:
            async for response in call:
                if not self.is_open:
                    self.is_open = True
                    self._listener.session_opened(self)
                self._receive(response)
            reason = "it ended the session"
        except grpc.aio.AioRpcError as exc:
            reason = describe_failure(exc)
        except wire.WireError as exc:
            reason = f"it broke the protocol: {exc}"
        finally:
            was_open, self.is_open = self.is_open, False
            if was_open:
                self._listener.session_closed(self)
            for prompt in self._prompts.values():
                for stream in prompt.living:
                    stream.fail(self._lost(reason))
            self._prompts.clear()
            self._by_choice.clear()
            call.cancel()
            writer.cancel()
            # A write fails when the stream does, and the stream's end has been told above.
            await asyncio.gather(writer, return_exceptions=True)
        raise self._lost(reason)

    async def _write(self, call: "grpc.aio.StreamStreamCall[pb.SessionRequest, pb.SessionResponse]") -> None:
        while True:
            await call.write(await self._outgoing.get())

    def _lost(self, reason: str) -> WorkerLost:
        message = f"{self._leg.value} {self.worker.worker_id} at {self.worker.address} was lost: {reason}"
        return WorkerLost(message, leg=self._leg, worker_id=self.worker.worker_id)

    # --- gateway → worker

    def submit(self, message: pb.SessionRequest) -> PromptStreams:
        """Sends a prompt.

        Args:
            message: a Submit, whose names were never used before on this session.

        Raises:
            WorkerLost: the session is not open; nothing was sent.
        """
        if not self.is_open:
            raise self._lost("its session is closed")
        submit = message.submit
        choice_ids = [choice.request_id for choice in submit.choices] or [submit.request_id]
        assert submit.request_id not in self._prompts, f"{submit.request_id} is on this session already"
        wants_logprobs = submit.sampling_params.HasField("prompt_logprobs")
        prompt_token_ids = submit.prompt_token_ids if wants_logprobs else ()
        prompt = PromptStreams(submit.request_id, prompt_token_ids, choice_ids, self._max_buffered)
        self._prompts[submit.request_id] = prompt
        self._by_choice.update(dict.fromkeys(choice_ids, prompt))
        self._outgoing.put_nowait(message)
        return prompt

    def assign(self, stream: RequestStream, prefill: WorkerInfo | None) -> None:
        """Answers `NeedPrefill`; nothing is sent for a request that has ended meanwhile."""
        if not stream.ended:
            self._outgoing.put_nowait(wire.assign(stream.request_id, prefill))

    def abort(self, stream: RequestStream, error: GenerationError) -> None:
        """Ends a sequence from here. Idempotent, and nothing if it has ended already."""
        if not stream.ended:
            self._outgoing.put_nowait(wire.abort([stream.request_id]))
            stream.fail(error)
            self._forget_ended(self._by_choice[stream.request_id])

    # --- worker → gateway

    def _receive(self, response: pb.SessionResponse) -> None:
        match response.WhichOneof("message"):
            case "step":
                for output in response.step.outputs:
                    self._take(output)
            case "need_prefill":
                need = response.need_prefill
                if (prompt := self._by_choice.get(need.request_id)) is not None:
                    self._put(prompt[need.request_id], prompt, wire.need_prefill(need))
            case "refused":
                self._refused(response.refused)
            case "load":
                self._listener.session_load(self, wire.worker_load(response.load))
            case other:
                raise wire.WireError(f"unknown message {other} on a session")

    def _take(self, output: pb.RequestOutput) -> None:
        message = wire.output(output)
        request_id = output.request_id
        prompt = self._by_choice.get(request_id)
        if prompt is None:
            return  # ended before: an abort and the last tokens crossed on the way
        if output.HasField("prompt_logprobs"):
            prompt.prompt_logprobs = wire.prompt_logprobs(output.prompt_logprobs, prompt.prompt_token_ids)
        self._put(prompt[request_id], prompt, message)

    def _put(self, stream: RequestStream, prompt: PromptStreams, message: Output | NeedPrefill) -> None:
        if stream.ended:
            return  # likewise, and other choices of the prompt live
        if stream.is_full:
            self.abort(stream, Cancelled(f"aborted: its client is {self._max_buffered} steps behind in reading"))
            return
        stream.put(message)
        if stream.ended:
            self._forget_ended(prompt)

    def _refused(self, refused: pb.Refused) -> None:
        """A refusal is of the prompt: of all its choices that live."""
        prompt = self._prompts.get(refused.request_id)
        if prompt is None:
            return
        for stream in prompt.living:
            stream.fail(
                error_from_status(refused.code, refused.message, leg=self._leg, worker_id=self.worker.worker_id)
            )
        self._forget_ended(prompt)

    def _forget_ended(self, prompt: PromptStreams) -> None:
        if not prompt.living:
            del self._prompts[prompt.request_id]
            for choice_id in prompt.choice_ids:
                del self._by_choice[choice_id]
