"""What goes to the device for one step, in one copy: each copy costs a launch, however small it is."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True, slots=True)
class Place:
    """Where an array lies in the copy."""

    start: int
    length: int
    dtype: torch.dtype  # int64 or float64


class DeviceCopy:
    """Arrays are added, sent together, and taken out on the other side."""

    def __init__(self) -> None:
        self._parts: list[npt.NDArray[np.int64]] = []
        self._length = 0
        self._sent: torch.Tensor | None = None

    def add_ints(self, values: Sequence[int] | npt.NDArray[np.int64]) -> Place:
        return self._add(np.asarray(values, np.int64), torch.int64)

    def add_floats(self, values: Sequence[float] | npt.NDArray[np.float64]) -> Place:
        return self._add(np.asarray(values, np.float64).view(np.int64), torch.float64)

    def _add(self, words: npt.NDArray[np.int64], dtype: torch.dtype) -> Place:
        assert self._sent is None, "added after it was sent"
        place = Place(self._length, len(words), dtype)
        self._parts.append(words)
        self._length += len(words)
        return place

    def send(self, device: torch.device) -> None:
        """Does not wait for the device; nothing is sent if nothing was added."""
        if not self._parts:
            return
        host = torch.from_numpy(np.concatenate(self._parts))
        # Out of pinned memory, which torch keeps until the copy has ended.
        self._sent = host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)

    def __getitem__(self, place: Place) -> torch.Tensor:
        """[length], on the device."""
        assert self._sent is not None, "taken before it was sent"
        words = self._sent[place.start : place.start + place.length]
        return words if place.dtype == torch.int64 else words.view(place.dtype)
