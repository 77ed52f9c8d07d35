"""The gather-copy kernel without a GPU: compiled for every architecture, run on the CPU against torch's indexing.

On the CPU it is compiled by g++ with the undefined-behaviour sanitizer, which ends the test run at the first address
that a vector may not have, shift or overflow; `cuda_on_cpu.h` plays the grid.
"""

import ctypes
import mmap
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer import block_copy
from kvtransfer.block_copy import SOURCE, THREADS, VECTORS_PER_THREAD, WIDTHS, CudaBlockKernel, launch_shape

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PIECE = THREADS * VECTORS_PER_THREAD  # vectors

KERNEL_SOURCES = sorted(
    path
    for folder in ("engine", "kvtransfer", "worker", "prefill_worker", "decode_worker", "cluster", "benchmarks")
    for path in (ROOT / folder).rglob("*.cu")
)
ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_120")


# --- compiled


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("path", KERNEL_SOURCES, ids=[path.name for path in KERNEL_SOURCES])
def test_every_kernel_source_compiles_for_every_architecture_without_headers(path: Path, architecture: str) -> None:
    from cupy_backends.cuda.libs import nvrtc

    program = nvrtc.createProgram(path.read_text(), path.name, (), ())
    try:
        nvrtc.compileProgram(program, (f"-arch={architecture}", "-std=c++14"))
        cubin = nvrtc.getCUBIN(program)
    except nvrtc.NVRTCError:
        pytest.fail(nvrtc.getProgramLog(program))
    finally:
        nvrtc.destroyProgram(program)
    assert cubin.startswith(b"\x7fELF")
    for name in re.findall(r"^COPY_BLOCKS\((\w+),", path.read_text(), re.MULTILINE):
        assert name.encode() in cubin


def test_the_source_lies_beside_its_launcher_and_has_the_same_numbers() -> None:
    assert SOURCE in KERNEL_SOURCES
    source = SOURCE.read_text()
    assert f"#define THREADS {THREADS}\n" in source
    assert f"#define VECTORS_PER_THREAD {VECTORS_PER_THREAD}\n" in source
    assert re.findall(r"^COPY_BLOCKS\(copy_blocks_(\d+),", source, re.MULTILINE) == [str(w) for w in WIDTHS]
    assert "#include" not in source


# --- the shape of a launch


@pytest.mark.parametrize(
    ("source", "target", "bytes_per_block", "width"),
    [
        (0, 0, 4096, 16),
        (0, 0, 24, 8),
        (0, 0, 4100, 4),
        (0, 0, 6, 2),
        (0, 0, 7, 1),
        (8, 0, 4096, 8),
        (0, 4, 4096, 4),
        (2, 16, 4096, 2),
        (1, 0, 4096, 1),
    ],
)
def test_vectors_are_as_wide_as_blocks_and_addresses_allow(
    source: int, target: int, bytes_per_block: int, width: int
) -> None:
    shape = launch_shape(1 << 20 | source, 1 << 30 | target, bytes_per_block, 1)
    assert shape.width == width
    assert shape.vectors_per_block * width == bytes_per_block


@given(st.integers(1, 1 << 32), st.integers(1, 1 << 16))
def test_pieces_cover_a_block_and_no_thread_block_has_nothing_to_do(bytes_per_block: int, num_blocks: int) -> None:
    try:
        shape = launch_shape(0, 0, bytes_per_block, num_blocks)
    except AssertionError:  # beyond what the kernel counts in 32 bits
        assert bytes_per_block >= 1 << 31 or num_blocks * bytes_per_block >= PIECE * (1 << 31) // 2
        return
    assert (shape.pieces_per_block - 1) * PIECE < shape.vectors_per_block <= shape.pieces_per_block * PIECE
    assert shape.num_thread_blocks == num_blocks * shape.pieces_per_block
    # The kernel's own sums, in 32 bits.
    assert shape.pieces_per_block * PIECE < 1 << 32
    assert shape.num_thread_blocks < 1 << 31


# --- run


class CpuKernels:
    """The kernels as functions of the CPU, and CuPy as far as the launcher uses it."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        for width in WIDTHS:
            # As in the source: four addresses, two unsigned ints.
            function = getattr(self._library, f"launch_{width}")
            function.argtypes = [*[ctypes.c_uint] * 2, *[ctypes.c_void_p] * 4, *[ctypes.c_uint] * 2]
            function.restype = None
        self.streams: list[int] = []  # current ones, innermost last
        self.launched: list[tuple[str, int]] = []  # name, stream

    def get_function(self, name: str) -> Callable[..., None]:
        launch = getattr(self._library, name.replace("copy_blocks", "launch"))

        def run(grid: tuple[int], threads: tuple[int], arguments: tuple[np.generic, ...]) -> None:
            assert [a.dtype for a in arguments] == [np.uint64] * 4 + [np.uint32] * 2
            self.launched.append((name, self.streams[-1]))
            launch(*grid, *threads, *(int(a) for a in arguments))

        return run

    def make_cupy(self, version: int) -> ModuleType:
        kernels = self

        class Stream:
            """With a stream's address: current within `with`."""

            def __init__(self, pointer: int) -> None:
                self._pointer = pointer

            def __enter__(self) -> None:
                kernels.streams.append(self._pointer)

            def __exit__(self, *_: object) -> None:
                kernels.streams.pop()

        class ProtocolStream(Stream):
            @classmethod
            def from_external(cls, foreign: object) -> Stream:
                protocol, pointer = foreign.__cuda_stream__()  # type: ignore[attr-defined]
                assert protocol == 0
                return cls(pointer)

        cupy, cuda = ModuleType("cupy"), ModuleType("cupy.cuda")
        cuda.Device = lambda device: nullcontext()  # type: ignore[attr-defined]
        if version >= 14:
            cuda.Stream = ProtocolStream  # type: ignore[attr-defined]
        else:
            cuda.Stream = SimpleNamespace  # type: ignore[attr-defined]
            cuda.ExternalStream = Stream  # type: ignore[attr-defined]
        cupy.cuda = cuda  # type: ignore[attr-defined]
        cupy.RawModule = lambda code: self if code == SOURCE.read_text() else None  # type: ignore[attr-defined]
        return cupy


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Needs g++, as the rest of a full check does: without it this fails, it is not skipped."""
    path = tmp_path_factory.mktemp("kernels") / "block_copy.so"
    subprocess.run(
        [
            *("g++", "-std=c++14", "-O1", "-shared", "-fPIC"),
            *("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"),
            *("-fsanitize=undefined", "-fno-sanitize-recover=all"),
            f'-DBLOCK_COPY_SOURCE="{SOURCE}"',
            str(HERE / "block_copy_on_cpu.cpp"),
            *("-o", str(path)),
        ],
        check=True,
    )
    return path


@pytest.fixture(scope="module", params=[14, 13], ids=["CuPy 14", "CuPy 13"])
def kernels(request: pytest.FixtureRequest, library: Path) -> Iterator[CpuKernels]:
    kernels = CpuKernels(library)
    with pytest.MonkeyPatch.context() as patch:
        cupy = kernels.make_cupy(request.param)
        patch.setitem(sys.modules, "cupy", cupy)
        patch.setitem(sys.modules, "cupy.cuda", cupy.cuda)
        yield kernels


MAP_NORESERVE = 0x4000  # Linux; `mmap` has no name for it before Python 3.13

GUARD = 64  # bytes around each pool that must stay as they are


def guarded(num_blocks: int, bytes_per_block: int, misaligned: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random bytes: all of them, and the pool in their middle, [num_blocks, bytes_per_block]."""
    size = num_blocks * bytes_per_block
    whole = torch.randint(0, 256, (GUARD + size + GUARD + 32,), dtype=torch.uint8)
    start = GUARD - whole.data_ptr() % 16 + misaligned
    return whole, whole[start : start + size].view(num_blocks, bytes_per_block)


def copy(
    source: torch.Tensor, target: torch.Tensor, source_ids: list[int], target_ids: list[int], stream: int = 7
) -> None:
    ids = np.array([source_ids, target_ids], np.int32)
    kernel = CudaBlockKernel(0)
    kernel(
        stream,
        source.data_ptr(),
        target.data_ptr(),
        ids[0].ctypes.data,
        ids[1].ctypes.data,
        len(source_ids),
        source.shape[1],
    )


def check(
    bytes_per_block: int, source_ids: list[int], target_ids: list[int], *, num_blocks: int, misaligned: int = 0
) -> None:
    _, source = guarded(num_blocks, bytes_per_block)
    whole, target = guarded(num_blocks, bytes_per_block, misaligned)
    expected = whole.clone()
    start = target.data_ptr() - whole.data_ptr()
    pool = expected[start : start + target.numel()].view(num_blocks, bytes_per_block)
    pool[target_ids] = source[source_ids]
    before = source.clone()
    copy(source, target, source_ids, target_ids)
    assert torch.equal(whole, expected), "what is copied is right, and nothing else is touched"
    assert torch.equal(source, before)


SIZES = [
    *(1, 2, 3, 4, 6, 7, 8, 12, 15, 16, 17, 31, 32, 48, 100, 255),
    *(PIECE - 1, PIECE, PIECE + 1),  # single bytes
    *(PIECE * 16 - 16, PIECE * 16, PIECE * 16 + 16, PIECE * 16 + 8, PIECE * 16 + 4, PIECE * 16 + 2),
]


@pytest.mark.parametrize("bytes_per_block", SIZES)
def test_blocks_of_any_size_are_copied_and_nothing_around_them_is_touched(
    kernels: CpuKernels, bytes_per_block: int
) -> None:
    check(bytes_per_block, [3, 0, 4, 1], [1, 2, 0, 4], num_blocks=6)
    name, stream = kernels.launched[-1]
    assert name == f"copy_blocks_{next(w for w in WIDTHS if bytes_per_block % w == 0)}"
    assert stream == 7
    assert kernels.streams == [], "the current stream is what it was before"


@pytest.mark.parametrize("misaligned", [1, 2, 4, 8])
def test_a_pool_at_an_odd_address_is_copied_by_narrower_vectors(kernels: CpuKernels, misaligned: int) -> None:
    check(160, [3, 0, 4, 1], [1, 2, 0, 4], num_blocks=6, misaligned=misaligned)
    assert kernels.launched[-1][0] == f"copy_blocks_{misaligned}"


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 200))
def test_any_number_of_blocks_goes_anywhere(kernels: CpuKernels, data: st.DataObject, num_blocks: int) -> None:
    count = data.draw(st.integers(1, num_blocks))
    source_ids = data.draw(st.lists(st.integers(0, num_blocks - 1), min_size=count, max_size=count))
    target_ids = data.draw(st.permutations(range(num_blocks)))[:count]
    check(data.draw(st.sampled_from([1, 6, 20, 24, 48, 272])), source_ids, target_ids, num_blocks=num_blocks)


def test_runs_of_consecutive_blocks_are_copied_like_any_others(kernels: CpuKernels) -> None:
    check(528, [*range(10, 40), *range(60, 90)], [*range(45, 75), *range(5, 35)], num_blocks=100)


def test_blocks_far_beyond_4_gib_are_where_they_should_be(kernels: CpuKernels) -> None:
    # Addresses alone: pages that nobody touches take no memory.
    bytes_per_block, num_blocks = 1 << 16, 100_000
    size = bytes_per_block * num_blocks
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    source, target = (torch.from_numpy(np.frombuffer(mmap.mmap(-1, size, flags), np.uint8)) for _ in range(2))
    source, target = source.view(num_blocks, -1), target.view(num_blocks, -1)
    source_ids, target_ids = [num_blocks - 1, 0, 70_000], [65_536, num_blocks - 1, 0]
    for value, block_id in enumerate(source_ids, 1):
        source[block_id] = value
    copy(source, target, source_ids, target_ids)
    for value, block_id in enumerate(target_ids, 1):
        assert (target[block_id] == value).all()
        for neighbour in {block_id - 1, block_id + 1} & set(range(num_blocks)):
            assert not target[neighbour].any()


def test_a_kernel_that_wrote_past_its_block_would_be_seen(kernels: CpuKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    real = block_copy.launch_shape

    def one_vector_more(*arguments: int) -> block_copy.LaunchShape:
        shape = real(*arguments)
        return block_copy.LaunchShape(
            shape.width, shape.vectors_per_block + 1, shape.pieces_per_block, shape.num_thread_blocks
        )

    monkeypatch.setattr(block_copy, "launch_shape", one_vector_more)
    with pytest.raises(AssertionError, match="nothing else is touched"):
        check(48, [0], [0], num_blocks=2)
