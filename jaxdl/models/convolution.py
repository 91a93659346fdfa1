"""Two-dimensional convolution of NHWC images with HWIO kernels, in the form that suits platform and shape.

`lax` is XLA's own operator, which GPUs and TPUs always get from `auto`. On a
CPU its gradients run at a small share of the machine's speed where the kernel
is 1x1 or strided, and on small images all of it does. `product` writes the
convolution as matrix products instead:

- every position (tap) of the kernel is one product of the images, shifted and
  strided, with one [channel_in, channel] matrix; taps that see nothing but
  padding are left out;
- with few input channels, where such a matrix is too thin, the shifted images
  are laid side by side for a single product.

`auto` makes the choice while the program is lowered (`lax.platform_dependent`):
compiling for a GPU on a machine with none gives the GPU's form. All forms give
the same results but for float rounding. Those with products define their own
gradient, so that the shifted images are made anew rather than kept for the
backward pass, and are therefore not differentiable in forward mode.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Formulation = Literal["auto", "lax", "product"]
Gradients = tuple[jax.Array, jax.Array]

_SMALL_IMAGE = (
    64  # pixels; ResNet-50 trains 3.5 times faster on 8x8 images than with lax, from 14x14 on slower
)
_FEW_CHANNELS = 16  # below it a tap's matrix is too thin to keep the vector units busy


def convolve(
    x: jax.Array, kernel: jax.Array, *, strides: int = 1, padding: int = 0, formulation: Formulation = "auto"
) -> jax.Array:
    """Convolves images with a kernel.

    Args:
        x: Images, [batch, height, width, channel_in].
        kernel: [kernel_height, kernel_width, channel_in, channel], of x's dtype.
        strides: Step of the output grid in both directions.
        padding: Zeros added on all four sides.
        formulation: How it is computed, see the module.

    Returns:
        [batch, out_height, out_width, channel], of x's dtype.
    """
    if formulation == "auto":
        forms = _forms_on_cpu(x.shape, kernel.shape, strides)
    else:
        forms = _Forms(formulation, formulation, formulation)
    if forms == _ALL_LAX:
        return _lax(strides, padding, x, kernel)
    return _convolve(x, kernel, strides, padding, forms, formulation == "auto")


class _Forms(NamedTuple):
    """The form, `lax` or `product`, of each of the three computations."""

    value: str
    image_gradient: str
    kernel_gradient: str


_ALL_LAX = _Forms("lax", "lax", "lax")


def _forms_on_cpu(x_shape: tuple[int, ...], kernel_shape: tuple[int, ...], strides: int) -> _Forms:
    """The faster forms, as measured with ResNet-50."""
    if kernel_shape[:2] == (1, 1) or x_shape[1] * x_shape[2] <= _SMALL_IMAGE:
        return _Forms("product", "product", "product")
    if strides > 1:
        # XLA spreads the gradient's pixels out among zeros, and beyond some size convolves them in a plain
        # loop: 246 ms for [32, 56, 56, 128], 40 times what 8 images take.
        return _Forms("lax", "product", "lax")
    return _ALL_LAX


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5))
def _convolve(
    x: jax.Array, kernel: jax.Array, strides: int, padding: int, forms: _Forms, only_cpu: bool
) -> jax.Array:
    y: jax.Array = _by_platform(partial(_value, strides, padding), forms, only_cpu, x, kernel)
    return y


def _forward_rule(
    x: jax.Array, kernel: jax.Array, strides: int, padding: int, forms: _Forms, only_cpu: bool
) -> tuple[jax.Array, Gradients]:
    return _convolve(x, kernel, strides, padding, forms, only_cpu), (x, kernel)


def _backward_rule(
    strides: int, padding: int, forms: _Forms, only_cpu: bool, saved: Gradients, dy: jax.Array
) -> Gradients:
    gradients: Gradients = _by_platform(partial(_gradients, strides, padding), forms, only_cpu, *saved, dy)
    return gradients


_convolve.defvjp(_forward_rule, _backward_rule)


def _by_platform(function: Callable[..., Any], forms: _Forms, only_cpu: bool, *arrays: jax.Array) -> Any:
    """function(forms, *arrays); with lax throughout where the forms are for CPUs only and this is none."""
    if not only_cpu:
        return function(forms, *arrays)
    return lax.platform_dependent(*arrays, cpu=partial(function, forms), default=partial(function, _ALL_LAX))


def _value(strides: int, padding: int, forms: _Forms, x: jax.Array, kernel: jax.Array) -> jax.Array:
    form = _product if forms.value == "product" else _lax
    return form(strides, padding, x, kernel)


def _gradients(
    strides: int, padding: int, forms: _Forms, x: jax.Array, kernel: jax.Array, dy: jax.Array
) -> Gradients:
    form = _product if forms.image_gradient == "product" else _lax
    (dx,) = jax.linear_transpose(lambda x: form(strides, padding, x, kernel), x)(dy)
    if forms.kernel_gradient == "product":
        return dx, _product_kernel_gradient(strides, padding, x, kernel, dy)
    (d_kernel,) = jax.linear_transpose(lambda kernel: _lax(strides, padding, x, kernel), kernel)(dy)
    return dx, d_kernel


def _lax(strides: int, padding: int, x: jax.Array, kernel: jax.Array) -> jax.Array:
    pads = ((padding, padding), (padding, padding))
    return lax.conv_general_dilated(
        x, kernel, (strides, strides), pads, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def _product(strides: int, padding: int, x: jax.Array, kernel: jax.Array) -> jax.Array:
    taps = _taps(x.shape, kernel.shape, strides, padding)
    shifted = _shifted(x, kernel.shape, strides, padding, taps)
    if _side_by_side(kernel):
        return _matmul(jnp.concatenate(shifted, -1), jnp.concatenate([kernel[tap] for tap in taps]))
    y, *others = [_matmul(part, kernel[tap]) for part, tap in zip(shifted, taps, strict=True)]
    for other in others:
        y += other
    return y


def _product_kernel_gradient(
    strides: int, padding: int, x: jax.Array, kernel: jax.Array, dy: jax.Array
) -> jax.Array:
    taps = _taps(x.shape, kernel.shape, strides, padding)
    shifted = _shifted(x, kernel.shape, strides, padding, taps)
    if _side_by_side(kernel):
        parts = jnp.split(_contract_rows(jnp.concatenate(shifted, -1), dy), len(taps))
    else:
        parts = [_contract_rows(part, dy) for part in shifted]
    by_tap = dict(zip(taps, parts, strict=True))
    nothing = jnp.zeros(kernel.shape[2:], kernel.dtype)
    every = [by_tap.get(tap, nothing) for tap in np.ndindex(kernel.shape[:2])]
    return jnp.stack(every).reshape(kernel.shape)


def _side_by_side(kernel: jax.Array) -> bool:
    return kernel.shape[2] < _FEW_CHANNELS and kernel.shape[0] * kernel.shape[1] > 1


def _output(size: int, kernel: int, strides: int, padding: int) -> int:
    return (size + 2 * padding - kernel) // strides + 1


def _taps(
    x_shape: tuple[int, ...], kernel_shape: tuple[int, ...], strides: int, padding: int
) -> list[tuple[int, ...]]:
    """The kernel's positions (row, column) that meet at least one pixel of the image."""

    def meets(tap: int, size: int, kernel: int) -> bool:
        places = range(
            tap - padding, tap - padding + _output(size, kernel, strides, padding) * strides, strides
        )
        return any(0 <= place < size for place in places)

    return [
        tap
        for tap in np.ndindex(kernel_shape[:2])
        if all(meets(*each) for each in zip(tap, x_shape[1:3], kernel_shape[:2], strict=True))
    ]


def _shifted(
    x: jax.Array, kernel_shape: tuple[int, ...], strides: int, padding: int, taps: list[tuple[int, ...]]
) -> list[jax.Array]:
    """What each tap sees, [batch, out_height, out_width, channel_in]; the images are padded once."""
    batch, height, width, channel = x.shape
    rows = (_output(height, kernel_shape[0], strides, padding) - 1) * strides + 1
    columns = (_output(width, kernel_shape[1], strides, padding) - 1) * strides + 1
    if padding:
        pad = (padding, padding, 0)
        x = lax.pad(x, jnp.zeros((), x.dtype), ((0, 0, 0), pad, pad, (0, 0, 0)))
    return [
        lax.slice(x, (0, i, j, 0), (batch, i + rows, j + columns, channel), (1, strides, strides, 1))
        for i, j in taps
    ]


def _matmul(x: jax.Array, matrix: jax.Array) -> jax.Array:
    """[..., channel_in] times [channel_in, channel] as one flat product, the only shape with fast kernels."""
    return (x.reshape(-1, x.shape[-1]) @ matrix).reshape(*x.shape[:-1], matrix.shape[-1])


def _contract_rows(x: jax.Array, dy: jax.Array) -> jax.Array:
    """Sum over all pixels of the outer product of x and dy: [channel_in, channel].

    XLA:CPU transposes the left operand while it multiplies, so the narrower one belongs there (1.7 times
    faster at 256 to 64 channels). The barrier keeps the compiler from turning the product back round.
    """
    x, dy = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
    rows = (((0,), (0,)), ((), ()))
    if x.shape[1] <= dy.shape[1]:
        return lax.dot_general(x, dy, rows)
    transposed: jax.Array = lax.optimization_barrier(lax.dot_general(dy, x, rows))
    return transposed.T
