"""What a worker says about one prompt: a stream for each of its choices, and what is said once for all of them."""

from collections.abc import Sequence

from cluster.request_stream import RequestStream
from engine.executor import SampledToken


class PromptStreams:
    """The streams of one Submit.

    Args:
        request_id: of the prompt, on the wire: that of its only choice, if it has one.
        prompt_token_ids: needed only if the prompt's log-probabilities are asked for.
        choice_ids: on the wire, one a stream.
        max_buffered: of each stream.
    """

    def __init__(
        self, request_id: str, prompt_token_ids: Sequence[int], choice_ids: Sequence[str], max_buffered: int
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self._streams = {choice_id: RequestStream(choice_id, max_buffered) for choice_id in choice_ids}
        # Said with the first token of one choice. It may be one that has ended here meanwhile: the others need it.
        self.prompt_logprobs: tuple[SampledToken, ...] | None = None

    def __getitem__(self, choice_id: str) -> RequestStream:
        return self._streams[choice_id]

    def get(self, choice_id: str) -> RequestStream | None:
        """None: it is no choice of this Submit."""
        return self._streams.get(choice_id)

    @property
    def choice_ids(self) -> Sequence[str]:
        return tuple(self._streams)

    @property
    def has_output(self) -> bool:
        """Whether anything has come of any choice."""
        return any(stream.has_output for stream in self._streams.values())

    @property
    def living(self) -> list[RequestStream]:
        """Those that have not ended."""
        return [stream for stream in self._streams.values() if not stream.ended]
