from tandem.v1 import sampling_pb2 as _sampling_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_PREFILL: _ClassVar[Role]
    ROLE_DECODE: _ClassVar[Role]
ROLE_UNSPECIFIED: Role
ROLE_PREFILL: Role
ROLE_DECODE: Role

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("worker_id", "instance_id", "role", "model_name", "model_path", "fingerprint", "block_size", "num_blocks", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "vocab_size", "bytes_per_block", "dtype", "metrics_address", "host_id", "device")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_PATH_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_BLOCK_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    instance_id: str
    role: Role
    model_name: str
    model_path: str
    fingerprint: bytes
    block_size: int
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    vocab_size: int
    bytes_per_block: int
    dtype: str
    metrics_address: str
    host_id: str
    device: str
    def __init__(self, worker_id: _Optional[str] = ..., instance_id: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., model_name: _Optional[str] = ..., model_path: _Optional[str] = ..., fingerprint: _Optional[bytes] = ..., block_size: _Optional[int] = ..., num_blocks: _Optional[int] = ..., max_model_len: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ..., vocab_size: _Optional[int] = ..., bytes_per_block: _Optional[int] = ..., dtype: _Optional[str] = ..., metrics_address: _Optional[str] = ..., host_id: _Optional[str] = ..., device: _Optional[str] = ...) -> None: ...

class SessionRequest(_message.Message):
    __slots__ = ("submit", "assign", "abort")
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    ASSIGN_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    submit: Submit
    assign: Assign
    abort: Abort
    def __init__(self, submit: _Optional[_Union[Submit, _Mapping]] = ..., assign: _Optional[_Union[Assign, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ...) -> None: ...

class Peer(_message.Message):
    __slots__ = ("worker_id", "instance_id", "address")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    instance_id: str
    address: str
    def __init__(self, worker_id: _Optional[str] = ..., instance_id: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class Plan(_message.Message):
    __slots__ = ("prefill_worker", "cached_on", "num_cached_blocks")
    PREFILL_WORKER_FIELD_NUMBER: _ClassVar[int]
    CACHED_ON_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    prefill_worker: Peer
    cached_on: Peer
    num_cached_blocks: int
    def __init__(self, prefill_worker: _Optional[_Union[Peer, _Mapping]] = ..., cached_on: _Optional[_Union[Peer, _Mapping]] = ..., num_cached_blocks: _Optional[int] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("request_id", "prompt_token_ids", "sampling_params", "plan", "resume_token_ids", "cache_salt", "priority", "timeout_ms", "choices")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_PARAMS_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    RESUME_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling_params: _sampling_pb2.SamplingParams
    plan: Plan
    resume_token_ids: _containers.RepeatedScalarFieldContainer[int]
    cache_salt: str
    priority: int
    timeout_ms: int
    choices: _containers.RepeatedCompositeFieldContainer[Choice]
    def __init__(self, request_id: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling_params: _Optional[_Union[_sampling_pb2.SamplingParams, _Mapping]] = ..., plan: _Optional[_Union[Plan, _Mapping]] = ..., resume_token_ids: _Optional[_Iterable[int]] = ..., cache_salt: _Optional[str] = ..., priority: _Optional[int] = ..., timeout_ms: _Optional[int] = ..., choices: _Optional[_Iterable[_Union[Choice, _Mapping]]] = ...) -> None: ...

class Choice(_message.Message):
    __slots__ = ("request_id", "seed")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    seed: int
    def __init__(self, request_id: _Optional[str] = ..., seed: _Optional[int] = ...) -> None: ...

class Assign(_message.Message):
    __slots__ = ("request_id", "prefill_worker")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WORKER_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prefill_worker: Peer
    def __init__(self, request_id: _Optional[str] = ..., prefill_worker: _Optional[_Union[Peer, _Mapping]] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("request_ids",)
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class SessionResponse(_message.Message):
    __slots__ = ("step", "need_prefill", "refused", "load")
    STEP_FIELD_NUMBER: _ClassVar[int]
    NEED_PREFILL_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    step: StepOutput
    need_prefill: NeedPrefill
    refused: Refused
    load: Load
    def __init__(self, step: _Optional[_Union[StepOutput, _Mapping]] = ..., need_prefill: _Optional[_Union[NeedPrefill, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., load: _Optional[_Union[Load, _Mapping]] = ...) -> None: ...

class StepOutput(_message.Message):
    __slots__ = ("outputs",)
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    outputs: _containers.RepeatedCompositeFieldContainer[RequestOutput]
    def __init__(self, outputs: _Optional[_Iterable[_Union[RequestOutput, _Mapping]]] = ...) -> None: ...

class RequestOutput(_message.Message):
    __slots__ = ("request_id", "token_ids", "logprobs", "finish_reason", "matched_token_id", "usage", "stages", "prompt_logprobs")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    MATCHED_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_sampling_pb2.TokenLogprobs]
    finish_reason: _sampling_pb2.FinishReason
    matched_token_id: int
    usage: Usage
    stages: StageTimes
    prompt_logprobs: _sampling_pb2.PromptLogprobs
    def __init__(self, request_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_sampling_pb2.TokenLogprobs, _Mapping]]] = ..., finish_reason: _Optional[_Union[_sampling_pb2.FinishReason, str]] = ..., matched_token_id: _Optional[int] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., stages: _Optional[_Union[StageTimes, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[_sampling_pb2.PromptLogprobs, _Mapping]] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("num_cached_tokens", "num_local_cached_tokens")
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOCAL_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_cached_tokens: int
    num_local_cached_tokens: int
    def __init__(self, num_cached_tokens: _Optional[int] = ..., num_local_cached_tokens: _Optional[int] = ...) -> None: ...

class StageTimes(_message.Message):
    __slots__ = ("queued", "prefill", "transfer", "decode")
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    queued: float
    prefill: float
    transfer: float
    decode: float
    def __init__(self, queued: _Optional[float] = ..., prefill: _Optional[float] = ..., transfer: _Optional[float] = ..., decode: _Optional[float] = ...) -> None: ...

class NeedPrefill(_message.Message):
    __slots__ = ("request_id", "reason", "num_confirmed_blocks", "failed_worker_id")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_CONFIRMED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FAILED_WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    reason: str
    num_confirmed_blocks: int
    failed_worker_id: str
    def __init__(self, request_id: _Optional[str] = ..., reason: _Optional[str] = ..., num_confirmed_blocks: _Optional[int] = ..., failed_worker_id: _Optional[str] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("request_id", "code", "message")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    code: int
    message: str
    def __init__(self, request_id: _Optional[str] = ..., code: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("num_running", "num_waiting", "num_transferring", "num_free_blocks", "num_cached_blocks", "num_active_blocks", "num_waiting_tokens", "draining")
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_TRANSFERRING_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACTIVE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    num_running: int
    num_waiting: int
    num_transferring: int
    num_free_blocks: int
    num_cached_blocks: int
    num_active_blocks: int
    num_waiting_tokens: int
    draining: bool
    def __init__(self, num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_transferring: _Optional[int] = ..., num_free_blocks: _Optional[int] = ..., num_cached_blocks: _Optional[int] = ..., num_active_blocks: _Optional[int] = ..., num_waiting_tokens: _Optional[int] = ..., draining: _Optional[bool] = ...) -> None: ...

class SubscribeKvEventsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class KvEvent(_message.Message):
    __slots__ = ("begin", "snapshot", "snapshot_end", "batch", "heartbeat")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_END_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    begin: Begin
    snapshot: Snapshot
    snapshot_end: SnapshotEnd
    batch: Batch
    heartbeat: Heartbeat
    def __init__(self, begin: _Optional[_Union[Begin, _Mapping]] = ..., snapshot: _Optional[_Union[Snapshot, _Mapping]] = ..., snapshot_end: _Optional[_Union[SnapshotEnd, _Mapping]] = ..., batch: _Optional[_Union[Batch, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ...) -> None: ...

class Begin(_message.Message):
    __slots__ = ("instance_id", "epoch", "sequence", "block_size", "fingerprint", "num_blocks")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    epoch: int
    sequence: int
    block_size: int
    fingerprint: bytes
    num_blocks: int
    def __init__(self, instance_id: _Optional[str] = ..., epoch: _Optional[int] = ..., sequence: _Optional[int] = ..., block_size: _Optional[int] = ..., fingerprint: _Optional[bytes] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class Snapshot(_message.Message):
    __slots__ = ("block_hashes",)
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    block_hashes: bytes
    def __init__(self, block_hashes: _Optional[bytes] = ...) -> None: ...

class SnapshotEnd(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Batch(_message.Message):
    __slots__ = ("epoch", "sequence", "changes")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    sequence: int
    changes: _containers.RepeatedCompositeFieldContainer[CacheChange]
    def __init__(self, epoch: _Optional[int] = ..., sequence: _Optional[int] = ..., changes: _Optional[_Iterable[_Union[CacheChange, _Mapping]]] = ...) -> None: ...

class CacheChange(_message.Message):
    __slots__ = ("stored", "removed", "cleared")
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    stored: bytes
    removed: bytes
    cleared: bool
    def __init__(self, stored: _Optional[bytes] = ..., removed: _Optional[bytes] = ..., cleared: _Optional[bool] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("epoch", "sequence")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    sequence: int
    def __init__(self, epoch: _Optional[int] = ..., sequence: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
