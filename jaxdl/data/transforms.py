"""What happens to one image before it is batched, and to the batch inside the compiled step.

Images stay uint8 until they are on the device: a quarter of the bytes to
move. Randomness comes from the generator that is passed in and from nowhere
else.
"""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from PIL import Image as Pillow

from jaxdl.data.types import Augment, Image

_RESIZE_TO_CROP = 256 / 224  # evaluation resizes the shorter side to 256 for a crop of 224
_CROP_AREA = (0.08, 1.0)
_CROP_RATIO = (3 / 4, 4 / 3)
_CROP_ATTEMPTS = 10


def augmentation(
    name: Augment, size: int, *, photographs: bool
) -> Callable[[Image, np.random.Generator], Image]:
    """Returns the training transform: uint8 [H, W, 3] to uint8 [size, size, 3].

    Args:
        name: `none`, `shift`, `shift_flip` or `crop_flip`.
        size: height and width of the result.
        photographs: how `fit` brings images to `size`; `crop_flip` does it itself.
    """

    def none(image: Image, rng: np.random.Generator) -> Image:
        del rng
        return fit(image, size, photographs=photographs)

    def shifted(image: Image, rng: np.random.Generator) -> Image:
        return shift(fit(image, size, photographs=photographs), size // 8, rng)

    def shift_flip(image: Image, rng: np.random.Generator) -> Image:
        return mirror(shifted(image, rng), rng)

    def crop_flip(image: Image, rng: np.random.Generator) -> Image:
        return mirror(random_resized_crop(image, size, rng), rng)

    return {"none": none, "shift": shifted, "shift_flip": shift_flip, "crop_flip": crop_flip}[name]


def fit(image: Image, size: int, *, photographs: bool) -> Image:
    """Brings an image to [size, size, 3] without randomness.

    A photograph is resized so that its shorter side is 256/224 of `size` and
    cropped to the centre, as all published ImageNet accuracies are measured.
    Other images are resized as a whole, or left alone if they fit.
    """
    if not photographs:
        return resize(image, size, size)
    height, width = image.shape[:2]
    short = round(size * _RESIZE_TO_CROP)
    scaled = resize(image, max(short, short * height // width), max(short, short * width // height))
    top, left = (round((length - size) / 2) for length in scaled.shape[:2])
    return scaled[top : top + size, left : left + size]


def resize(image: Image, height: int, width: int) -> Image:
    """Resizes to [height, width, 3]: bilinear, with the filter widened when it shrinks (no aliasing)."""
    if image.shape[:2] == (height, width):
        return image
    return np.asarray(Pillow.fromarray(image).resize((width, height), Pillow.Resampling.BILINEAR))


def shift(image: Image, limit: int, rng: np.random.Generator) -> Image:
    """Moves an image by up to `limit` pixels along each axis and fills with black; same shape."""
    height, width = image.shape[:2]
    canvas = np.zeros((height + 2 * limit, width + 2 * limit, 3), np.uint8)
    canvas[limit : limit + height, limit : limit + width] = image
    top, left = rng.integers(2 * limit, size=2, endpoint=True)
    return canvas[top : top + height, left : left + width]


def mirror(image: Image, rng: np.random.Generator) -> Image:
    """Swaps left and right half the time; same shape."""
    return image[:, ::-1] if rng.random() < 0.5 else image


def random_resized_crop(image: Image, size: int, rng: np.random.Generator) -> Image:
    """Cuts out 8% to 100% of the area, at a width:height of 3:4 to 4:3, and resizes it to [size, size, 3].

    The crop of Szegedy et al. 2014 in torchvision's form: ten attempts to fit
    one in, then the largest centre crop of an allowed ratio.
    """
    height, width = image.shape[:2]
    low, high = math.log(_CROP_RATIO[0]), math.log(_CROP_RATIO[1])
    for _ in range(_CROP_ATTEMPTS):
        area = height * width * rng.uniform(*_CROP_AREA)
        ratio = math.exp(rng.uniform(low, high))
        crop_width, crop_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < crop_width <= width and 0 < crop_height <= height:
            top = int(rng.integers(height - crop_height, endpoint=True))
            left = int(rng.integers(width - crop_width, endpoint=True))
            break
    else:
        crop_width = min(width, max(1, round(height * _CROP_RATIO[1])))
        crop_height = min(height, max(1, round(width / _CROP_RATIO[0])))
        top, left = (height - crop_height) // 2, (width - crop_width) // 2
    return resize(image[top : top + crop_height, left : left + crop_width], size, size)


def normalize(
    images: jax.Array, mean: Sequence[float], std: Sequence[float], dtype: DTypeLike = jnp.float32
) -> jax.Array:
    """Scales images to mean 0 and deviation 1 in each channel; for use inside the compiled step.

    Args:
        images: uint8 [..., 3].
        mean: mean of each channel on a scale of 0 to 1.
        std: standard deviation of each channel on the same scale.
        dtype: the result's; the arithmetic is float32.

    Returns:
        `(images / 255 - mean) / std`, the shape of `images`.
    """
    shape = (1,) * (images.ndim - 1) + (len(mean),)
    centre = jnp.asarray(mean, jnp.float32).reshape(shape)
    spread = jnp.asarray(std, jnp.float32).reshape(shape)
    return ((images.astype(jnp.float32) / 255 - centre) / spread).astype(dtype)
