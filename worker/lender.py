"""Lending what the engine caches: the part of a holder that both roles have."""

from collections.abc import Sequence

from engine.kvcache.block_hash import BlockHash, hash_blocks, root_hash
from kvtransfer.errors import Code, HandoffRefused
from kvtransfer.events import CachedPinned
from kvtransfer.messages import CachedSource, Open
from kvtransfer.ports import HolderListener
from worker.context import WorkerContext
from worker.engine_commands import EngineCommands


class CacheLender:
    """`HolderPort` of a worker that computes nothing for others."""

    def __init__(self, context: WorkerContext) -> None:
        self._thread = context.thread
        self._engine = EngineCommands(context.thread, context.structures, context.built.engine.config.max_waiting)

    def start_prefill(self, open: Open, listener: HolderListener) -> None:
        raise HandoffRefused(Code.FAILED_PRECONDITION, "this worker does not prefill for others")

    def pin_cached(self, open: Open, listener: HolderListener) -> None:
        assert isinstance(open.source, CachedSource)
        hashes = [BlockHash(block_hash) for block_hash in open.source.block_hashes]
        # The pins are taken whether or not somebody still waits for them: they must reach the listener.
        self._thread.post(
            lambda engine: self._thread.report(
                listener, CachedPinned((tuple(engine.pin_cached(hashes)),), engine.fence)
            )
        )

    def abort(self, handoff_id: str) -> None:
        """Nothing is computed here."""

    def unpin(self, block_ids: Sequence[int]) -> None:
        self._engine.unpin(block_ids)


def cached_source(
    context: WorkerContext, token_ids: Sequence[int], cache_salt: str, num_blocks: int, skip_blocks: int
) -> CachedSource:
    """Asks for the first `num_blocks` blocks of a sequence.

    The block of the last token is never among them: at least one token is computed, for its logits.
    """
    block_size = context.layout.block_size
    num_blocks = min(num_blocks, (len(token_ids) - 1) // block_size)
    root = root_hash(context.layout.fingerprint, cache_salt)
    hashes = hash_blocks(root, token_ids[: num_blocks * block_size], block_size)
    return CachedSource(tuple(hashes), skip_blocks=min(skip_blocks, num_blocks))
