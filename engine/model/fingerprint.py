"""Whether two workers' KV blocks mean the same: 16 bytes over everything that goes into a key or a value.

The same files give the same fingerprint on every machine and under every path; it is the root of all block hashes, and
what a hand-off compares before anything else.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from engine.attention.backend import KVScales
from engine.model.config import ModelConfig

FINGERPRINT_BYTES = 16
# A file up to this size is hashed whole; of a larger one the beginning (names, shapes, types) and even samples.
_WHOLE_BYTES = 256 << 20
_HEAD_BYTES = 16 << 20
_SAMPLE_BYTES = 1 << 20
_NUM_SAMPLES = 64


def fingerprint(
    config: ModelConfig,
    *,
    dtype: str,
    block_size: int,
    weights: bytes,
    kv_dtype: str | None = None,
    kv_scales: Sequence[KVScales] = (),
) -> bytes:
    """Of the blocks of a worker.

    Args:
        dtype: what is computed in, by name.
        kv_dtype: what is stored in; None: `dtype`.
        kv_scales: a layer, if it is scaled: a large file's sampled identity may miss numbers that small.
        weights: `weights_identity` of the model's files.
    """
    description = {
        "config": asdict(config),
        "dtype": dtype,
        "kv_dtype": kv_dtype or dtype,
        "kv_scales": [asdict(scales) for scales in kv_scales],
        "block_size": block_size,
        "weights": weights.hex(),
    }
    canonical = json.dumps(description, sort_keys=True).encode()
    return hashlib.blake2b(canonical, digest_size=FINGERPRINT_BYTES, person=b"tandem-kv").digest()


def weights_identity(files: Sequence[Path]) -> bytes:
    """Of what is in `files`, in their order; their names do not matter."""
    digest = hashlib.blake2b(digest_size=FINGERPRINT_BYTES)
    for path in files:
        size = path.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with path.open("rb") as file:
            for offset, length in _samples(size):
                file.seek(offset)
                while length > 0 and (data := file.read(min(length, _SAMPLE_BYTES))):
                    digest.update(data)
                    length -= len(data)
    return digest.digest()


def _samples(size: int) -> list[tuple[int, int]]:
    """Which (offset, length) of a file of that size to look at."""
    if size <= _WHOLE_BYTES:
        return [(0, size)]
    span = size - _HEAD_BYTES - _SAMPLE_BYTES  # the last sample ends where the file does
    offsets = (_HEAD_BYTES + i * span // (_NUM_SAMPLES - 1) for i in range(_NUM_SAMPLES))
    return [(0, _HEAD_BYTES), *((offset, _SAMPLE_BYTES) for offset in offsets)]
