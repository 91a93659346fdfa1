"""Two training images made into one, and how much of it is the first.

Randomness comes from the generator that is passed in and from nowhere else.
"""

import math

import cv2
import numpy as np

from jaxdl.data.images.types import Image


def mix(
    image: Image, other: Image, rng: np.random.Generator, *, mixup: float, cutmix: float
) -> tuple[Image, float]:
    """Mixes two images by mixup or CutMix; where both are on, by either half the time.

    mixup (Zhang et al. 2017, https://arxiv.org/abs/1710.09412) is share * image + (1 - share) * other.
    CutMix (Yun et al. 2019, https://arxiv.org/abs/1905.04899) lays a box of `other` on the image, at the
    same place; its centre is uniform, so that it may reach over the border and is clipped there.

    Args:
        image: uint8 [H, W, 3]; not written to, and neither is `other`.
        other: uint8 [H, W, 3].
        rng: draws kind, share and place.
        mixup: the share is drawn from Beta(mixup, mixup); 0 switches mixup off.
        cutmix: the share before clipping is drawn from Beta(cutmix, cutmix); 0 switches CutMix off.

    Returns:
        The mixed image, uint8 [H, W, 3], and the share of `image` in it, 0 to 1: for CutMix the share of
        the pixels that it kept. The labels are to be mixed by the same share.

    Raises:
        ValueError: both kinds are off, or the shapes differ.
    """
    if not (mixup > 0 or cutmix > 0):
        raise ValueError("mix needs mixup or cutmix above 0")
    if image.shape != other.shape:
        raise ValueError(f"images of shapes {image.shape} and {other.shape} cannot be mixed")
    cut = cutmix > 0 and (mixup <= 0 or rng.random() < 0.5)
    alpha = cutmix if cut else mixup
    share = float(rng.beta(alpha, alpha))
    return _pasted(image, other, share, rng) if cut else (_blended(image, other, share), share)


def _blended(image: Image, other: Image, share: float) -> Image:
    # Rounds to nearest, in a quarter of NumPy's time.
    return np.asarray(cv2.addWeighted(image, share, other, 1 - share, 0), np.uint8)


def _pasted(image: Image, other: Image, share: float, rng: np.random.Generator) -> tuple[Image, float]:
    height, width = image.shape[:2]
    side = math.sqrt(1 - share)
    rows, columns = _span(height, side, rng), _span(width, side, rng)
    mixed = image.copy()
    mixed[rows, columns] = other[rows, columns]
    pasted = (rows.stop - rows.start) * (columns.stop - columns.start)
    return mixed, (height * width - pasted) / (height * width)


def _span(length: int, side: float, rng: np.random.Generator) -> slice:
    """The pixels of 0 ... length - 1 under a stretch of `side` * length whose centre is uniform."""
    centre, half = rng.uniform(0, length), side * length / 2
    return slice(round(max(0.0, centre - half)), round(min(float(length), centre + half)))
