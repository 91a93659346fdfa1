"""Arrays on disk of a length that is known only at the end."""

from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.lib import format as npy
from numpy.typing import DTypeLike, NDArray


class GrowingArray:
    """Writes a one-dimensional .npy file piece by piece; the file is valid once the context ends.

    Args:
        path: the file, which must not exist.
        dtype: type of the elements.
    """

    def __init__(self, path: Path, dtype: DTypeLike) -> None:
        self._dtype = np.dtype(dtype)
        self._length = 0
        self._file = path.open("xb")
        self._write_header()

    def __len__(self) -> int:
        return self._length

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file:
            if kind is None:
                self._write_header()

    def append(self, values: NDArray[np.integer[Any]]) -> None:
        """Adds integers, which the type of the array must hold, at the end."""
        self._file.write(values.astype(self._dtype, copy=False).tobytes())
        self._length += len(values)

    def _write_header(self) -> None:
        # NumPy leaves room in a header for the length to grow, so that it stays as long as it was.
        self._file.seek(0)
        npy.write_array_header_1_0(
            self._file,
            {"descr": npy.dtype_to_descr(self._dtype), "fortran_order": False, "shape": (self._length,)},
        )
