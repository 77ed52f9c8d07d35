"""How kernels are compiled: what is kept on disk belongs to the sources that are there."""

from pathlib import Path

import numba

from engine.cpu_code import sources_digest


def test_compiled_kernels_are_kept_under_a_digest_of_all_their_sources() -> None:
    assert numba.config.CACHE_DIR.endswith(f"kernels-{sources_digest()}")


def test_the_digest_is_another_when_any_source_changes_comes_or_goes(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "cpu_math.py").write_text("a")
    digests = [sources_digest(tmp_path)]
    (tmp_path / "model" / "cpu_linear.py").write_text("b")
    digests.append(sources_digest(tmp_path))
    (tmp_path / "cpu_math.py").write_text("c")
    digests.append(sources_digest(tmp_path))
    (tmp_path / "model" / "cpu_linear.py").rename(tmp_path / "cpu_linear.py")
    digests.append(sources_digest(tmp_path))
    assert len(set(digests)) == 4
    (tmp_path / "scheduler.py").write_text("no kernel")
    assert sources_digest(tmp_path) == digests[-1]
