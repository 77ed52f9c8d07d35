"""Section `ipc`: two processes, each with a pool, on one device.

The owner fills its blocks and says so; this process copies them through a mapping. In the second part the owner says so
before they are filled: a kernel that does nothing for a while stands in front, and only the fence that comes with the
word keeps the copy behind the filling. Control rounds leave the fence out: if none of them reads what was there before,
the rounds prove nothing.
"""

import multiprocessing
from multiprocessing.connection import Connection

import torch

from benchmarks.gpu.pools import as_blocks, new_pool, pattern, record_fence
from benchmarks.gpu.section import Section, Setting
from engine.memory import KVLayout
from kvtransfer.mapping import PeerPool, open_mapping

NUM_ROUNDS = 20
NUM_CONTROL_ROUNDS = 5
_NUM_BLOCKS = 256
_DELAY_CYCLES = 200_000_000  # some 100 ms: two processes on one GPU take turns, and the reader needs one within


def _layout(device: str) -> KVLayout:
    return KVLayout(16, 4096 if device == "cpu" else 1 << 16, bytes(16))


def run(section: Section, setting: Setting) -> None:
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    owner = spawn.Process(target=_own, args=(there, setting.device), daemon=True)
    owner.start()
    there.close()
    try:
        _consume(section, setting, here)
        here.send(None)
        owner.join(20)
        section.check("the owner ended well", owner.exitcode == 0, owner.exitcode)
    finally:
        owner.kill()


def _consume(section: Section, setting: Setting, connection: Connection) -> None:
    handle = connection.recv()
    layout = _layout(setting.device)
    memory = new_pool(setting.device, _NUM_BLOCKS * layout.bytes_per_block)
    blocks = as_blocks(memory, layout.bytes_per_block)
    ids = torch.arange(_NUM_BLOCKS, device=blocks.device)
    copies = memory.copies(layout)
    peer = PeerPool(handle, open_mapping(handle))

    def filled_with(salt: int) -> bool:
        return torch.equal(blocks[1:], pattern(ids[1:], layout.bytes_per_block, salt))

    def copy(fence: int | None) -> None:
        every = list(range(1, _NUM_BLOCKS))
        copies.copy(peer, every, every, fence)

    copy(None)
    section.check("blocks gathered through the mapping", filled_with(0))
    backwards, odd = list(range(_NUM_BLOCKS - 1, 0, -1)), list(range(1, _NUM_BLOCKS, 2))
    copies.copy(peer, backwards, list(range(1, _NUM_BLOCKS)), None)
    mirrored = torch.equal(blocks[1:], pattern(ids[1:].flip(0), layout.bytes_per_block, 0))
    copies.copy(peer, odd, odd, None)
    straight = torch.equal(blocks[odd], pattern(ids[odd], layout.bytes_per_block, 0))
    section.check("blocks gathered in any order", mirrored and straight)

    right = 0
    for salt in range(1, NUM_ROUNDS + 1):
        connection.send(salt)
        copy(connection.recv())
        right += filled_with(salt)
    section.check("rounds ordered by an event", right == NUM_ROUNDS, f"{right} of {NUM_ROUNDS}")
    if setting.on_gpu:
        stale = 0
        for salt in range(NUM_ROUNDS + 1, NUM_ROUNDS + NUM_CONTROL_ROUNDS + 1):
            connection.send(salt)
            fence = connection.recv()
            copy(None)
            stale += not filled_with(salt)
            copy(fence)
        section.check("without the event old blocks are read", stale > 0, f"{stale} of {NUM_CONTROL_ROUNDS} rounds")
    copies.close()
    peer.retire()
    memory.close()


def _own(connection: Connection, device: str) -> None:
    layout = _layout(device)
    memory = new_pool(device, _NUM_BLOCKS * layout.bytes_per_block)
    blocks = as_blocks(memory, layout.bytes_per_block)
    ids = torch.arange(_NUM_BLOCKS, device=blocks.device)
    on_gpu = blocks.is_cuda
    blocks.copy_(pattern(ids, layout.bytes_per_block, 0))
    if on_gpu:
        torch.cuda.synchronize()
    connection.send(memory.handle("owner", layout))
    while (salt := connection.recv()) is not None:
        content = pattern(ids, layout.bytes_per_block, salt)
        if on_gpu:
            torch.cuda._sleep(_DELAY_CYCLES)  # type: ignore[no-untyped-call]
        blocks.copy_(content)
        connection.send(record_fence(memory))
    if on_gpu:
        torch.cuda.synchronize()
    del blocks
    memory.close()
