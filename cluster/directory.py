"""Which worker caches which blocks: block hash → set of workers, following the workers' events.

A worker's entry lives through: `begin` (its stream of events starts: whatever was known of it is forgotten, its
snapshot and then its batches are applied); `apply` for every batch, each with the next sequence number; `forget`. A
batch out of order is not applied, and the answer says so: the follower then subscribes anew. A wrong entry costs a
recompute, never a wrong token, so nothing here waits for anybody.

The set of a block is a bit mask over the workers' slots; most blocks are held by the same few combinations of workers,
and equal masks are one object. Forgetting a worker must not stall a gateway that knows a million blocks: its slot is
*retired* (masked out of every answer at once), and the table, cut into shards by the hash's first byte, is swept one
shard at a time as later events come in; then the slot is free for another worker.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from engine.kvcache.block_hash import BlockHash
from engine.kvcache.events import BlocksRemoved, BlocksStored, CacheCleared, KVEvent

NUM_SHARDS = 256


class Applied(Enum):
    """What became of a batch or heartbeat."""

    OK = "ok"
    DUPLICATE = "duplicate"  # seen before; ignored
    GAP = "gap"  # something before it was lost, or it belongs to another stream: subscribe anew


@dataclass(slots=True)
class _Holder:
    """A worker in the directory."""

    bit: int  # 1 << slot
    epoch: int
    sequence: int  # of the last batch applied
    num_blocks: int = 0


class Directory:
    """The gateway's whole knowledge of who caches what. Workers are named by their instance id."""

    def __init__(self) -> None:
        self._shards: list[dict[BlockHash, int]] = [{} for _ in range(NUM_SHARDS)]
        self._holders: dict[str, _Holder] = {}
        self._workers: dict[int, str] = {}  # by bit
        self._masks: dict[int, int] = {}  # equal masks are one object
        self._free_bits: list[int] = []
        self._live = 0  # bits of workers that are not retired
        self._retired: dict[int, int] = {}  # bit → shards still to be swept for it
        self._next_shard = 0

    # --- what the workers say

    def begin(self, instance_id: str, epoch: int, sequence: int) -> None:
        """A new stream of the worker's events: forgets it, and expects the batch after `sequence` next."""
        self.forget(instance_id)
        bit = self._free_bits.pop() if self._free_bits else 1 << (len(self._workers) + len(self._retired))
        self._workers[bit] = instance_id
        self._holders[instance_id] = _Holder(bit, epoch, sequence)
        self._live |= bit

    def add_snapshot(self, instance_id: str, hashes: Iterable[BlockHash]) -> None:
        """A part of what the worker held when its stream began."""
        self._sweep_one_shard()
        self._store(self._holders[instance_id], hashes)

    def apply(self, instance_id: str, epoch: int, sequence: int, events: Sequence[KVEvent]) -> Applied:
        """A batch of changes. Removing what is not known changes nothing, and the rest still counts."""
        self._sweep_one_shard()
        holder = self._holders.get(instance_id)
        if holder is None:
            return Applied.GAP
        if epoch <= holder.epoch and sequence <= holder.sequence:
            return Applied.DUPLICATE
        # Only `cleared` raises the epoch; one that rose without it means that a batch with it was lost.
        raised = epoch > holder.epoch and any(isinstance(event, CacheCleared) for event in events)
        if sequence != holder.sequence + 1 or not (epoch == holder.epoch or raised):
            return Applied.GAP
        holder.epoch, holder.sequence = epoch, sequence
        for event in events:
            match event:
                case BlocksStored(hashes):
                    self._store(holder, hashes)
                case BlocksRemoved(hashes):
                    self._remove(holder, hashes)
                case CacheCleared():
                    holder = self._clear(instance_id, holder)
        return Applied.OK

    def heartbeat(self, instance_id: str, epoch: int, sequence: int) -> Applied:
        """An idle worker says which batch was its last."""
        self._sweep_one_shard()
        holder = self._holders.get(instance_id)
        if holder is None or (epoch, sequence) != (holder.epoch, holder.sequence):
            return Applied.GAP
        return Applied.OK

    def forget(self, instance_id: str) -> None:
        """The worker is gone, or its stream is: nothing of it is believed any more. Idempotent."""
        holder = self._holders.pop(instance_id, None)
        if holder is None:
            return
        del self._workers[holder.bit]
        self._live &= ~holder.bit
        if holder.num_blocks:
            self._retired[holder.bit] = NUM_SHARDS
        else:
            self._free_bits.append(holder.bit)

    # --- what the router asks

    def longest_prefix(self, hashes: Sequence[BlockHash]) -> dict[str, int]:
        """How many leading blocks of `hashes` each worker holds; workers that hold none are left out.

        One walk over the hashes, as far as the worker that holds most.
        """
        held: dict[str, int] = {}
        shards, remaining = self._shards, self._live
        if not remaining:
            return held
        for index, block_hash in enumerate(hashes):
            mask = shards[block_hash[0]].get(block_hash, 0) & remaining
            if mask != remaining:
                if index:
                    self._note(held, remaining & ~mask, index)
                if not mask:
                    return held
                remaining = mask
        if hashes:
            self._note(held, remaining, len(hashes))
        return held

    def _note(self, held: dict[str, int], bits: int, num_blocks: int) -> None:
        while bits:
            bit = bits & -bits
            held[self._workers[bit]] = num_blocks
            bits ^= bit

    def workers_of(self, block_hash: BlockHash) -> set[str]:
        """Who holds this block."""
        held: dict[str, int] = {}
        self._note(held, self._shards[block_hash[0]].get(block_hash, 0) & self._live, 1)
        return set(held)

    # --- what metrics ask

    @property
    def num_entries(self) -> int:
        """Distinct blocks in the table, those of forgotten workers included until they are swept."""
        return sum(len(shard) for shard in self._shards)

    def num_blocks(self, instance_id: str) -> int:
        """Blocks that the worker is believed to hold."""
        holder = self._holders.get(instance_id)
        return holder.num_blocks if holder else 0

    def __contains__(self, instance_id: str) -> bool:
        return instance_id in self._holders

    # --- the table

    def _store(self, holder: _Holder, hashes: Iterable[BlockHash]) -> None:
        bit, shards, masks = holder.bit, self._shards, self._masks
        for block_hash in hashes:
            shard = shards[block_hash[0]]
            mask = shard.get(block_hash, 0)
            if not mask & bit:
                mask |= bit
                shard[block_hash] = masks.setdefault(mask, mask)
                holder.num_blocks += 1

    def _remove(self, holder: _Holder, hashes: Iterable[BlockHash]) -> None:
        bit, shards, masks = holder.bit, self._shards, self._masks
        for block_hash in hashes:
            shard = shards[block_hash[0]]
            mask = shard.get(block_hash, 0)
            if mask & bit:
                mask ^= bit
                if mask:
                    shard[block_hash] = masks.setdefault(mask, mask)
                else:
                    del shard[block_hash]
                holder.num_blocks -= 1

    def _clear(self, instance_id: str, holder: _Holder) -> _Holder:
        self.begin(instance_id, holder.epoch, holder.sequence)
        return self._holders[instance_id]

    def _sweep_one_shard(self) -> None:
        if not self._retired:
            return
        index = self._next_shard
        self._next_shard = (index + 1) % NUM_SHARDS
        keep = ~sum(self._retired)
        masks = self._masks
        # Rebuilt rather than edited: a dict gives memory back only when it is made anew.
        self._shards[index] = {
            block_hash: masks.setdefault(kept, kept)
            for block_hash, mask in self._shards[index].items()
            if (kept := mask & keep)
        }
        for bit in list(self._retired):
            self._retired[bit] -= 1
            if not self._retired[bit]:
                del self._retired[bit]
                self._free_bits.append(bit)
        if not self._retired:
            # Masks of workers long gone.
            self._masks = {m: m for m in masks if not m & ~self._live}

    def check_integrity(self) -> None:
        """Proves that counts and table agree; for tests. Linear in the number of blocks."""
        counts = dict.fromkeys(self._workers, 0)
        for number, shard in enumerate(self._shards):
            for block_hash, mask in shard.items():
                assert block_hash[0] == number, f"{block_hash.hex()} in shard {number}"
                assert mask, f"{block_hash.hex()} is held by nobody"
                unknown = mask & ~self._live & ~sum(self._retired)
                assert not unknown, f"{block_hash.hex()} is held by unknown slots {unknown:b}"
                for bit in counts:
                    counts[bit] += bool(mask & bit)
        for bit, count in counts.items():
            holder = self._holders[self._workers[bit]]
            assert holder.bit == bit, f"{self._workers[bit]} is at {holder.bit:b}, not {bit:b}"
            assert holder.num_blocks == count, f"{self._workers[bit]} counts {holder.num_blocks}, the table {count}"
        bits = [*self._workers, *self._retired, *self._free_bits]
        assert len(set(bits)) == len(bits), f"a slot is used twice: {sorted(bits)}"
