from tandem.v1 import sampling_pb2 as _sampling_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HandoffRequest(_message.Message):
    __slots__ = ("open", "pulled")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    PULLED_FIELD_NUMBER: _ClassVar[int]
    open: Open
    pulled: Pulled
    def __init__(self, open: _Optional[_Union[Open, _Mapping]] = ..., pulled: _Optional[_Union[Pulled, _Mapping]] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("handoff_id", "request_id", "consumer_instance_id", "fingerprint", "timeout_ms", "prefill", "cached", "staged")
    HANDOFF_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CONSUMER_INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    STAGED_FIELD_NUMBER: _ClassVar[int]
    handoff_id: str
    request_id: str
    consumer_instance_id: str
    fingerprint: bytes
    timeout_ms: int
    prefill: PrefillSource
    cached: CachedSource
    staged: bool
    def __init__(self, handoff_id: _Optional[str] = ..., request_id: _Optional[str] = ..., consumer_instance_id: _Optional[str] = ..., fingerprint: _Optional[bytes] = ..., timeout_ms: _Optional[int] = ..., prefill: _Optional[_Union[PrefillSource, _Mapping]] = ..., cached: _Optional[_Union[CachedSource, _Mapping]] = ..., staged: _Optional[bool] = ...) -> None: ...

class PrefillSource(_message.Message):
    __slots__ = ("token_ids", "num_prompt_tokens", "sampling_params", "skip_blocks", "cache_salt", "priority", "cached_on_address", "num_cached_blocks", "seeds")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_PARAMS_FIELD_NUMBER: _ClassVar[int]
    SKIP_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHED_ON_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SEEDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_prompt_tokens: int
    sampling_params: _sampling_pb2.SamplingParams
    skip_blocks: int
    cache_salt: str
    priority: int
    cached_on_address: str
    num_cached_blocks: int
    seeds: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., num_prompt_tokens: _Optional[int] = ..., sampling_params: _Optional[_Union[_sampling_pb2.SamplingParams, _Mapping]] = ..., skip_blocks: _Optional[int] = ..., cache_salt: _Optional[str] = ..., priority: _Optional[int] = ..., cached_on_address: _Optional[str] = ..., num_cached_blocks: _Optional[int] = ..., seeds: _Optional[_Iterable[int]] = ...) -> None: ...

class CachedSource(_message.Message):
    __slots__ = ("block_hashes", "skip_blocks")
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    SKIP_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    block_hashes: bytes
    skip_blocks: int
    def __init__(self, block_hashes: _Optional[bytes] = ..., skip_blocks: _Optional[int] = ...) -> None: ...

class Pulled(_message.Message):
    __slots__ = ("num_blocks",)
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    def __init__(self, num_blocks: _Optional[int] = ...) -> None: ...

class HandoffResponse(_message.Message):
    __slots__ = ("accepted", "ready", "complete", "confirmed")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    CONFIRMED_FIELD_NUMBER: _ClassVar[int]
    accepted: Accepted
    ready: Ready
    complete: Complete
    confirmed: Confirmed
    def __init__(self, accepted: _Optional[_Union[Accepted, _Mapping]] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., complete: _Optional[_Union[Complete, _Mapping]] = ..., confirmed: _Optional[_Union[Confirmed, _Mapping]] = ...) -> None: ...

class Accepted(_message.Message):
    __slots__ = ("num_cached_tokens", "num_blocks", "lease_ms", "pool")
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    num_cached_tokens: int
    num_blocks: int
    lease_ms: int
    pool: PoolHandle
    def __init__(self, num_cached_tokens: _Optional[int] = ..., num_blocks: _Optional[int] = ..., lease_ms: _Optional[int] = ..., pool: _Optional[_Union[PoolHandle, _Mapping]] = ...) -> None: ...

class PoolHandle(_message.Message):
    __slots__ = ("instance_id", "kind", "raw", "offset", "size", "bytes_per_block", "fingerprint")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    RAW_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_BLOCK_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    kind: str
    raw: bytes
    offset: int
    size: int
    bytes_per_block: int
    fingerprint: bytes
    def __init__(self, instance_id: _Optional[str] = ..., kind: _Optional[str] = ..., raw: _Optional[bytes] = ..., offset: _Optional[int] = ..., size: _Optional[int] = ..., bytes_per_block: _Optional[int] = ..., fingerprint: _Optional[bytes] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("first", "block_ids", "num_tokens", "group", "fence")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    first: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    num_tokens: int
    group: int
    fence: int
    def __init__(self, first: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ..., num_tokens: _Optional[int] = ..., group: _Optional[int] = ..., fence: _Optional[int] = ...) -> None: ...

class Complete(_message.Message):
    __slots__ = ("num_tokens", "num_cached_tokens", "queued_s", "prefill_s", "first_tokens", "prompt_logprobs")
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    num_cached_tokens: int
    queued_s: float
    prefill_s: float
    first_tokens: _containers.RepeatedCompositeFieldContainer[SampledToken]
    prompt_logprobs: _sampling_pb2.PromptLogprobs
    def __init__(self, num_tokens: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., queued_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., first_tokens: _Optional[_Iterable[_Union[SampledToken, _Mapping]]] = ..., prompt_logprobs: _Optional[_Union[_sampling_pb2.PromptLogprobs, _Mapping]] = ...) -> None: ...

class SampledToken(_message.Message):
    __slots__ = ("token_id", "logprobs")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprobs: _sampling_pb2.TokenLogprobs
    def __init__(self, token_id: _Optional[int] = ..., logprobs: _Optional[_Union[_sampling_pb2.TokenLogprobs, _Mapping]] = ...) -> None: ...

class Confirmed(_message.Message):
    __slots__ = ("num_blocks",)
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    def __init__(self, num_blocks: _Optional[int] = ...) -> None: ...
