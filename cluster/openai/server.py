"""What the HTTP endpoints stand on: one object for the life of a gateway."""

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

from cluster.api_keys import ApiKeys
from cluster.call_record import CallRecorder, name_answer
from cluster.config import DEFAULT_MAX_BODY_BYTES
from cluster.errors import InvalidRequest, ModelNotFound
from cluster.generator import Generator
from cluster.openai.reply import Head
from cluster.scrape import ClusterScrape
from cluster.text.chat_template import ChatTemplate
from cluster.text_generator import TextGenerator
from cluster.worker_info import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiServer:
    """The served model, and how to generate with it."""

    text: TextGenerator
    scrape: ClusterScrape
    version: str
    created: int  # when the model was first served, seconds since 1970
    chat_template: ChatTemplate | None = None
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    api_keys: ApiKeys | None = None  # None: everybody may come in
    allowed_origins: tuple[str, ...] = ()  # web sites whose pages may read answers; "*": all
    calls: CallRecorder = field(default_factory=CallRecorder)
    wall_clock: Callable[[], float] = time.time

    @property
    def generator(self) -> Generator:
        return self.text.generator

    @property
    def model_name(self) -> str:
        return self.text.model.served_model_name

    def check_model(self, name: str) -> None:
        """Raises `ModelNotFound` for any but the served one."""
        if name != self.model_name:
            raise ModelNotFound(f"the model {name!r} does not exist; served is {self.model_name!r}", param="model")

    def can_serve(self) -> bool:
        """Whether a decode worker is ready, and not about to leave."""
        return any(
            worker.ready
            and worker.info is not None
            and worker.info.role is Role.DECODE
            and not (worker.load is not None and worker.load.draining)
            for worker in self.generator.workers()
        )

    def template(self) -> ChatTemplate:
        """The model's chat template.

        Raises:
            InvalidRequest: it has none.
        """
        if self.chat_template is None:
            raise InvalidRequest(f"the model {self.model_name!r} has no chat template: use /v1/completions")
        return self.chat_template

    def new_id(self, prefix: str) -> str:
        """An id that no other call has."""
        return f"{prefix}-{uuid.uuid4().hex}"

    def head(self, prefix: str, given_id: str | None = None) -> Head:
        """The head of a new call's objects; a client that gives its calls ids finds them again in it."""
        answer_id = self.new_id(prefix) if given_id is None else f"{prefix}-{given_id}"
        name_answer(answer_id)
        return Head(
            id=answer_id,
            created=int(self.wall_clock()),
            model=self.model_name,
            system_fingerprint=f"fp_{self.text.model.fingerprint.hex()[:12]}",
        )
