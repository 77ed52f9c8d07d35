"""A holder in a process of its own, for tests that kill it: prints its address, and fills two blocks of every prefill.

python holder_process.py PORT       PORT 0: any
"""

import asyncio
import sys

import grpc

from handoffs import LAYOUT, FakeHolderEngine
from kvtransfer.channels import SERVER_OPTIONS
from kvtransfer.memfd import MemfdMemory
from kvtransfer.messages import Open
from kvtransfer.ports import HolderListener, HolderPool
from kvtransfer.provider import Provider
from kvtransfer.service import KvExchangeService
from tandem.v1 import exchange_pb2_grpc


class EagerEngine(FakeHolderEngine):
    def start_prefill(self, open: Open, listener: HolderListener) -> None:
        super().start_prefill(open, listener)
        self.fill(open.handoff_id, 0, [5, 6], 8)


async def main(port: int) -> None:
    memory = MemfdMemory(16 * LAYOUT.bytes_per_block)
    memory.buffer[5 * LAYOUT.bytes_per_block] = 77
    pool = HolderPool(memory.handle("holder", LAYOUT), LAYOUT)
    server = grpc.aio.server(options=SERVER_OPTIONS)
    exchange_pb2_grpc.add_KvExchangeServicer_to_server(  # type: ignore[no-untyped-call]
        KvExchangeService(Provider(pool, EagerEngine())), server
    )
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()


asyncio.run(main(int(sys.argv[1])))
