"""What tests of decode workers and their prefill workers share: both real but for the model, in this process."""

from collections.abc import Awaitable, Callable

from engine.config import EngineConfig
from engine.hash_executor import expected_tokens
from engine.sampling_params import SamplingParams
from gateway_end import GatewayEnd

VOCAB_SIZE = 1000
ENGINE = EngineConfig(num_blocks=64, max_model_len=512, max_num_batched_tokens=64)

Start = Callable[..., Awaitable[tuple[str, str]]]  # a worker's kind, id and other configuration -> id and address


def prompt_of(length: int, seed: int = 1) -> list[int]:
    return [(seed * 7919 + i * i * 31 + i) % VOCAB_SIZE for i in range(length)]


def greedy(max_tokens: int = 20, **options: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, **options)  # type: ignore[arg-type]


def expected(prompt: list[int], params: SamplingParams) -> list[int]:
    return expected_tokens(prompt, params, VOCAB_SIZE, max_model_len=ENGINE.max_model_len)


async def all_given_back(gateway: GatewayEnd) -> None:
    await gateway.until(
        lambda: (
            not gateway.load.num_active_blocks
            and not (gateway.load.num_running + gateway.load.num_waiting + gateway.load.num_transferring)
        )
    )
