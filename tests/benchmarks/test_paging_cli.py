"""`python -m benchmarks.paging`: what it prints, writes and refuses."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks.paging import plots
from benchmarks.paging.__main__ import main
from benchmarks.paging.report import Column, Table

SMALL = ["--requests", "200", "--growth", "0,64"]


def test_tables_are_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "results" / "paging.json"
    traces = tmp_path / "traces"
    traces.mkdir()
    rows = "".join(f"2023-11-16 18:17:{i % 60:02}.0,{40 + i},{20 + i % 9}\n" for i in range(200))
    (traces / "azure.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    main(["--sections", "memory", *SMALL, "--traces", str(traces), "--json", str(out)])
    written = json.loads(out.read_text())
    assert list(written["tables"]) == ["memory of ShareGPT-like", "memory of azure"]
    names = [row["memory"] for row in written["tables"]["memory of azure"]["rows"]]
    assert names[:7] == [
        "max, buddy", "pow2, buddy", "oracle, buddy", "max, first fit", "pow2, first fit", "oracle, first fit", "paged",
    ]  # fmt: skip
    assert names[7:] == ["scheduler, growth 0", "scheduler, growth 64"]
    published = [row["published, %"] for row in written["tables"]["memory of ShareGPT-like"]["rows"]]
    assert published == [20.4, 26.8, 38.2, None, None, None, 96.3, None, None]
    assert {row["published, %"] for row in written["tables"]["memory of azure"]["rows"]} == {None}
    assert written["options"]["requests"] == 200
    assert str(tmp_path) not in out.read_text()
    assert "scheduler, growth 64" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sections", "memory,warp"], "unknown section 'warp'; there are memory, blocks, layouts, virtual"),
        (["--sections", "memory", "--requests", "5"], "never under load for long enough"),
        (["--sections", "memory", "--memory-tokens", "64"], "does not fit into 64 slots even alone"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_sentence(arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        main(arguments)


def test_plots_without_matplotlib_are_refused_before_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match="plots need matplotlib: pip install matplotlib, or leave --plots out"):
        main(["--sections", "memory", "--plots", "nowhere"])


def test_tables_with_a_picture_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    names = ("memory", "holds tokens, %", "published, %", "for later tokens, %", "never used, %", "free, %")
    table = Table("memory of nothing", "", [Column(name) for name in names])
    table.add("max", 20.0, 20.4, 10.0, 60.0, 10.0)
    table.add("paged", 97.0, None, 1.0, 1.0, 1.0)
    other = Table("K layouts", "", [Column("layout")])
    assert plots.plot([table, other], tmp_path) == [tmp_path / "memory-of-nothing.png"]
    assert (tmp_path / "memory-of-nothing.png").read_bytes().startswith(b"\x89PNG")
