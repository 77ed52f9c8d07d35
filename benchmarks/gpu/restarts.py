"""Section `restarts`: the owner of a pool dies and comes back; nothing of it stays behind.

Half of the owners are killed, half end by themselves; each is mapped, read from, and let go of when it has died.
"""

import multiprocessing
import select
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from benchmarks.gpu.pools import as_blocks, new_pool
from benchmarks.gpu.section import Section, Setting
from engine.memory import KVLayout
from kvtransfer.mapping import PeerPool, open_mapping

NUM_RESTARTS = {"cuda": 50, "cpu": 8}
_NUM_BLOCKS = 64
_LAYOUT = KVLayout(16, 1 << 20, bytes(16))
_WARM_UP = 3  # the first ones load what stays
_ALLOWED_GROWTH = 32 << 20
_DEATH_S = 20.0


def run(section: Section, setting: Setting) -> None:
    server = multiprocessing.get_context("forkserver")
    # Its children are forked with everything imported, and nothing of CUDA touched.
    server.set_forkserver_preload(["torch", "cupy", "kvtransfer.cuda_ipc"] if setting.on_gpu else ["torch"])
    memory = new_pool(setting.device, _NUM_BLOCKS * _LAYOUT.bytes_per_block)
    copies = memory.copies(_LAYOUT)
    blocks = as_blocks(memory, _LAYOUT.bytes_per_block)
    used: list[int] = []
    right = noticed = 0
    num_restarts = NUM_RESTARTS["cuda" if setting.on_gpu else "cpu"]
    for restart in range(num_restarts):
        here, there = server.Pipe()
        owner = server.Process(target=_own, args=(there, setting.device, restart), daemon=True)
        owner.start()
        handle = here.recv()
        peer = PeerPool(handle, open_mapping(handle))
        copies.copy(peer, range(1, _NUM_BLOCKS), range(1, _NUM_BLOCKS), None)
        right += bool((blocks[1:] == restart % 251).all())
        if restart % 2:
            owner.kill()
        else:
            here.send(None)
        assert peer.owner_fd is not None
        noticed += bool(select.select([peer.owner_fd], [], [], _DEATH_S)[0])
        peer.retire()
        owner.join()
        here.close()
        used.append(_used(setting))
    section.check("blocks read from each owner", right == num_restarts, f"{right} of {num_restarts}")
    section.check("deaths noticed", noticed == num_restarts, f"{noticed} of {num_restarts}")
    growth = used[-1] - used[_WARM_UP - 1]
    detail = f"{growth / 2**20:+.1f} MiB after {num_restarts} restarts"
    section.check("memory stays flat", growth <= _ALLOWED_GROWTH, detail)
    copies.close()
    memory.close()


def _used(setting: Setting) -> int:
    """Bytes of the GPU that anybody uses; of this process's mappings of pools on a CPU."""
    if setting.on_gpu:
        free, total = torch.cuda.mem_get_info()
        return total - free
    return Path("/proc/self/maps").read_text().count("memfd:tandem-kv") * _NUM_BLOCKS * _LAYOUT.bytes_per_block


def _own(connection: Connection, device: str, restart: int) -> None:
    memory = new_pool(device, _NUM_BLOCKS * _LAYOUT.bytes_per_block)
    as_blocks(memory, _LAYOUT.bytes_per_block).fill_(restart % 251)
    if device != "cpu":
        torch.cuda.synchronize()
    connection.send(memory.handle(f"owner-{restart}", _LAYOUT))
    connection.recv()
    memory.close()
