"""Two-dimensional convolution of NHWC images with HWIO kernels."""

from typing import Literal

import jax

Formulation = Literal["auto", "lax", "product"]


def convolve(
    x: jax.Array, kernel: jax.Array, *, strides: int = 1, padding: int = 0, formulation: Formulation = "auto"
) -> jax.Array:
    """Convolves images with a kernel.

    Args:
        x: Images, [batch, height, width, channel_in].
        kernel: [kernel_height, kernel_width, channel_in, channel], of x's dtype.
        strides: Step of the output grid in both directions.
        padding: Zeros added on all four sides.
        formulation: How it is computed.

    Returns:
        [batch, out_height, out_width, channel], of x's dtype.
    """
    return jax.lax.conv_general_dilated(
        x,
        kernel,
        (strides, strides),
        ((padding, padding), (padding, padding)),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
