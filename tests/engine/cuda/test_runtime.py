"""CuPy's binding has what we ask of it, under the names we use, and its errors become ours."""

import ctypes
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from engine.cuda.runtime import CudaError, CudaRuntime, _CuPyRuntime, cuda_runtime
from fake_cuda import FakeProcess

cupy_runtime = pytest.importorskip("cupy.cuda.runtime", reason="CuPy is not installed")

METHODS = {name: method for name, method in vars(CudaRuntime).items() if callable(method) and name[0] != "_"}

# A value of each parameter's type, and what CuPy answers where 0 is not such an answer.
ARGUMENTS: dict[object, Any] = {int: 3, bytes: bytes(64), bool: True}
ANSWERS: dict[str, Any] = {
    "memGetInfo": (1, 2),
    "ipcGetMemHandle": bytes(64),
    "ipcGetEventHandle": bytes(64),
}


class CheckedBinding:
    """CuPy's runtime without CUDA: each call must fit the signature that CuPy documents."""

    def __init__(self) -> None:
        self.called: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        real = getattr(cupy_runtime, name)  # AttributeError: CuPy has no such thing
        if not callable(real) or isinstance(real, type):
            return real

        def function(*arguments: Any) -> Any:
            parameters = _parameters(real)
            required = [parameter for parameter in parameters if "=" not in parameter]
            assert len(required) <= len(arguments) <= len(parameters), f"{real.__doc__}: {arguments}"
            self.called.append((name, arguments))
            return ANSWERS.get(name, 0)

        function.__name__ = name
        return function


class PlayedDriver:
    """The functions of libcuda that are called, over two GPUs whose UUIDs have zeros in them."""

    uuids = (bytes(16), b"\1\0" * 8)
    error = b"CUDA_ERROR_INVALID_DEVICE"

    def cuInit(self, flags: int) -> int:
        return 0

    def cuDeviceGet(self, handle: Any, ordinal: int) -> int:
        handle._obj.value = 70 + ordinal
        return 0 if ordinal < len(self.uuids) else 101

    def cuDeviceGetUuid_v2(self, uuid: Any, handle: ctypes.c_int) -> int:
        uuid._obj[:] = self.uuids[handle.value - 70]
        return 0

    def cuGetErrorName(self, status: int, name: Any) -> int:
        name._obj.value = self.error
        return 0


def _parameters(function: Any) -> list[str]:
    """From the first line of its docstring, where Cython writes its signature."""
    signature = re.match(r"\w+\((.*)\)", function.__doc__)
    assert signature is not None, function.__doc__
    return [parameter for parameter in signature[1].split(", ") if parameter]


def call(runtime: CudaRuntime, name: str) -> Any:
    parameters = list(inspect.signature(METHODS[name], eval_str=True).parameters.values())[1:]
    positional = [ARGUMENTS[p.annotation] for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    by_name = {p.name: ARGUMENTS[p.annotation] for p in parameters if p.kind is p.KEYWORD_ONLY}
    return getattr(runtime, name)(*positional, **by_name)


@pytest.mark.parametrize("name", sorted(METHODS.keys() - {"device_uuid"}))
def test_each_call_exists_in_cupy_with_these_parameters(name: str) -> None:
    binding = CheckedBinding()
    answer = call(_CuPyRuntime(binding), name)
    assert binding.called, "it asked CuPy"
    returned = inspect.signature(METHODS[name], eval_str=True).return_annotation
    assert answer is None if returned is None else isinstance(answer, getattr(returned, "__origin__", returned))


def test_a_gpus_uuid_is_whole_also_with_zeros_in_it() -> None:
    """CuPy's is not: it ends at the first zero."""
    runtime = _CuPyRuntime(CheckedBinding(), PlayedDriver)
    assert [runtime.device_uuid(device) for device in range(2)] == list(PlayedDriver.uuids)
    with pytest.raises(CudaError, match="cuDeviceGetUuid: CUDA_ERROR_INVALID_DEVICE"):
        runtime.device_uuid(2)


def test_without_the_drivers_library_a_gpu_has_no_uuid() -> None:
    with pytest.raises(CudaError, match="libcuda-of-nobody"):
        _CuPyRuntime(CheckedBinding(), lambda: ctypes.CDLL("libcuda-of-nobody.so.1")).device_uuid(0)


def test_events_between_processes_have_no_timing() -> None:
    binding = CheckedBinding()
    runtime = _CuPyRuntime(binding)
    runtime.event_create()
    runtime.event_create(interprocess=True)
    flags = [arguments[0] for _, arguments in binding.called]
    assert flags == [2, 2 | 4]  # cudaEventDisableTiming, cudaEventInterprocess


def test_an_event_is_reached_or_not_or_cannot_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    binding = CheckedBinding()
    runtime = _CuPyRuntime(binding)
    assert runtime.event_query(1)
    monkeypatch.setitem(ANSWERS, "eventQuery", 600)
    assert not runtime.event_query(1)
    monkeypatch.setitem(ANSWERS, "eventQuery", 700)
    with pytest.raises(CudaError, match="cudaErrorIllegalAddress") as error:
        runtime.event_query(1)
    assert error.value.name == "cudaErrorIllegalAddress"


def test_an_error_of_cupys_is_ours_and_says_which_call_it_was() -> None:
    class Failing(CheckedBinding):
        def __getattr__(self, name: str) -> Any:
            def malloc(nbytes: int) -> int:
                raise cupy_runtime.CUDARuntimeError(2)

            return malloc if name == "malloc" else super().__getattr__(name)

    with pytest.raises(CudaError, match=r"^malloc: cudaErrorMemoryAllocation: out of memory$") as error:
        _CuPyRuntime(Failing()).malloc(1)
    assert error.value.name == "cudaErrorMemoryAllocation"


def test_the_played_runtime_has_the_same_calls() -> None:
    for name, method in METHODS.items():
        assert inspect.signature(getattr(FakeProcess, name)) == inspect.signature(method), name


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a driver")
def test_without_a_driver_the_first_call_says_so() -> None:
    with pytest.raises(CudaError, match=r"^getDeviceCount: cudaError\w+: .*(driver|device)"):
        cuda_runtime().device_count()


def test_memory_is_set_before_anyone_else_reads_it() -> None:
    """cudaMemset returns at once, on the default stream, which streams of ours do not wait for."""
    binding = CheckedBinding()
    _CuPyRuntime(binding).memset(7, 0, 64)
    assert [name for name, _ in binding.called] == ["memset", "streamSynchronize"]
