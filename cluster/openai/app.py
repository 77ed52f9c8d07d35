"""The HTTP application: which path leads where."""

from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.types import ASGIApp

from cluster.openai.authentication import Authentication
from cluster.openai.body import read_object
from cluster.openai.chat import ChatShape
from cluster.openai.chat_request import ChatRequest
from cluster.openai.completion_request import CompletionRequest
from cluster.openai.completions import CompletionShape
from cluster.openai.cross_origin import across_origins
from cluster.openai.error_replies import install_error_handlers
from cluster.openai.prompt_logprobs_bound import check_prompt_logprobs
from cluster.openai.reply import Call
from cluster.openai.reply_schemas import (
    ERRORS,
    ChatReply,
    CompletionReply,
    DetokenizeReply,
    HealthReply,
    MetricsTarget,
    ModelList,
    ModelObject,
    TokenizeReply,
    VersionReply,
    gives,
    takes,
)
from cluster.openai.request_id import RequestId
from cluster.openai.server import ApiServer
from cluster.openai.token_endpoints import DetokenizeRequest, TokenizeRequest, detokenize, tokenize
from cluster.scrape import discovery_targets
from cluster.text_request import TextRequest
from cluster.tools.call_style import call_style

_PROMETHEUS_TEXT = "text/plain; version=0.0.4; charset=utf-8"


def create_app(server: ApiServer) -> ASGIApp:
    """The application over `server`."""
    app = FastAPI(title="Tandem", version=server.version, redirect_slashes=False, responses=ERRORS)
    install_error_handlers(app)
    _add_generation(app, server)
    _add_models(app, server)
    _add_tokens(app, server)
    _add_operation(app, server)
    # A browser asks without a key whether it may ask with one.
    guarded = across_origins(Authentication(app, server.api_keys), server.allowed_origins)
    # Around all of it, so that the reply to a crash has its id as well.
    return RequestId(guarded, server.calls)


def _add_generation(app: FastAPI, server: ApiServer) -> None:
    @app.post("/v1/completions", openapi_extra=takes(CompletionRequest), responses=gives(CompletionReply, streams=True))
    async def completions(request: Request) -> Response:
        fields = CompletionRequest.parse(await read_object(request, server.max_body_bytes))
        server.check_model(fields.model)
        planned = await server.text.plan_all(fields.text_requests(server.new_id("cmpl")))
        check_prompt_logprobs(
            (len(prompt.prompt_token_ids) for prompt in planned),
            num_choices=fields.num_choices,
            prompt_logprobs=fields.prompt_logprobs,
            echoed_logprobs=fields.logprobs if fields.echo else None,
        )
        head = server.head("cmpl", fields.request_id)
        shape = CompletionShape(fields, planned, server.text.tokenizer)
        call = Call(server.text, planned, head, shape, usage_chunks=fields.usage_chunks)
        return call.stream() if fields.stream else await call.whole(request)

    @app.post("/v1/chat/completions", openapi_extra=takes(ChatRequest), responses=gives(ChatReply, streams=True))
    async def chat_completions(request: Request) -> Response:
        fields = ChatRequest.parse(await read_object(request, server.max_body_bytes))
        server.check_model(fields.model)
        template, tool_use = server.template(), fields.tool_use()
        style = call_style(template.source)
        text = TextRequest(
            request_id=server.new_id("chatcmpl"),
            prompt=fields.render(template, tool_use),
            options=fields.options(tool_use, style, server.text.tokenizer),
            add_special_tokens=bool(fields.add_special_tokens),
            prompt_field="messages",
        )
        planned = await server.text.plan(text)
        check_prompt_logprobs(
            [len(planned.prompt_token_ids)],
            num_choices=fields.num_choices,
            prompt_logprobs=fields.prompt_logprobs,
            echoed_logprobs=None,
        )
        head = server.head("chatcmpl", fields.request_id)
        shape = ChatShape(fields, planned, server.text.tokenizer, tool_use, style)
        call = Call(server.text, [planned], head, shape, usage_chunks=fields.usage_chunks)
        return call.stream() if fields.stream else await call.whole(request)


def _add_models(app: FastAPI, server: ApiServer) -> None:
    def model_object() -> dict[str, Any]:
        return {
            "id": server.model_name,
            "object": "model",
            "created": server.created,
            "owned_by": "tandem",
            "root": server.model_name,  # vLLM's; its benchmark takes the tokenizer of that name
            "max_model_len": server.text.model.max_model_len,
        }

    @app.get("/v1/models", responses=gives(ModelList))
    async def list_models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": [model_object()]})

    @app.get("/v1/models/{name:path}", responses=gives(ModelObject))
    async def get_model(name: str) -> JSONResponse:
        server.check_model(name)
        return JSONResponse(model_object())


def _add_tokens(app: FastAPI, server: ApiServer) -> None:
    @app.post("/tokenize", openapi_extra=takes(TokenizeRequest), responses=gives(TokenizeReply))
    async def tokenize_text(request: Request) -> JSONResponse:
        fields = TokenizeRequest.parse(await read_object(request, server.max_body_bytes))
        return JSONResponse(await tokenize(server, fields))

    @app.post("/detokenize", openapi_extra=takes(DetokenizeRequest), responses=gives(DetokenizeReply))
    async def detokenize_ids(request: Request) -> JSONResponse:
        fields = DetokenizeRequest.parse(await read_object(request, server.max_body_bytes))
        return JSONResponse(await detokenize(server, fields))


def _add_operation(app: FastAPI, server: ApiServer) -> None:
    @app.get(
        "/health",
        responses=gives(HealthReply) | {503: {"model": HealthReply, "description": "No decode worker is ready."}},
    )
    async def health() -> JSONResponse:
        """200 while requests can be served: a decode worker is ready."""
        is_ready = server.can_serve()
        return JSONResponse({"status": "ok" if is_ready else "no worker"}, status_code=200 if is_ready else 503)

    @app.get("/version", responses=gives(VersionReply))
    async def version() -> JSONResponse:
        return JSONResponse({"version": server.version})

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics(scope: str = "cluster") -> Response:
        """Prometheus text: of the gateway and all workers, or of the gateway alone (`?scope=gateway`)."""
        if scope == "gateway":
            return Response(server.scrape.gateway(), media_type=_PROMETHEUS_TEXT)
        return Response(await server.scrape.cluster(server.generator.workers()), media_type=_PROMETHEUS_TEXT)

    @app.get("/metrics/targets", responses=gives(list[MetricsTarget]))
    async def targets() -> JSONResponse:
        """The workers' own endpoints, for Prometheus' HTTP service discovery."""
        return JSONResponse(discovery_targets(server.generator.workers()))
