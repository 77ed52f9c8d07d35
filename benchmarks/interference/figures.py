"""What a round's records say of its streams and of its prompts, and medians of several rounds."""

import statistics
from collections.abc import Mapping, Sequence

from benchmarks.gaps import gaps_within
from benchmarks.interference.load import RoundLoad, RoundRecords
from cluster.cli.load_report import Latency
from cluster.cli.open_loop import RequestRecord

Figures = dict[str, float]  # by what they are and their unit


def tokens_within(records: Sequence[RequestRecord], begin_s: float, end_s: float) -> int:
    """Tokens that came in a window."""
    return sum(
        tokens
        for record in records
        for chunk_s, tokens in zip(record.chunk_s, record.chunk_tokens, strict=True)
        if begin_s <= record.due_s + chunk_s < end_s
    )


def figures(records: RoundRecords, load: RoundLoad) -> Figures:
    """Of one round; latencies in milliseconds."""
    begin, end = load.window
    itl = Latency.of([gap.length_s for gap in gaps_within(records.streams, begin, end)])
    ttft = Latency.of([record.ttft_s for record in records.prompts])
    assert itl is not None, "a stream that runs through the window has gaps in it"
    assert ttft is not None, "a round has prompts"
    return {
        "ITL of the streams, p50, ms": 1000 * itl.p50,
        "ITL of the streams, p99, ms": 1000 * itl.p99,
        "ITL of the streams, max, ms": 1000 * itl.max,
        "TTFT of the prompts, p50, ms": 1000 * ttft.p50,
        "TTFT of the prompts, p99, ms": 1000 * ttft.p99,
        "streams, tokens/s": tokens_within(records.streams, begin, end) / load.window_s,
        "processor time of the server, cores": sum(records.cpu.server.values()) / load.window_s,
        "of the client, cores": records.cpu.client / load.window_s,
        "of anything else, cores": records.cpu.others / load.window_s,
    }


def medians(rounds: Mapping[str, Sequence[Figures]]) -> dict[str, Figures]:
    """By arrangement, of what has been measured of it so far."""
    return {
        name: {figure: statistics.median(round[figure] for round in of_rounds) for figure in of_rounds[0]}
        for name, of_rounds in rounds.items()
        if of_rounds
    }
