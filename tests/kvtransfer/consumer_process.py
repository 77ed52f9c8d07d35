"""A consumer in a process of its own, for tests that kill or freeze it: opens one hand-off, and waits.

python consumer_process.py ADDRESS
"""

import asyncio
import sys

from handoffs import LAYOUT, FakeConsumerEngine, an_open
from kvtransfer.client import GrpcTransport
from kvtransfer.loopback import LoopbackMemory
from kvtransfer.puller import Puller


async def main(address: str) -> None:
    memory = LoopbackMemory(16 * LAYOUT.bytes_per_block)
    engine = FakeConsumerEngine()
    puller = Puller(memory, LAYOUT, engine, GrpcTransport())
    puller.pull(address, an_open(), [(9, 10, 3)])
    await engine.over.wait()


asyncio.run(main(sys.argv[1]))
