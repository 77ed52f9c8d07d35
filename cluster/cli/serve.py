"""`tandem serve`: a whole cluster, from one command to Ctrl-C.

Its flags are the fields of `ClusterConfig`, made from them: a flag's text is checked where a file's value is, and both
fail in the same words.
"""

import asyncio
import inspect
import json
import math
import os
import shlex
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from cluster.cli.errors import MISUSED, CommandError, fails_in_a_sentence
from cluster.config import ClusterConfig, ConfigError, load_config
from cluster.worker_info import WorkerInfo
from cluster.worker_plan import WorkerPlan, plan_workers
from worker.log import configure_logging

if TYPE_CHECKING:
    from cluster.cli.serving import Serving

_TYPE_NAMES = {"integer": "<int>", "number": "<float>", "string": "<str>"}


def _with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """The command, whose `**flags` the command line sees as one option a field."""
    config_file = inspect.signature(command).parameters["config_file"]
    flags = [_flag(name, schema) for name, schema in ClusterConfig.model_json_schema()["properties"].items()]
    # What Typer looks at, in place of what the function is written with.
    command.__signature__ = inspect.Signature([config_file, *flags])  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in (config_file, *flags)}
    return command


def _flag(name: str, schema: dict[str, Any]) -> inspect.Parameter:
    kind = schema["anyOf"][0] if "anyOf" in schema else schema  # an optional one: its type, or null
    # A default that depends on something is described already.
    default = "" if "(default: " in schema["description"] else f" (default: {schema['default']})"
    flag, text = f"--{name.replace('_', '-')}", schema["description"] + default
    annotation: Any
    if kind.get("type") == "array":
        annotation = Annotated[list[str] | None, typer.Option(flag, help=text, metavar="<str>")]
    elif kind.get("type") == "boolean":
        annotation = Annotated[bool | None, typer.Option(f"{flag}/--no-{flag[2:]}", help=text)]
    else:
        metavar = "|".join(kind["enum"]) if "enum" in kind else _TYPE_NAMES[kind["type"]]
        annotation = Annotated[str | None, typer.Option(flag, help=text, metavar=metavar)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


@fails_in_a_sentence
@_with_flags
def serve(
    config_file: Annotated[
        Path | None, typer.Option("--config", help="YAML; its keys are the flags below, which win.")
    ] = None,
    **flags: str | bool | list[str] | None,
) -> None:
    """Serve a model: start the workers and the gateway, and say how to talk to them."""
    try:
        config = load_config(config_file, flags)
        plan = plan_workers(config)
    except ConfigError as exc:
        raise CommandError(*exc.problems, exit_code=MISUSED) from exc
    if config.device == "cuda" and not config.joins_cluster:
        _require_gpus(plan)
    configure_logging(config.log_level, config.log_format)
    # gRPC's own lines on every connection that ends; before it is imported.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    if config.log_format == "json":
        # Ray passes workers' lines on: as they are, and every one.
        os.environ.setdefault("RAY_DISABLE_WORKER_LOG_PREFIX", "1")
        os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    asyncio.run(_serve(config, plan))


def _require_gpus(plan: WorkerPlan) -> None:
    """Ray would wait for GPUs that this machine does not have."""
    from engine.cuda.doctor import require_cuda

    try:
        machine = require_cuda()
    except ValueError as exc:
        raise CommandError(str(exc)) from exc
    if len(machine.gpus) < plan.num_gpus:
        share = plan.workers[0].num_gpus
        hint = "" if share < 1 else " (or --gpus-per-worker 0.5, so that two share one)"
        raise CommandError(
            f"{len(plan.workers)} workers with {share:g} GPU each need {math.ceil(plan.num_gpus)} GPUs{hint}, "
            f"and this machine has {len(machine.gpus)}"
        )


async def _serve(config: ClusterConfig, plan: WorkerPlan) -> None:
    told_to_stop, at_once = asyncio.Event(), asyncio.Event()
    notes = Console(stderr=True, highlight=False)
    expect_losses: Callable[[], None] = told_to_stop.set  # until there is anybody to lose

    def on_signal() -> None:
        if told_to_stop.is_set():
            at_once.set()
        else:
            notes.print("Ending: requests in flight may finish. Ctrl-C once more ends at once.")
            # A signal to the whole group ends workers too, perhaps before anything here has been closed.
            expect_losses()
        told_to_stop.set()

    def take_signals() -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, on_signal)

    take_signals()
    # Here, not above: the other commands need not wait for it.
    from cluster.cli.serving import Serving

    try:
        serving = Serving(config, plan, on_ray_started=take_signals)
    except ConfigError as exc:
        raise CommandError(*exc.problems, exit_code=MISUSED) from exc
    expect_losses = serving.membership.expect_losses
    try:
        with notes.status(f"Starting {_count(plan)} of {config.model_name}"):
            started = await _start_unless(told_to_stop, serving)
        if started:
            _announce(Console(highlight=False), config, plan, serving)
            await told_to_stop.wait()
    finally:
        await serving.stop(at_once)


async def _start_unless(told_to_stop: asyncio.Event, serving: "Serving") -> bool:
    """Whether it has started; if not, it was told to stop first."""
    from cluster.cli.api_client import ServerError
    from cluster.fleet import FleetError

    starting, stopping = asyncio.create_task(serving.start()), asyncio.create_task(told_to_stop.wait())
    try:
        await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        if not starting.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
    if starting.cancelled():
        return False
    try:
        starting.result()
    except OSError as exc:
        raise CommandError(exc.strerror or str(exc)) from exc
    except (FleetError, ServerError, ValueError) as exc:
        raise CommandError(str(exc)) from exc
    return True


def _announce(console: Console, config: ClusterConfig, plan: WorkerPlan, serving: "Serving") -> None:
    engine, model = plan.engine, serving.membership.model
    workers = [status.info for status in serving.membership.workers() if status.info is not None]
    base_url = serving.base_url
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_row("model", f"{model.served_model_name}, {model.dtype}, up to {engine.max_model_len:,} tokens")
    threads = plan.workers[0].num_cpus
    table.add_row("workers", f"{_count(plan)}, {threads} thread{'s' if threads > 1 else ''} each")
    for device in sorted({worker.device for worker in workers} - {"cpu"}):
        table.add_row("", device)
    table.add_row("KV blocks", pool_sizes(workers))
    table.add_row("HTTP", f"{base_url}/v1 · {base_url}/metrics")
    table.add_row("gRPC", f"{config.host}:{serving.gateway.grpc_port} (tandem.v1.Generation)")
    console.print("\n[bold green]Tandem is ready.[/]")
    console.print(table)
    # Plainly, and on one line: it is there to be copied.
    options, flags = _client_options(config, serving)
    console.print(f"\nAsk it:\n{curl_line(base_url, model.served_model_name, options)}", markup=False, soft_wrap=True)
    console.print(f"or: tandem chat --base-url {base_url}{flags}\n", markup=False, soft_wrap=True)


def _client_options(config: ClusterConfig, serving: "Serving") -> tuple[str, str]:
    """What curl and our own clients need besides; a key is never shown, only where it goes."""
    options, flags = "", ""
    if serving.gateway.api_key is not None:
        options += '-H "Authorization: Bearer $TANDEM_API_KEY" '
    if config.tls_cert_file is not None:
        options += "--cacert <ca.pem> "
        flags += " --ca-file <ca.pem>"
    return options, flags


def pool_sizes(workers: Sequence[WorkerInfo]) -> str:
    """How large the workers' pools are: on GPUs each has found out for itself."""
    least, most = (pick(workers, key=lambda worker: worker.num_blocks) for pick in (min, max))
    shown = [
        (f"{worker.num_blocks:,}", f"{worker.num_blocks * worker.bytes_per_block / 2**30:.2f}")
        for worker in ([least] if least.num_blocks == most.num_blocks else [least, most])
    ]
    blocks, gibibytes = (" to ".join(numbers) for numbers in zip(*shown, strict=True))
    return f"{blocks} of {least.block_size} tokens a worker ({gibibytes} GiB)"


def curl_line(base_url: str, model: str, options: str = "") -> str:
    """A first request, for a shell.

    Args:
        options: of curl, as a shell reads them.
    """
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 64,
        "temperature": 0,
    }
    return (
        f"curl {shlex.quote(f'{base_url}/v1/chat/completions')} -H 'Content-Type: application/json' {options}"
        f"-d {shlex.quote(json.dumps(body))}"
    )


def _count(plan: WorkerPlan) -> str:
    counts: dict[str, int] = {}
    for worker in plan.workers:
        counts[worker.role.value] = counts.get(worker.role.value, 0) + 1
    return " and ".join(f"{count} {role} worker{'s' if count > 1 else ''}" for role, count in counts.items())
