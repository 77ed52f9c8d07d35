"""A line for each call, at level info: what was called, how it ended, how long it took. Never a prompt, never a key."""

import logging

from cluster.call_record import CallRecord

logger = logging.getLogger(__name__)


def write_access_line(record: CallRecord) -> None:
    """Logs a call that has ended (a `call_record.Sink`)."""
    if not logger.isEnabledFor(logging.INFO):
        return
    fields: dict[str, object] = {
        "method": record.method,
        "path": record.path,
        "status": record.status,
        "duration_s": round(record.duration_s, 6),
        "client_gone": record.client_gone,
    }
    words = [f"{record.method} {record.path} {record.status} in {record.duration_s:.3f} s"]
    if record.generation_id is not None:
        fields |= {
            "generation_id": record.generation_id,
            "answer_id": record.answer_id,
            "prompt_tokens": record.num_prompt_tokens,
            "completion_tokens": record.num_completion_tokens,
            "cached_tokens": record.num_cached_tokens,
            "prefill_worker": record.prefill_worker,
            "decode_worker": record.decode_worker,
        }
        words.append(
            f"{record.num_prompt_tokens} tokens in ({record.num_cached_tokens} cached), "
            f"{record.num_completion_tokens} out"
        )
    if record.error is not None:
        # Its name alone: an error's words may repeat what was sent.
        fields["error"] = type(record.error).__name__
        words.append(type(record.error).__name__)
    if record.client_gone:
        words.append("the client left")
    logger.info("%s", ", ".join(words), extra={"fields": fields, "request_id": record.context.request_id})
