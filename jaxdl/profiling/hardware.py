"""What accelerators can do at best, by the name under which JAX knows them."""

import re
from collections.abc import Mapping

import jax.numpy as jnp
from jax.typing import DTypeLike

_16BIT, _TF32, _FP32 = "16 bits", "tf32", "fp32"

PEAK_TFLOPS: Mapping[str, Mapping[str, float]] = {
    r"NVIDIA H200|NVIDIA H100 80GB HBM3|NVIDIA H100 SXM\d?": {_16BIT: 989.4, _TF32: 494.7, _FP32: 66.9},
    r"NVIDIA H100 PCIe": {_16BIT: 756.0, _TF32: 378.0, _FP32: 51.2},
    r"NVIDIA A100[- ].*": {_16BIT: 312.0, _TF32: 156.0, _FP32: 19.5},
    r"NVIDIA L40S": {_16BIT: 362.0, _TF32: 183.0, _FP32: 91.6},
    r"NVIDIA L4": {_16BIT: 121.0, _TF32: 60.0, _FP32: 30.3},
    r"Tesla V100-.*": {_16BIT: 125.0, _FP32: 15.7},
    r"Tesla T4": {_16BIT: 65.0, _FP32: 8.1},
    r"TPU v4": {_16BIT: 275.0},
    r"TPU v5 lite|TPU v5e": {_16BIT: 197.0},
    r"TPU v5p|TPU v5": {_16BIT: 459.0},
    r"TPU v6 lite|TPU v6e": {_16BIT: 918.0},
}
"""Dense products in units of 10^12 operations a second, from the makers' data sheets, by a pattern of the
device's whole name and the number format; a part of a device (MIG) is not listed. TPUs multiply float32 in
several passes of bfloat16, so their share is given of the latter whatever the format."""


def peak_flops(kind: str, dtype: DTypeLike, *, tf32: bool = False) -> float | None:
    """Tells how many floating-point operations a second a device does at best in matrix products.

    Args:
        kind: the device's name, as `jax.Device.device_kind`.
        dtype: of the factors.
        tf32: whether float32 factors may be rounded to TensorFloat-32.

    Returns:
        Operations a second, or None where no data sheet says: CPUs, and devices that are not listed.
    """
    row = next(
        (row for pattern, row in PEAK_TFLOPS.items() if re.fullmatch(pattern, kind) and "MIG" not in kind),
        None,
    )
    if row is None:
        return None
    wide = jnp.dtype(dtype).itemsize > 2
    # A Volta or Turing has no TensorFloat-32; a TPU has one figure.
    column = ((_TF32 if tf32 else _FP32) if wide else _16BIT) if len(row) > 1 else _16BIT
    return 1e12 * row.get(column, row.get(_FP32, 0.0))
