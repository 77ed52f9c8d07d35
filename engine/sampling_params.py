"""What to sample, and when to stop."""

from dataclasses import dataclass, field
from enum import Enum

from engine.structure.spec import Structure


class FinishReason(Enum):
    """Why a request ended; the values are OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"  # by its caller, or its text could not be held to its structure any further


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one sequence is sampled. Complete at birth: every default is resolved, the seed is drawn.

    The token at position p is a pure function of (logits, these parameters, seed, p, tokens so far): batch mates,
    preemption, prefix hits and the machine it runs on change nothing.

    Raises:
        ValueError: a value outside its range; the message names the field, the value and what is allowed.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int = 0
    logprobs: int | None = None  # k: the sampled token's and the k best; None: none
    prompt_logprobs: int | None = None  # likewise, of every prompt token but the first
    structure: Structure | None = None  # what the text is held to
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()  # with the model's end-of-sequence ids, unless they are to be ignored

    def __post_init__(self) -> None:
        _in_range("temperature", self.temperature, 0.0, float("inf"), upper_open=True)
        _in_range("top_p", self.top_p, 0.0, 1.0)
        _in_range("top_k", self.top_k, 0, 2**31 - 1)
        _in_range("min_p", self.min_p, 0.0, 1.0)
        _in_range("repetition_penalty", self.repetition_penalty, 0.0, float("inf"), upper_open=True)
        if self.repetition_penalty == 0.0:
            raise ValueError("repetition_penalty must be above 0, not 0")
        _in_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _in_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _in_range("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _in_range("min_tokens", self.min_tokens, 0, self.max_tokens)
        _in_range("seed", self.seed, -(2**63), 2**63 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if (value := getattr(self, name)) is not None:
                _in_range(name, value, 0, 2**31 - 1)
        for token_id, bias in self.logit_bias.items():
            _in_range(f"logit_bias of token {token_id}", bias, -100.0, 100.0)

    @property
    def is_greedy(self) -> bool:
        """Whether the best token is taken (temperature 0, or top_p 0, or top_k 1)."""
        return self.temperature == 0.0 or self.top_p == 0.0 or self.top_k == 1


def finish_reason_after(
    params: SamplingParams, token_id: int, num_output_tokens: int, num_tokens: int, max_model_len: int
) -> FinishReason | None:
    """Whether a sequence ends with `token_id`, its `num_output_tokens`-th generated and `num_tokens`-th token."""
    if token_id in params.stop_token_ids and (num_output_tokens >= params.min_tokens or params.structure is not None):
        # Below min_tokens a stop token is sampled only where the structure left nothing else: the text is at its end.
        return FinishReason.STOP
    if num_output_tokens >= params.max_tokens or num_tokens >= max_model_len:
        return FinishReason.LENGTH
    return None


def _in_range(name: str, value: float, low: float, high: float, *, upper_open: bool = False) -> None:
    # Written so that NaN fails.
    if not (low <= value < high if upper_open else low <= value <= high):
        raise ValueError(f"{name} must be in [{low}, {high}{')' if upper_open else ']'}, not {value}")
