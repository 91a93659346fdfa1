"""What may be done to one training image beyond cropping and flipping.

Every function takes uint8 [H, W, 3] and returns the same; the image passed in is never written to, and
is returned itself where nothing is to be done. Randomness comes from the generator that is passed in
and from nowhere else.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import cv2
import numpy as np
from PIL import Image as Pillow
from PIL import ImageOps

from jaxdl.data.images.types import Image

_STRONGEST = 30  # magnitudes are 0 ... 30

_ERASED_AREA = (0.02, 0.33)
_ERASED_RATIO = (0.3, 3.3)
_ERASE_ATTEMPTS = 10

# The smoothing that sharpness is measured from, as in Pillow.
_SMOOTH = np.array([[1, 1, 1], [1, 5, 1], [1, 1, 1]], np.float32) / 13


class _Operation(NamedTuple):
    """An operation, and its value at magnitude 0 and at magnitude 30 of either policy."""

    apply: Callable[[Image, float], Image]
    weakest: float = 0.0
    rand: float = 0.0
    trivial: float = 0.0
    signed: bool = False  # the value is negated half the time


def color_jitter(image: Image, strength: float, rng: np.random.Generator) -> Image:
    """Changes brightness, contrast and saturation in random order.

    Args:
        image: uint8 [H, W, 3].
        strength: each factor is uniform in [max(0, 1 - strength), 1 + strength]; 0 keeps the image.
        rng: draws factors and order.

    Returns:
        uint8 [H, W, 3].
    """
    factors = rng.uniform(max(0.0, 1 - strength), 1 + strength, size=3)
    changes = (_brightness, _contrast, _saturation)
    for index in rng.permutation(3):
        image = changes[index](image, float(factors[index]) - 1)
    return image


def rand_augment(
    image: Image,
    rng: np.random.Generator,
    *,
    layers: int = 2,
    magnitude: int = 9,
) -> Image:
    """Applies operations drawn with replacement, all of one magnitude.

    RandAugment (Cubuk et al. 2019, https://arxiv.org/abs/1909.13719) with the ranges of torchvision,
    whose magnitudes are 0 to 30. Magnitude 0 keeps the image, except that autocontrast and equalize
    have no magnitude and that solarize inverts values of 255 at every one.

    Args:
        image: uint8 [H, W, 3].
        rng: draws the operations and their signs.
        layers: number of operations.
        magnitude: 0 to 30.

    Returns:
        uint8 [H, W, 3].
    """
    operations = tuple(_operations(*image.shape[:2]).values())
    for _ in range(layers):
        operation = operations[rng.integers(len(operations))]
        image = _apply(operation, image, operation.rand, magnitude, rng)
    return image


def trivial_augment(image: Image, rng: np.random.Generator) -> Image:
    """Applies one operation at a random magnitude.

    TrivialAugment (Müller and Hutter 2021, https://arxiv.org/abs/2103.10158) with the wide ranges.

    Args:
        image: uint8 [H, W, 3].
        rng: draws the operation, its magnitude out of 31, and its sign.

    Returns:
        uint8 [H, W, 3].
    """
    operations = tuple(_operations(*image.shape[:2]).values())
    operation = operations[rng.integers(len(operations))]
    magnitude = int(rng.integers(_STRONGEST, endpoint=True))
    return _apply(operation, image, operation.trivial, magnitude, rng)


def random_erasing(image: Image, rng: np.random.Generator, *, probability: float) -> Image:
    """Fills a rectangle with noise: 2% to 33% of the area, at a height:width of 0.3 to 3.3.

    Random Erasing (Zhong et al. 2017, https://arxiv.org/abs/1708.04896): ten attempts to fit in a
    rectangle that is smaller than the image along both axes, else the image is kept. One that is a
    single pixel high or wide is thus always kept.

    Args:
        image: uint8 [H, W, 3].
        rng: draws whether, where and what.
        probability: of trying at all.

    Returns:
        uint8 [H, W, 3].
    """
    if rng.random() >= probability:
        return image
    height, width = image.shape[:2]
    low, high = math.log(_ERASED_RATIO[0]), math.log(_ERASED_RATIO[1])
    for _ in range(_ERASE_ATTEMPTS):
        area = height * width * rng.uniform(*_ERASED_AREA)
        ratio = math.exp(rng.uniform(low, high))
        rows, columns = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < rows < height and 0 < columns < width:
            top = int(rng.integers(height - rows, endpoint=True))
            left = int(rng.integers(width - columns, endpoint=True))
            erased = image.copy()
            noise = rng.integers(256, size=(rows, columns, 3), dtype=np.uint8)
            erased[top : top + rows, left : left + columns] = noise
            return erased
    return image


def _operations(height: int, width: int) -> dict[str, _Operation]:
    """The operations of both policies for an image of this size."""
    # The published 150 pixels are for images of 331.
    down, right = height * 150 / 331, width * 150 / 331
    return {
        "identity": _Operation(_identity),
        "shear_x": _Operation(_shear_x, 0, 0.3, 0.99, signed=True),
        "shear_y": _Operation(_shear_y, 0, 0.3, 0.99, signed=True),
        "translate_x": _Operation(_translate_x, 0, right, 32, signed=True),
        "translate_y": _Operation(_translate_y, 0, down, 32, signed=True),
        "rotate": _Operation(_rotate, 0, 30, 135, signed=True),
        "brightness": _Operation(_brightness, 0, 0.9, 0.99, signed=True),
        "color": _Operation(_saturation, 0, 0.9, 0.99, signed=True),
        "contrast": _Operation(_contrast, 0, 0.9, 0.99, signed=True),
        "sharpness": _Operation(_sharpness, 0, 0.9, 0.99, signed=True),
        "posterize": _Operation(_posterize, 8, 4, 2),
        "solarize": _Operation(_solarize, 255, 0, 0),
        "autocontrast": _Operation(_autocontrast),
        "equalize": _Operation(_equalize),
    }


def _apply(
    operation: _Operation, image: Image, strongest: float, magnitude: int, rng: np.random.Generator
) -> Image:
    """Applies an operation at a magnitude of 0 (its weakest value) to 30 (`strongest`)."""
    value = operation.weakest + (strongest - operation.weakest) * magnitude / _STRONGEST
    if operation.signed and rng.random() < 0.5:
        value = -value
    return operation.apply(image, value)


def _identity(image: Image, value: float) -> Image:
    del value
    return image


def _shear_x(image: Image, slope: float) -> Image:
    """Moves each row right by `slope` times its distance from the top."""
    return _affine(image, [[1, slope, 0], [0, 1, 0]])


def _shear_y(image: Image, slope: float) -> Image:
    """Moves each column down by `slope` times its distance from the left."""
    return _affine(image, [[1, 0, 0], [slope, 1, 0]])


def _translate_x(image: Image, pixels: float) -> Image:
    """Moves to the right by whole pixels, rounded towards 0."""
    return _affine(image, [[1, 0, int(pixels)], [0, 1, 0]])


def _translate_y(image: Image, pixels: float) -> Image:
    """Moves down by whole pixels, rounded towards 0."""
    return _affine(image, [[1, 0, 0], [0, 1, int(pixels)]])


def _rotate(image: Image, degrees: float) -> Image:
    """Turns counter-clockwise about the centre."""
    height, width = image.shape[:2]
    centre = ((width - 1) / 2, (height - 1) / 2)
    return _affine(image, cv2.getRotationMatrix2D(centre, degrees, 1.0).tolist())


def _affine(image: Image, matrix: list[list[float]]) -> Image:
    """Moves the pixel at (x, y) to `matrix` @ (x, y, 1): bilinear, black where nothing comes to lie."""
    height, width = image.shape[:2]
    # By OpenCV, which takes a quarter of Pillow's time.
    moved = cv2.warpAffine(image, np.array(matrix, np.float64), (width, height), flags=cv2.INTER_LINEAR)
    return np.asarray(moved, np.uint8)


def _brightness(image: Image, change: float) -> Image:
    return _away_from(np.zeros_like(image), image, change)


def _contrast(image: Image, change: float) -> Image:
    grey = cv2.cvtColor(image, cv2.COLOR_RGB2GRAY)
    return _away_from(np.full_like(image, round(cv2.mean(grey)[0])), image, change)


def _saturation(image: Image, change: float) -> Image:
    grey = cv2.cvtColor(image, cv2.COLOR_RGB2GRAY)
    return _away_from(np.asarray(cv2.cvtColor(grey, cv2.COLOR_GRAY2RGB), np.uint8), image, change)


def _sharpness(image: Image, change: float) -> Image:
    smooth = image.copy()  # the outermost pixels lack neighbours and stay
    smooth[1:-1, 1:-1] = cv2.filter2D(image, -1, _SMOOTH)[1:-1, 1:-1]
    return _away_from(smooth, image, change)


def _away_from(plain: Image, image: Image, change: float) -> Image:
    """Scales an image's difference from a plain one by 1 + `change`: -1 gives `plain`, 0 the image."""
    return np.asarray(cv2.addWeighted(image, 1 + change, plain, -change, 0), np.uint8)


def _posterize(image: Image, bits: float) -> Image:
    """Keeps the upper bits of each value."""
    return image & np.uint8(256 - 2 ** (8 - round(bits)))


def _solarize(image: Image, threshold: float) -> Image:
    """Inverts the values from `threshold` on."""
    return np.where(image < np.uint8(math.ceil(threshold)), image, 255 - image)


def _autocontrast(image: Image, value: float) -> Image:
    """Stretches each channel to 0 ... 255."""
    del value
    return np.asarray(ImageOps.autocontrast(Pillow.fromarray(image)))


def _equalize(image: Image, value: float) -> Image:
    """Makes each channel's values about equally frequent."""
    del value
    return np.asarray(ImageOps.equalize(Pillow.fromarray(image)))
