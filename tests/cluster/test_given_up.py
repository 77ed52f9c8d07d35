"""A text that its worker gives up is an error to its client, whatever had come of it."""

import asyncio
from contextlib import aclosing

import pytest

from cluster.errors import Leg, WorkerFailed
from cluster.generator import SequenceChunk
from fake_cluster import fake_cluster, request, token_ids
from fake_worker import continuation
from tandem.v1 import sampling_pb2
from tandem.v1 import worker_pb2 as pb


@pytest.mark.parametrize("num_tokens", [0, 2])
async def test_a_text_that_its_worker_gives_up_is_an_error_and_is_not_tried_elsewhere(num_tokens: int) -> None:
    async with fake_cluster("d0 d1") as c:
        chunks: list[SequenceChunk] = []

        async def read() -> None:
            async with aclosing(c.generator.generate(request((1, 2, 3)))) as stream:
                async for chunk in stream:
                    chunks.append(chunk)

        reading = asyncio.create_task(read())
        at_worker = await c.next_request()
        at_worker.send_tokens(num_tokens)
        end = pb.RequestOutput(
            request_id=at_worker.request_id, token_ids=[2], finish_reason=sampling_pb2.FINISH_REASON_ABORT
        )
        at_worker.session.send(pb.SessionResponse(step=pb.StepOutput(outputs=[end])))
        with pytest.raises(WorkerFailed, match="could not be held to its structure any further") as caught:
            await reading
        assert caught.value.leg is Leg.DECODE
        assert caught.value.http_status == 500
        assert token_ids(chunks) == continuation((1, 2, 3), num_tokens)  # without the end
        assert all(chunk.finish_reason is None for chunk in chunks)
        assert sum(len(worker.received) for worker in c.workers.values()) == 1
        assert not at_worker.aborted.is_set()  # it has ended there
