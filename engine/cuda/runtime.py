"""What Tandem asks of the CUDA runtime, by the runtime's own names; CuPy answers.

A small interface, so that all that is built on it (pools, handles, events, copies) also runs over a runtime that only
plays CUDA and enforces its rules. Pointers, streams and events are addresses, 0 being the default stream. The current
device is the calling thread's own, as in CUDA.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any, Protocol


class CudaError(RuntimeError):
    """A call of the runtime failed; `name` is CUDA's (cudaErrorInvalidValue, …)."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


class CudaRuntime(Protocol):
    """Raises `CudaError` from any method."""

    # --- devices

    def device_count(self) -> int: ...

    def set_device(self, device: int) -> None:
        """Of the calling thread, for all calls below."""
        ...

    def device_uuid(self, device: int) -> bytes:
        """16 bytes that name the GPU in every process, whatever it is numbered there."""
        ...

    def can_access_peer(self, device: int, peer: int) -> bool: ...

    def mem_info(self) -> tuple[int, int]:
        """Free and total bytes of the current device."""
        ...

    # --- memory

    def malloc(self, nbytes: int) -> int:
        """cudaMalloc: of the current device, 256-byte aligned, contents undefined."""
        ...

    def free(self, pointer: int) -> None: ...

    def memset(self, pointer: int, value: int, nbytes: int) -> None: ...

    def memcpy(self, target: int, source: int, nbytes: int) -> None:
        """Between any two addresses, of host or device; returns when it is done."""
        ...

    def memcpy_async(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """As `memcpy`, in the stream's order; truly asynchronous only with registered host memory."""
        ...

    def host_register(self, pointer: int, nbytes: int, *, read_only: bool = False) -> None:
        """Pins host memory, for all devices. `read_only`: it is mapped so; not every platform can pin that."""
        ...

    def host_unregister(self, pointer: int) -> None: ...

    # --- streams and events

    def stream_create(self) -> int:
        """Of the current device; does not wait for the default stream, nor that for it."""
        ...

    def stream_synchronize(self, stream: int) -> None: ...

    def stream_destroy(self, stream: int) -> None: ...

    def event_create(self, *, interprocess: bool = False) -> int:
        """Without timing; of the current device."""
        ...

    def event_record(self, event: int, stream: int) -> None: ...

    def event_query(self, event: int) -> bool:
        """Whether what the last record stands for is done; true if there is none."""
        ...

    def event_synchronize(self, event: int) -> None:
        """Waits for the last record; returns at once if there is none."""
        ...

    def stream_wait_event(self, stream: int, event: int) -> None:
        """What the stream is given from now on waits for the last record; a no-op if there is none."""
        ...

    def event_destroy(self, event: int) -> None: ...

    # --- between processes

    def ipc_get_mem_handle(self, pointer: int) -> bytes:
        """64 bytes; of the start of memory from `malloc` alone, and always of the whole allocation."""
        ...

    def ipc_open_mem_handle(self, handle: bytes) -> int:
        """The address here of another process's memory, for the current device.

        A process's own handle is refused. One that is open already must not be opened again: newer drivers count, older
        ones refuse.
        """
        ...

    def ipc_close_mem_handle(self, pointer: int) -> None:
        """Waits for the device."""
        ...

    def ipc_get_event_handle(self, event: int) -> bytes:
        """64 bytes; of an interprocess event."""
        ...

    def ipc_open_event_handle(self, handle: bytes) -> int: ...


@cache
def cuda_runtime() -> CudaRuntime:
    """The real one; touches CUDA when it is first called, not before.

    Raises:
        ImportError: CuPy is not installed.
    """
    from cupy.cuda import runtime

    return _CuPyRuntime(runtime)


class _CuPyRuntime:
    """CuPy's thin binding, its errors made ours."""

    def __init__(self, runtime: Any, driver: Callable[[], Any] = lambda: ctypes.CDLL("libcuda.so.1")) -> None:
        self._runtime = runtime
        self._driver = driver

    def _call(self, function: Callable[..., Any], *arguments: object) -> Any:
        try:
            return function(*arguments)
        except self._runtime.CUDARuntimeError as exc:
            # "cudaErrorInvalidValue: invalid argument"
            raise CudaError(str(exc).partition(":")[0], f"{function.__name__}: {exc}") from exc

    def device_count(self) -> int:
        return int(self._call(self._runtime.getDeviceCount))

    def set_device(self, device: int) -> None:
        self._call(self._runtime.setDevice, device)

    def device_uuid(self, device: int) -> bytes:
        # Not from CuPy's getDeviceProperties, which takes the 16 bytes for a string that ends at a zero.
        uuid, handle = (ctypes.c_ubyte * 16)(), ctypes.c_int()
        try:
            driver = self._driver()
        except OSError as exc:
            raise CudaError("cudaErrorInsufficientDriver", f"cuDeviceGetUuid: {exc}") from exc
        status = (
            driver.cuInit(0)
            or driver.cuDeviceGet(ctypes.byref(handle), device)
            or driver.cuDeviceGetUuid_v2(ctypes.byref(uuid), handle)  # v2: of a MIG slice its own
        )
        if status:
            name = ctypes.c_char_p()
            driver.cuGetErrorName(status, ctypes.byref(name))
            text = name.value.decode() if name.value else f"error {status}"
            raise CudaError(text, f"cuDeviceGetUuid: {text}")
        return bytes(uuid)

    def can_access_peer(self, device: int, peer: int) -> bool:
        return bool(self._call(self._runtime.deviceCanAccessPeer, device, peer))

    def mem_info(self) -> tuple[int, int]:
        free, total = self._call(self._runtime.memGetInfo)
        return int(free), int(total)

    def malloc(self, nbytes: int) -> int:
        return int(self._call(self._runtime.malloc, nbytes))

    def free(self, pointer: int) -> None:
        self._call(self._runtime.free, pointer)

    def memset(self, pointer: int, value: int, nbytes: int) -> None:
        self._call(self._runtime.memset, pointer, value, nbytes)
        # Asynchronous to the host on the default stream, which streams of ours do not wait for.
        self._call(self._runtime.streamSynchronize, 0)

    def memcpy(self, target: int, source: int, nbytes: int) -> None:
        self._call(self._runtime.memcpy, target, source, nbytes, self._runtime.memcpyDefault)

    def memcpy_async(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self._call(self._runtime.memcpyAsync, target, source, nbytes, self._runtime.memcpyDefault, stream)

    def host_register(self, pointer: int, nbytes: int, *, read_only: bool = False) -> None:
        flags = _HOST_REGISTER_PORTABLE | (_HOST_REGISTER_READ_ONLY if read_only else 0)
        self._call(self._runtime.hostRegister, pointer, nbytes, flags)

    def host_unregister(self, pointer: int) -> None:
        self._call(self._runtime.hostUnregister, pointer)

    def stream_create(self) -> int:
        return int(self._call(self._runtime.streamCreateWithFlags, self._runtime.streamNonBlocking))

    def stream_synchronize(self, stream: int) -> None:
        self._call(self._runtime.streamSynchronize, stream)

    def stream_destroy(self, stream: int) -> None:
        self._call(self._runtime.streamDestroy, stream)

    def event_create(self, *, interprocess: bool = False) -> int:
        flags = self._runtime.eventDisableTiming | (self._runtime.eventInterprocess if interprocess else 0)
        return int(self._call(self._runtime.eventCreateWithFlags, flags))

    def event_record(self, event: int, stream: int) -> None:
        self._call(self._runtime.eventRecord, event, stream)

    def event_query(self, event: int) -> bool:
        return bool(self._call(self._event_is_done, event))

    def _event_is_done(self, event: int) -> bool:
        status = self._runtime.eventQuery(event)  # a status, where CuPy's other calls raise
        if status not in (0, _ERROR_NOT_READY):
            raise self._runtime.CUDARuntimeError(status)
        return bool(status == 0)

    def event_synchronize(self, event: int) -> None:
        self._call(self._runtime.eventSynchronize, event)

    def stream_wait_event(self, stream: int, event: int) -> None:
        self._call(self._runtime.streamWaitEvent, stream, event)

    def event_destroy(self, event: int) -> None:
        self._call(self._runtime.eventDestroy, event)

    def ipc_get_mem_handle(self, pointer: int) -> bytes:
        return bytes(self._call(self._runtime.ipcGetMemHandle, pointer))

    def ipc_open_mem_handle(self, handle: bytes) -> int:
        return int(self._call(self._runtime.ipcOpenMemHandle, handle, self._runtime.cudaIpcMemLazyEnablePeerAccess))

    def ipc_close_mem_handle(self, pointer: int) -> None:
        self._call(self._runtime.ipcCloseMemHandle, pointer)

    def ipc_get_event_handle(self, event: int) -> bytes:
        return bytes(self._call(self._runtime.ipcGetEventHandle, event))

    def ipc_open_event_handle(self, handle: bytes) -> int:
        return int(self._call(self._runtime.ipcOpenEventHandle, handle))


# CuPy has no names for these.
_HOST_REGISTER_PORTABLE = 1
_HOST_REGISTER_READ_ONLY = 8
_ERROR_NOT_READY = 600
