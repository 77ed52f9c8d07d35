"""Workers in processes of their own, killed without a word while requests run."""

import asyncio
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import yaml

from assigned import num_assigned
from cluster.generator import SequenceChunk
from cluster.membership import Membership
from cluster.routed_generator import RoutedGenerator
from cluster.router import RouterConfig
from engine.config import EngineConfig
from engine.hash_executor import expected_prompt_logprobs, expected_tokens
from engine.sampling_params import SamplingParams
from fake_cluster import request, token_ids
from worker.config import WorkerConfig

VOCAB_SIZE = 1000
PROMPTS = [tuple((seed * 977 + i * i * 31 + i) % VOCAB_SIZE for i in range(150 + 30 * seed)) for seed in range(8)]


class Processes:
    """A generator, and workers that can be killed."""

    def __init__(self, folder: Path) -> None:
        self.membership = Membership(RouterConfig(max_local_prefill_tokens=0))
        self.generator = RoutedGenerator(self.membership)
        self.processes: dict[str, asyncio.subprocess.Process] = {}
        self.addresses: dict[str, str] = {}
        self._folder = folder

    async def start(self, name: str, *, port: int = 0) -> None:
        engine = EngineConfig(num_blocks=256, max_model_len=1024, max_num_batched_tokens=64)
        config = WorkerConfig(engine=engine, worker_id=name, executor="hash", port=port)
        path = self._folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(asdict(config)))
        kind = "prefill_worker" if name.startswith("p") else "decode_worker"
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", kind, "--config", str(path), stdout=asyncio.subprocess.PIPE
        )
        self.processes[name] = process
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode().strip()
        self.addresses[name] = line.removeprefix("listening on ")
        assert self.addresses[name] != line, f"{name} did not start: {line}"
        await self.membership.wait_link(self.membership.add_worker(self.addresses[name]))

    async def kill(self, name: str) -> None:
        process = self.processes.pop(name)
        process.kill()
        await process.wait()

    async def close(self) -> None:
        await self.membership.close()
        for process in self.processes.values():
            process.kill()
            await process.wait()


@asynccontextmanager
async def processes(folder: Path, names: str) -> AsyncIterator[Processes]:
    async with AsyncExitStack() as stack:
        cluster = Processes(folder)
        stack.push_async_callback(cluster.close)
        for name in names.split():
            await cluster.start(name)
        yield cluster
        cluster.membership.ledger.check_integrity()
        assert num_assigned(cluster.membership.ledger) == 0


async def test_any_worker_killed_while_requests_run_is_not_noticed_and_serves_again_when_it_is_back(
    tmp_path: Path,
) -> None:
    async with processes(tmp_path, "p0 p1 d0 d1") as c:
        for round_number, victim in enumerate(["d0", "p0"]):
            # Salted, so that every round computes everything again.
            sequences = [request(p, max_tokens=200, cache_salt=str(round_number)) for p in PROMPTS]
            started = asyncio.Event()

            async def read(sequence, started: asyncio.Event = started) -> list[int]:  # type: ignore[no-untyped-def]
                received = []
                async with aclosing(c.generator.generate(sequence)) as chunks:
                    async for chunk in chunks:
                        received.append(chunk)
                        started.set()
                return token_ids(received)

            reading = [asyncio.create_task(read(sequence)) for sequence in sequences]
            await started.wait()  # some decode, others are still being prefilled
            port = int(c.addresses[victim].rpartition(":")[2])
            await c.kill(victim)
            answers = await asyncio.gather(*reading)
            assert answers == [expected_tokens(s.prompt_token_ids, s.params, VOCAB_SIZE) for s in sequences]
            await c.start(victim, port=port)
            again = request(PROMPTS[0], cache_salt="again")
            assert await read(again) == expected_tokens(again.prompt_token_ids, again.params, VOCAB_SIZE)
        assert c.generator.stats.resubmissions + c.generator.stats.repairs > 0


@pytest.mark.parametrize("victim", ["d0", "p0"])
async def test_a_worker_killed_while_choices_of_prompts_run_changes_none_of_them(tmp_path: Path, victim: str) -> None:
    async with processes(tmp_path, "p0 p1 d0 d1") as c:
        params = SamplingParams(max_tokens=150, prompt_logprobs=2)
        started = asyncio.Event()

        async def read(chunks: AsyncGenerator[SequenceChunk, None]) -> list[SequenceChunk]:
            received = []
            async with aclosing(chunks):
                async for chunk in chunks:
                    received.append(chunk)
                    started.set()
            return received

        reading = []
        for i, prompt in enumerate(PROMPTS):
            first = request(prompt, params=params)
            choices = [replace(first, request_id=f"{i}-{seed}", params=replace(params, seed=seed)) for seed in range(4)]
            streams = c.generator.generate_choices(choices)
            reading += [
                (choice, asyncio.create_task(read(stream))) for choice, stream in zip(choices, streams, strict=True)
            ]
        await started.wait()  # some decode, others are still being prefilled
        await c.kill(victim)
        for choice, task in reading:
            received = await task
            assert token_ids(received) == expected_tokens(choice.prompt_token_ids, choice.params, VOCAB_SIZE)
            wanted = expected_prompt_logprobs(choice.prompt_token_ids, params, VOCAB_SIZE)
            assert received[0].prompt_logprobs == wanted
            assert all(chunk.prompt_logprobs is None for chunk in received[1:])
        assert c.generator.stats.resubmissions + c.generator.stats.repairs > 0
