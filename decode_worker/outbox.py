"""What goes to gateways, collected: all tokens of one step for one session leave in one message."""

from engine.executor import SampledToken
from engine.sampling_params import FinishReason
from kvtransfer.sampling_wire import logprobs_to_wire
from tandem.v1 import sampling_pb2
from tandem.v1 import worker_pb2 as pb
from worker.session import Session

_FINISH_REASONS = {
    FinishReason.STOP: sampling_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: sampling_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: sampling_pb2.FINISH_REASON_ABORT,
}


class Outbox:
    """Outputs by session, until `flush`."""

    def __init__(self) -> None:
        self._steps: dict[Session, pb.StepOutput] = {}

    def add(
        self,
        session: Session,
        request_id: str,
        token: SampledToken,
        finish_reason: FinishReason | None,
        *,
        usage: pb.Usage | None = None,
        stages: pb.StageTimes | None = None,
        prompt_logprobs: sampling_pb2.PromptLogprobs | None = None,
        matched_token_id: int | None = None,
    ) -> None:
        """One choice's new token; `usage` with its first, `stages` with its last.

        Args:
            prompt_logprobs: with the first of a prompt's first tokens, if asked for.
        """
        step = self._steps.get(session)
        if step is None:
            step = self._steps[session] = pb.StepOutput()
        logprobs = logprobs_to_wire(token)
        step.outputs.add(
            request_id=request_id,
            token_ids=(token.token_id,),
            logprobs=() if logprobs is None else (logprobs,),
            finish_reason=_FINISH_REASONS[finish_reason]
            if finish_reason is not None
            else sampling_pb2.FINISH_REASON_UNSPECIFIED,
            matched_token_id=matched_token_id,
            usage=usage,
            stages=stages,
            prompt_logprobs=prompt_logprobs,
        )

    def flush(self) -> None:
        """Sends what there is."""
        steps, self._steps = self._steps, {}
        for session, step in steps.items():
            session.send(pb.SessionResponse(step=step))
