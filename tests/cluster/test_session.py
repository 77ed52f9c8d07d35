"""The gateway's end of a session, against a fake worker over real gRPC."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from cluster import wire
from cluster.channel import ChannelConfig, open_channel
from cluster.errors import (
    Cancelled,
    DeadlineExceeded,
    GenerationError,
    InvalidRequest,
    Leg,
    QueueFull,
    WorkerFailed,
    WorkerLost,
)
from cluster.generator import SequenceRequest, StageTimes
from cluster.plan import Plan
from cluster.request_stream import RequestStream
from cluster.session import Session
from cluster.session_messages import NeedPrefill, Output
from cluster.worker_info import WorkerLoad
from engine.executor import SampledToken
from engine.sampling_params import FinishReason, SamplingParams
from fake_cluster import request
from fake_worker import FakeRequest, FakeWorker, continuation
from tandem.v1 import sampling_pb2 as sampling_pb
from tandem.v1 import worker_pb2 as pb
from tandem.v1 import worker_pb2_grpc


class Listener:
    def __init__(self) -> None:
        self.opened = asyncio.Event()
        self.loads: asyncio.Queue[WorkerLoad] = asyncio.Queue()
        self.ended_before_closed: list[bool] | None = None
        self.streams: list[RequestStream] = []

    def session_opened(self, session: Session) -> None:
        self.opened.set()

    def session_load(self, session: Session, load: WorkerLoad) -> None:
        self.loads.put_nowait(load)

    def session_closed(self, session: Session) -> None:
        assert self.ended_before_closed is None
        self.ended_before_closed = [stream.ended for stream in self.streams]


class Connected:
    """A session with a fake worker."""

    def __init__(self, worker: FakeWorker, session: Session, listener: Listener, running: asyncio.Task[None]) -> None:
        self.worker = worker
        self.session = session
        self.listener = listener
        self.running = running

    async def submit(self, sequence: SequenceRequest) -> tuple[RequestStream, FakeRequest]:
        plan = Plan(self.session.worker, None, None, 0, 1)
        message = wire.submit(sequence.request_id, sequence, plan, [], 60.0)
        stream = self.session.submit(message)[sequence.request_id]
        self.listener.streams.append(stream)
        return stream, await self.worker.next_request()


@asynccontextmanager
async def connected(max_buffered: int = 100) -> AsyncIterator[Connected]:
    worker = FakeWorker("d0")
    await worker.start()
    listener = Listener()
    session = Session(wire.worker_info(worker.description, worker.address), listener, max_buffered=max_buffered)
    async with open_channel(worker.address, ChannelConfig()) as channel:
        running = asyncio.create_task(session.run(worker_pb2_grpc.WorkerStub(channel)))
        await listener.opened.wait()
        assert await listener.loads.get() == WorkerLoad()
        try:
            yield Connected(worker, session, listener, running)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await worker.kill()


async def test_outputs_arrive_in_order_with_all_that_belongs_to_them() -> None:
    async with connected() as c:
        c.worker.num_cached_tokens = 2
        stream, at_worker = await c.submit(request(params=SamplingParams(max_tokens=2, logprobs=2)))
        at_worker.send_all()
        first, second = continuation([1, 2, 3], 2)
        top = ((7, -0.25), (8, -0.5))
        assert await stream.next() == Output((SampledToken(first, -0.5, top),), None, num_cached_tokens=2)
        assert await stream.next() == Output(
            (SampledToken(second, -0.5, top),), FinishReason.LENGTH, stages=StageTimes(0.0, 0.0, 0.0, 1.5)
        )
        assert stream.ended
        assert c.session.num_requests == 0


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, InvalidRequest),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, QueueFull),
        (grpc.StatusCode.DEADLINE_EXCEEDED, DeadlineExceeded),
        (grpc.StatusCode.FAILED_PRECONDITION, WorkerLost),
        (grpc.StatusCode.UNAVAILABLE, WorkerLost),
        (grpc.StatusCode.INTERNAL, WorkerFailed),
    ],
)
async def test_a_refusal_is_the_error_of_its_status(code: grpc.StatusCode, kind: type[GenerationError]) -> None:
    async with connected() as c:
        stream, at_worker = await c.submit(request())
        at_worker.refuse(code, "so it is")
        with pytest.raises(GenerationError, match="so it is") as caught:
            await stream.next()
        assert type(caught.value) is kind
        if isinstance(caught.value, WorkerFailed):
            assert (caught.value.leg, caught.value.worker_id) == (Leg.DECODE, "d0")
        assert c.session.num_requests == 0


@pytest.mark.parametrize("how", ["killed", "ended well", "ended with a status", "broke the protocol", "let go"])
async def test_every_request_of_a_session_that_ends_is_lost_after_its_listener_was_told(how: str) -> None:
    async with connected() as c:
        stream, at_worker = await c.submit(request())
        other, also_at_worker = await c.submit(request())
        at_worker.send_tokens()
        also_at_worker.send_tokens()
        assert isinstance(await other.next(), Output)  # so that of `stream` is there as well
        match how:
            case "killed":
                await c.worker.kill()
            case "ended well":
                at_worker.session.end()
            case "ended with a status":
                at_worker.session.end(grpc.StatusCode.ABORTED)
            case "broke the protocol":
                broken = pb.RequestOutput(request_id="r", token_ids=[1], logprobs=[sampling_pb.TokenLogprobs()] * 2)
                at_worker.session.send(pb.SessionResponse(step=pb.StepOutput(outputs=[broken])))
            case "let go":
                c.running.cancel()
        assert isinstance(await stream.next(), Output)  # what had come is read first
        for lost in (stream, other):
            with pytest.raises(WorkerLost, match=r"decode worker d0 at .* was lost") as caught:
                await lost.next()
            assert caught.value.leg is Leg.DECODE
        assert c.listener.ended_before_closed == [False, False]
        assert not c.session.is_open
        with pytest.raises(WorkerLost, match="closed"):
            c.session.submit(pb.SessionRequest())
        with pytest.raises(WorkerLost if how != "let go" else asyncio.CancelledError):
            await c.running


async def test_a_worker_that_cannot_be_reached_is_lost_at_once() -> None:
    worker = FakeWorker("d0")
    await worker.start()
    await worker.kill()
    listener = Listener()
    session = Session(wire.worker_info(worker.description, worker.address), listener)
    async with open_channel(worker.address, ChannelConfig()) as channel:
        with pytest.raises(WorkerLost, match="UNAVAILABLE"):
            await session.run(worker_pb2_grpc.WorkerStub(channel))
    assert not listener.opened.is_set()
    assert listener.ended_before_closed is None


async def test_an_abort_reaches_the_worker_and_what_it_sent_meanwhile_is_ignored() -> None:
    async with connected() as c:
        stream, at_worker = await c.submit(request())
        c.session.abort(stream, Cancelled("left"))
        c.session.abort(stream, Cancelled("left again"))
        at_worker.send_all()
        await at_worker.aborted.wait()
        at_worker.refuse(grpc.StatusCode.CANCELLED, "aborted")
        other, at_worker = await c.submit(request())
        at_worker.send_tokens()
        assert isinstance(await other.next(), Output)  # so all before it has been handled
        with pytest.raises(Cancelled, match=r"left$"):
            await stream.next()


async def test_an_abort_after_the_end_says_nothing_to_the_worker() -> None:
    async with connected() as c:
        stream, at_worker = await c.submit(request(max_tokens=1))
        at_worker.send_all()
        assert isinstance(await stream.next(), Output)
        c.session.abort(stream, Cancelled("left"))
        _, later = await c.submit(request())
        c.session.abort(c.listener.streams[-1], Cancelled("left"))
        await later.aborted.wait()
        assert not at_worker.aborted.is_set()


async def test_a_client_that_does_not_read_stalls_only_itself_and_is_aborted() -> None:
    async with connected(max_buffered=3) as c:
        slow, at_worker = await c.submit(request(max_tokens=50))
        fast, other = await c.submit(request(max_tokens=50))
        received = 0
        for _ in range(10):
            at_worker.send_tokens()
            other.send_tokens()
            assert isinstance(await fast.next(), Output)
            received += 1
        await at_worker.aborted.wait()
        assert received == 10
        assert not other.aborted.is_set()
        for _ in range(3):
            assert isinstance(await slow.next(), Output)
        with pytest.raises(Cancelled, match="3 steps behind"):
            await slow.next()


async def test_choices_of_a_prompt_have_a_stream_each_and_end_each_by_itself() -> None:
    async with connected() as c:
        sequence = request(max_tokens=2)
        message = wire.submit("p", sequence, Plan(c.session.worker, None, None, 0, 1), [], 60.0, [("a", 1), ("b", 2)])
        prompt = c.session.submit(message)
        at_a, at_b = [await c.worker.next_request() for _ in range(2)]
        assert prompt.choice_ids == ("a", "b")
        assert c.session.num_requests == 2
        at_a.send_first_tokens()
        for choice_id, seed in (("a", 1), ("b", 2)):
            output = await prompt[choice_id].next()
            assert isinstance(output, Output)
            assert [token.token_id for token in output.tokens] == continuation([1, 2, 3], 1, seed)
        c.session.abort(prompt["a"], Cancelled("left"))
        await at_a.aborted.wait()
        assert c.session.num_requests == 1
        at_a.send_tokens()  # crossed with the abort
        at_b.send_tokens()
        last = await prompt["b"].next()
        assert isinstance(last, Output)
        assert last.finish_reason is FinishReason.LENGTH
        assert c.session.num_requests == 0
        assert not at_b.aborted.is_set()
        with pytest.raises(Cancelled):
            await prompt["a"].next()


async def test_a_refusal_is_of_the_prompt_and_ends_the_choices_that_live() -> None:
    async with connected() as c:
        message = wire.submit("p", request(), Plan(c.session.worker, None, None, 0, 1), [], 60.0, [("a", 1), ("b", 2)])
        prompt = c.session.submit(message)
        at_a, _ = [await c.worker.next_request() for _ in range(2)]
        at_a.send_all()
        at_a.refuse(grpc.StatusCode.DEADLINE_EXCEEDED, "too late")
        at_a.refuse(grpc.StatusCode.DEADLINE_EXCEEDED, "too late, again")
        with pytest.raises(DeadlineExceeded, match=r"^too late$"):
            await prompt["b"].next()
        received = [await prompt["a"].next() for _ in range(6)]
        assert isinstance(received[-1], Output)
        assert received[-1].finish_reason is FinishReason.LENGTH
        assert c.session.num_requests == 0


async def test_log_probabilities_that_are_of_another_prompt_end_the_session() -> None:
    async with connected() as c:
        stream, at_worker = await c.submit(request(params=SamplingParams(max_tokens=2, prompt_logprobs=1)))
        del at_worker.submit.prompt_token_ids[0]
        at_worker.send_tokens()
        with pytest.raises(WorkerLost, match="broke the protocol: log-probabilities of 1 tokens for a prompt of 3"):
            await stream.next()


async def test_need_prefill_is_handed_on_and_answered() -> None:
    async with connected() as c:
        stream, at_worker = await c.submit(request())
        at_worker.need_prefill("lease expired", "p0")
        assert await stream.next() == NeedPrefill("lease expired", 0, "p0")
        c.session.assign(stream, None)
        assigned = await at_worker.assigned.get()
        assert not assigned.HasField("prefill_worker")


async def test_the_load_is_reported() -> None:
    async with connected() as c:
        load = pb.Load(num_running=3, num_free_blocks=9, num_waiting_tokens=70, draining=True)
        c.worker.sessions[0].send(pb.SessionResponse(load=load))
        assert await c.listener.loads.get() == WorkerLoad(
            num_running=3, num_free_blocks=9, num_waiting_tokens=70, draining=True
        )
