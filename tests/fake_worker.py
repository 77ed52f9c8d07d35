"""A worker that does what a test says: it speaks the wire, over real gRPC, and has no engine.

Each sequence it was sent is a `FakeRequest`; those of one Submit know each other as its `choices`. By default
(`automatic`) it answers as an engine would, one token a message, but first tokens of choices in one; otherwise the test
takes the requests (`await worker.next_request()`) and says what becomes of each. Its tokens are a hash of seed and all
tokens before, so that a request moved elsewhere must go on identically.
"""

import asyncio
import hashlib
import struct
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from itertools import count

import grpc

from cluster.worker_info import Role
from engine.executor import SampledToken
from kvtransfer.channels import SERVER_OPTIONS
from kvtransfer.sampling_wire import prompt_logprobs_to_wire
from tandem.v1 import sampling_pb2 as sampling_pb
from tandem.v1 import worker_pb2 as pb
from tandem.v1 import worker_pb2_grpc

VOCAB_SIZE = 1000
BLOCK_SIZE = 4

_instances = count()


def next_token(token_ids: Sequence[int], seed: int = 0) -> int:
    """What the fake model says after these tokens."""
    packed = struct.pack(f"<q{len(token_ids)}i", seed, *token_ids)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=4).digest(), "little") % VOCAB_SIZE


def continuation(prompt: Sequence[int], num_tokens: int, seed: int = 0) -> list[int]:
    """The oracle: what any worker answers to this prompt."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(next_token(token_ids, seed))
    return token_ids[len(prompt) :]


def prompt_logprobs(prompt: Sequence[int], num_top: int) -> tuple[SampledToken, ...]:
    """The oracle: what any worker says of this prompt."""
    return tuple(
        SampledToken(token_id, -position / 4, tuple((rank, -rank / 2) for rank in range(num_top)))
        for position, token_id in enumerate(prompt[1:], 1)
    )


@dataclass
class FakeRequest:
    """A sequence at a fake worker."""

    submit: pb.Submit
    session: "FakeSession"
    request_id: str
    seed: int
    token_ids: list[int]
    num_output: int
    choices: list["FakeRequest"]  # of the same Submit, in order, itself among them
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    assigned: asyncio.Queue[pb.Assign] = field(default_factory=asyncio.Queue)

    @property
    def has_first_token(self) -> bool:
        return self.num_output > len(self.submit.resume_token_ids)

    def send_tokens(self, num_tokens: int = 1) -> None:
        """As many steps of one token; the last allowed one ends the sequence."""
        for _ in range(num_tokens):
            self.session.send(pb.SessionResponse(step=pb.StepOutput(outputs=[self._output()])))

    def send_first_tokens(self) -> None:
        """Of all choices that live, in one step."""
        outputs = [choice._output() for choice in self.choices if not choice.aborted.is_set()]
        self.session.send(pb.SessionResponse(step=pb.StepOutput(outputs=outputs)))

    def _output(self) -> pb.RequestOutput:
        params = self.submit.sampling_params
        told = any(choice.has_first_token for choice in self.choices)
        self.token_ids.append(next_token(self.token_ids, self.seed))
        self.num_output += 1
        is_last = self.num_output == params.max_tokens
        output = pb.RequestOutput(
            request_id=self.request_id,
            token_ids=self.token_ids[-1:],
            finish_reason=sampling_pb.FINISH_REASON_LENGTH if is_last else sampling_pb.FINISH_REASON_UNSPECIFIED,
        )
        if params.HasField("logprobs"):
            output.logprobs.append(
                sampling_pb.TokenLogprobs(logprob=-0.5, top_token_ids=[7, 8], top_logprobs=[-0.25, -0.5])
            )
        if params.HasField("prompt_logprobs") and not told:
            num_top = params.prompt_logprobs
            logprobs = prompt_logprobs(self.submit.prompt_token_ids, num_top)
            output.prompt_logprobs.CopyFrom(prompt_logprobs_to_wire(logprobs, num_top))
        if self.num_output == len(self.submit.resume_token_ids) + 1:
            output.usage.num_cached_tokens = self.session.worker.num_cached_tokens
        if is_last:
            output.stages.decode = 1.5
        return output

    def send_all(self) -> None:
        self.send_tokens(self.submit.sampling_params.max_tokens - self.num_output)

    def need_prefill(self, reason: str = "stream broken", failed: str = "") -> None:
        need = pb.NeedPrefill(request_id=self.request_id, reason=reason, failed_worker_id=failed)
        self.session.send(pb.SessionResponse(need_prefill=need))

    def refuse(self, code: grpc.StatusCode, message: str) -> None:
        """The whole Submit."""
        refused = pb.Refused(request_id=self.submit.request_id, code=code.value[0], message=message)
        self.session.send(pb.SessionResponse(refused=refused))


class FakeSession:
    """What goes out to one gateway."""

    def __init__(self, worker: "FakeWorker") -> None:
        self.worker = worker
        self.outgoing: asyncio.Queue[pb.SessionResponse | grpc.StatusCode | None] = asyncio.Queue()
        self.requests: dict[str, FakeRequest] = {}

    def send(self, response: pb.SessionResponse) -> None:
        self.outgoing.put_nowait(response)

    def end(self, code: grpc.StatusCode | None = None) -> None:
        """Ends the stream, with a status or well."""
        self.outgoing.put_nowait(code)


class FakeWorker(worker_pb2_grpc.WorkerServicer):
    """One start of a worker.

    Args:
        automatic: answer every request at once, to its end.
        described: other values for `Describe`.
    """

    def __init__(
        self, worker_id: str, role: Role = Role.DECODE, *, automatic: bool = False, **described: object
    ) -> None:
        self.worker_id = worker_id
        self.instance_id = f"{worker_id}-instance-{next(_instances)}"
        self.automatic = automatic
        self.num_cached_tokens = 0
        self.address = ""
        self.sessions: list[FakeSession] = []
        self.submits: list[pb.Submit] = []
        self.received: list[FakeRequest] = []
        # KV events: what a subscriber is sent first, and what follows.
        self.held: list[bytes] = []
        self.epoch = 1
        self.sequence = 0
        self.subscribers: list[asyncio.Queue[pb.KvEvent | None]] = []
        self.subscribed: asyncio.Queue[int] = asyncio.Queue()
        self._requests: asyncio.Queue[FakeRequest] = asyncio.Queue()
        self.arrivals: asyncio.Queue[FakeRequest] | None = None  # shared with other workers, for who does not care
        self._server: grpc.aio.Server | None = None
        fields: dict[str, object] = {
            "worker_id": worker_id,
            "instance_id": self.instance_id,
            "role": pb.ROLE_PREFILL if role is Role.PREFILL else pb.ROLE_DECODE,
            "model_name": "fake",
            "model_path": "/nowhere",
            "fingerprint": b"fake-model",
            "block_size": BLOCK_SIZE,
            "num_blocks": 64,
            "max_model_len": 100,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "vocab_size": VOCAB_SIZE,
            "bytes_per_block": 1024,
            "dtype": "float32",
        }
        self.description = pb.DescribeResponse(**(fields | described))

    async def start(self, address: str = "127.0.0.1:0") -> str:
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self._server)
        port = self._server.add_insecure_port(address)
        assert port, f"{address} is taken"
        self.address = f"127.0.0.1:{port}"
        await self._server.start()
        return self.address

    async def kill(self) -> None:
        """Dies: every stream breaks."""
        assert self._server is not None
        await self._server.stop(None)

    async def next_request(self) -> FakeRequest:
        return await self._requests.get()

    @property
    def num_unfinished(self) -> int:
        """Requests that were neither answered to the end nor aborted."""
        return sum(not r.aborted.is_set() and r.num_output < r.submit.sampling_params.max_tokens for r in self.received)

    # --- KV events

    def store(self, *hashes: bytes) -> None:
        self.held.extend(hashes)
        self.publish(pb.CacheChange(stored=b"".join(hashes)))

    def publish(self, *changes: pb.CacheChange) -> None:
        self.sequence += 1
        self.send_event(pb.KvEvent(batch=pb.Batch(epoch=self.epoch, sequence=self.sequence, changes=changes)))

    def send_event(self, event: pb.KvEvent | None) -> None:
        """To all subscribers; None ends their streams."""
        for subscriber in self.subscribers:
            subscriber.put_nowait(event)

    # --- the service

    async def Describe(self, request: pb.DescribeRequest, context: object) -> pb.DescribeResponse:
        return self.description

    async def Session(
        self, requests: AsyncIterator[pb.SessionRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.SessionResponse]:
        session = FakeSession(self)
        self.sessions.append(session)
        reader = asyncio.create_task(self._read(session, requests))
        session.send(pb.SessionResponse(load=pb.Load()))
        try:
            while isinstance(response := await session.outgoing.get(), pb.SessionResponse):
                yield response
            if response is not None:
                await context.abort(response, "as the test says")
        finally:
            reader.cancel()
            for request in session.requests.values():
                request.aborted.set()

    async def _read(self, session: FakeSession, messages: AsyncIterator[pb.SessionRequest]) -> None:
        async for message in messages:
            match message.WhichOneof("message"):
                case "submit":
                    self._take(session, message.submit)
                case "assign":
                    session.requests[message.assign.request_id].assigned.put_nowait(message.assign)
                case "abort":
                    for request_id in message.abort.request_ids:
                        session.requests[request_id].aborted.set()

    def _take(self, session: FakeSession, submit: pb.Submit) -> None:
        choices: list[FakeRequest] = []
        named = [(choice.request_id, choice.seed) for choice in submit.choices]
        for request_id, seed in named or [(submit.request_id, submit.sampling_params.seed)]:
            token_ids = [*submit.prompt_token_ids, *submit.resume_token_ids]
            num_output = len(submit.resume_token_ids)
            choices.append(FakeRequest(submit, session, request_id, seed, token_ids, num_output, choices))
        self.submits.append(submit)
        for request in choices:
            session.requests[request.request_id] = request
            self.received.append(request)
            self._requests.put_nowait(request)
            if self.arrivals is not None:
                self.arrivals.put_nowait(request)
        if self.automatic:
            choices[0].send_first_tokens()
            for request in choices:
                request.send_all()

    async def SubscribeKvEvents(
        self, request: pb.SubscribeKvEventsRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.KvEvent]:
        events: asyncio.Queue[pb.KvEvent | None] = asyncio.Queue()
        self.subscribers.append(events)
        self.subscribed.put_nowait(len(self.subscribers))
        try:
            yield pb.KvEvent(
                begin=pb.Begin(
                    instance_id=self.instance_id,
                    epoch=self.epoch,
                    sequence=self.sequence,
                    block_size=self.description.block_size,
                    fingerprint=self.description.fingerprint,
                    num_blocks=self.description.num_blocks,
                )
            )
            yield pb.KvEvent(snapshot=pb.Snapshot(block_hashes=b"".join(self.held)))
            yield pb.KvEvent(snapshot_end=pb.SnapshotEnd())
            while (event := await events.get()) is not None:
                yield event
        finally:
            self.subscribers.remove(events)
