"""`tandem bench`: an open-loop load on any OpenAI-compatible server, and what it showed."""

import asyncio
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from cluster.cli.api_client import DEFAULT_BASE_URL, ApiClient, ServerError, trust
from cluster.cli.client_flags import ApiKeyFlag, BaseUrlFlag, CaFileFlag
from cluster.cli.errors import MISUSED, CommandError, fails_in_a_sentence
from cluster.cli.goodput import Objectives
from cluster.cli.load_report import Latency, LoadReport
from cluster.cli.open_loop import LoadConfig, RequestRecord, run_load


@fails_in_a_sentence
def bench(
    base_url: BaseUrlFlag = DEFAULT_BASE_URL,
    model: Annotated[str | None, typer.Option(help="(default: the first that the server names)")] = None,
    num_prompts: Annotated[int, typer.Option(help="Requests to send.")] = 32,
    request_rate: Annotated[
        float | None, typer.Option(help="Requests a second, Poisson. (default: all at once)")
    ] = None,
    input_len: Annotated[int, typer.Option(help="Tokens a prompt.")] = 256,
    output_len: Annotated[int, typer.Option(help="Tokens an answer.")] = 64,
    prefix_len: Annotated[int, typer.Option(help="Leading prompt tokens that all requests share.")] = 0,
    temperature: Annotated[float, typer.Option(help="0: greedy.")] = 0.0,
    ignore_eos: Annotated[bool, typer.Option(help="Answers go on to --output-len.")] = True,
    seed: Annotated[int, typer.Option(help="Of prompts and arrival times.")] = 0,
    goodput: Annotated[
        list[str] | None,
        typer.Option(
            help='What a good request keeps, in milliseconds: "ttft:2000 tpot:100 e2el:30000", or some of it.'
        ),
    ] = None,
    api_key: ApiKeyFlag = None,
    ca_file: CaFileFlag = None,
    timeout: Annotated[float, typer.Option(help="Seconds between two chunks of an answer.")] = 600.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result here as well.")] = None,
) -> None:
    """Measure a server under an open-loop load: TTFT, ITL, TPOT, tokens/s, goodput."""
    try:
        config = LoadConfig(
            num_requests=num_prompts,
            request_rate=request_rate,
            input_len=input_len,
            output_len=output_len,
            prefix_len=prefix_len,
            temperature=temperature,
            ignore_eos=ignore_eos,
            seed=seed,
        )
        objectives = Objectives.parse(goodput) if goodput else None
    except ValueError as exc:
        raise CommandError(str(exc), exit_code=MISUSED) from exc
    try:
        model, records, duration_s = asyncio.run(_run(base_url, api_key, ca_file, timeout, model, config))
    except ServerError as exc:
        raise CommandError(str(exc)) from exc
    report = LoadReport.of(records, duration_s, objectives)
    _print(Console(), report, config, objectives)
    if json_file is not None:
        result = {"base_url": base_url, "model": model, "load": dataclasses.asdict(config), **report.as_json()}
        if objectives is not None:
            result["goodput"] = str(objectives)
        try:
            json_file.write_text(json.dumps(result, indent=2) + "\n")
        except OSError as exc:
            raise CommandError(f"{json_file} cannot be written: {exc.strerror}") from exc
    if report.failed:
        first = next(record.error for record in records if record.error is not None)
        raise CommandError(f"{report.failed} of {len(records)} requests failed, the first because: {first}")


async def _run(
    base_url: str, api_key: str | None, ca_file: str | None, timeout_s: float, model: str | None, config: LoadConfig
) -> tuple[str, Sequence[RequestRecord], float]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    tls = None if ca_file is None else trust(ca_file)
    async with ApiClient(base_url, api_key=api_key, tls=tls, timeout_s=timeout_s) as client:
        model = model or await client.model()
        # On stderr, so that stdout is the report alone.
        with Progress(*columns, console=Console(stderr=True)) as progress:
            bar = progress.add_task("requests", total=config.num_requests)
            records, duration_s = await run_load(client, model, config, lambda record: progress.advance(bar))
    return model, records, duration_s


def _print(console: Console, report: LoadReport, config: LoadConfig, objectives: Objectives | None) -> None:
    rate = "all at once" if config.request_rate is None else f"{config.request_rate:g} a second"
    table = Table(
        title=f"{config.num_requests} requests, {rate}: {config.input_len} tokens in, {config.output_len} out"
    )
    table.add_column("milliseconds")
    for name in Latency.__slots__:
        table.add_column(name, justify="right")
    rows = {
        "time to first token": report.ttft,
        "between tokens": report.itl,
        "per output token": report.tpot,
        "whole request": report.e2e,
    }
    for name, latency in rows.items():
        times = ["–" if latency is None else f"{getattr(latency, k) * 1e3:,.1f}" for k in Latency.__slots__]
        table.add_row(name, *times)
    console.print(table)
    cached = report.cached_tokens / report.prompt_tokens if report.prompt_tokens else 0.0
    console.print(
        f"{report.output_tokens_per_s:,.1f} output tokens/s · {report.requests_per_s:,.2f} requests/s · "
        f"{report.duration_s:,.1f} s · {report.output_tokens:,} tokens out, {report.prompt_tokens:,} in "
        f"({cached:.0%} cached)",
        highlight=False,
        soft_wrap=True,
    )
    if report.goodput is not None and report.attainment is not None:
        console.print(
            f"{report.attainment:.1%} of the requests kept {objectives}: {report.goodput:,.2f} good requests/s",
            highlight=False,
            soft_wrap=True,
        )
