"""Section `restarts`: the owner of a pool dies and comes back; nothing of it stays behind.

Half of the owners are killed, half end by themselves; each is mapped, read from, and let go of when it has died.
"""

import multiprocessing
import select
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from benchmarks.gpu.pools import as_blocks, new_pool
from benchmarks.gpu.section import Section, Setting
from engine.memory import HostMemory, KVLayout
from kvtransfer.cuda_ipc import CudaIpcMemory
from kvtransfer.mapping import PeerPool, open_mapping

NUM_RESTARTS = {"cuda": 50, "cpu": 8}
_LEAST = {"cuda": 20, "cpu": 8}  # of those, however slowly processes start
_ENOUGH_S = 45.0
_NUM_BLOCKS = 64
_LAYOUT = KVLayout(16, 1 << 20, bytes(16))
_WARM_UP = 3  # the first ones load what stays
_ALLOWED_GROWTH = 32 << 20
_DEATH_S = 20.0
# A killed process's context is taken apart after the process is gone.
_SETTLE_S = 5.0


def run(section: Section, setting: Setting) -> None:
    kind = "cuda" if setting.on_gpu else "cpu"
    server = multiprocessing.get_context("forkserver")
    # Its children are forked with everything imported, and nothing of CUDA touched.
    server.set_forkserver_preload(["torch", "cupy", "kvtransfer.cuda_ipc"] if setting.on_gpu else ["torch"])
    memory = new_pool(setting.device, _NUM_BLOCKS * _LAYOUT.bytes_per_block)
    copies = memory.copies(_LAYOUT)
    blocks = as_blocks(memory, _LAYOUT.bytes_per_block)
    used_before = num_done = right = noticed = 0
    began = time.monotonic()
    while num_done < NUM_RESTARTS[kind] and (num_done < _LEAST[kind] or time.monotonic() - began < _ENOUGH_S):
        here, there = server.Pipe()
        owner = server.Process(target=_own, args=(there, setting.device, num_done), daemon=True)
        owner.start()
        there.close()
        handle = here.recv()
        peer = PeerPool(handle, open_mapping(handle))
        copies.copy(peer, range(1, _NUM_BLOCKS), range(1, _NUM_BLOCKS), None)
        right += bool((blocks[1:] == _content(num_done)).all())
        if num_done % 2:
            owner.kill()
        else:
            here.send(None)
        assert peer.owner_fd is not None
        noticed += bool(select.select([peer.owner_fd], [], [], _DEATH_S)[0])
        peer.retire()
        owner.join()
        here.close()
        num_done += 1
        if num_done == _WARM_UP:
            used_before = _used_at_rest(setting, limit=0)
    section.figure("restarts", num_done, f"of {NUM_RESTARTS[kind]}")
    section.check("enough restarts", num_done >= _LEAST[kind], num_done)
    section.check("blocks read from each owner", right == num_done, f"{right} of {num_done}")
    section.check("deaths noticed", noticed == num_done, f"{noticed} of {num_done}")
    growth = _used_at_rest(setting, limit=used_before + _ALLOWED_GROWTH) - used_before
    section.check("memory stays flat", growth <= _ALLOWED_GROWTH, f"{growth / 2**20:+.1f} MiB after {num_done}")
    copies.close()
    memory.close()


def _used_at_rest(setting: Setting, limit: int) -> int:
    """Bytes in use, as soon as they are at most `limit`, or when enough time has passed."""
    end = time.monotonic() + (_SETTLE_S if setting.on_gpu else 0.0)
    while (used := _used(setting)) > limit and time.monotonic() < end:
        time.sleep(0.1)
    return used


def _used(setting: Setting) -> int:
    """Bytes of the GPU that anybody uses; of this process's mappings of pools on a CPU."""
    if setting.on_gpu:
        free, total = torch.cuda.mem_get_info()
        return total - free
    return Path("/proc/self/maps").read_text().count("memfd:tandem-kv") * _NUM_BLOCKS * _LAYOUT.bytes_per_block


def _content(restart: int) -> int:
    return 1 + restart % 250


def _own(connection: Connection, device: str, restart: int) -> None:
    memory = new_pool(device, _NUM_BLOCKS * _LAYOUT.bytes_per_block)
    if isinstance(memory, HostMemory):
        as_blocks(memory, _LAYOUT.bytes_per_block).fill_(_content(restart))
    else:
        # Not through torch, whose start would take longer than all the rest.
        assert isinstance(memory, CudaIpcMemory)
        memory.runtime.memset(memory.pointer, _content(restart), memory.nbytes)
    connection.send(memory.handle(f"owner-{restart}", _LAYOUT))
    connection.recv()
    memory.close()
