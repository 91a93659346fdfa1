"""What happens to one image before it is batched.

Images stay uint8 until they are on the device: a quarter of the bytes to
move. Randomness comes from the generator that is passed in and from nowhere
else.
"""

import math
from typing import Protocol

import cv2
import numpy as np
from PIL import Image as Pillow

from jaxdl.config import ImageDataConfig
from jaxdl.data.images.augmentations import color_jitter, rand_augment, random_erasing, trivial_augment
from jaxdl.data.images.types import Augment, Image, Picture, Source

_RESIZE_TO_CROP = 256 / 224  # evaluation resizes the shorter side to 256 for a crop of 224
_CROP_AREA = (0.08, 1.0)
_CROP_RATIO = (3 / 4, 4 / 3)
_CROP_ATTEMPTS = 10


class Transform(Protocol):
    """What brings a picture to uint8 [size, size, 3]; a function of its arguments."""

    def __call__(self, picture: Picture, rng: np.random.Generator, out: Image | None = None) -> Image:
        """Transforms a picture.

        Args:
            picture: the picture.
            rng: all that is drawn.
            out: an array of the result's shape; it may be used for the result, which then need not be copied
                there.
        """


def training_transform(config: ImageDataConfig, source: Source) -> Transform:
    """Returns what training does to a picture: crop or shift, policy, colours, erasing, as configured.

    Args:
        config: how.
        source: what `data.augment auto` means, and whether the pictures are photographs.

    """
    name = source.augment if config.augment == "auto" else config.augment
    placed = augmentation(name, config.image_size, photographs=source.photographs)

    def transform(picture: Picture, rng: np.random.Generator, out: Image | None = None) -> Image:
        image = placed(picture, rng, out)
        if config.policy == "randaugment":
            layers, magnitude = config.randaugment_layers, config.randaugment_magnitude
            image = rand_augment(image, rng, layers=layers, magnitude=magnitude)
        elif config.policy == "trivialaugment":
            image = trivial_augment(image, rng)
        if config.color_jitter:
            image = color_jitter(image, config.color_jitter, rng)
        if config.erasing:
            image = random_erasing(image, rng, probability=config.erasing)
        return image

    return transform


def augmentation(name: Augment, size: int, *, photographs: bool) -> Transform:
    """Returns what brings a picture to uint8 [size, size, 3], with a random crop, shift or reflection.

    Args:
        name: `none`, `shift`, `shift_flip` or `crop_flip`.
        size: height and width of the result.
        photographs: how `fit` brings images to `size`; `crop_flip` does it itself.
    """

    def none(picture: Picture, rng: np.random.Generator, out: Image | None = None) -> Image:
        del rng, out
        return fit(picture, size, photographs=photographs)

    def shifted(picture: Picture, rng: np.random.Generator, out: Image | None = None) -> Image:
        del out
        return shift(fit(picture, size, photographs=photographs), size // 8, rng)

    def shift_flip(picture: Picture, rng: np.random.Generator, out: Image | None = None) -> Image:
        del out
        return mirror(shifted(picture, rng), rng)

    def crop_flip(picture: Picture, rng: np.random.Generator, out: Image | None = None) -> Image:
        return mirror(random_resized_crop(picture, size, rng, out), rng, out)

    return {"none": none, "shift": shifted, "shift_flip": shift_flip, "crop_flip": crop_flip}[name]


def fit(picture: Picture, size: int, *, photographs: bool) -> Image:
    """Brings a picture to [size, size, 3] without randomness.

    A photograph is resized so that its shorter side is 256/224 of `size` and
    cropped to the centre, as all published ImageNet accuracies are measured.
    Other images are resized as a whole, or left alone if they fit.
    """
    if not photographs:
        return resize(picture.pixels(), size, size)
    height, width = picture.height, picture.width
    short = round(size * _RESIZE_TO_CROP)
    rows, columns = max(short, short * height // width), max(short, short * width // height)
    top, left = round((rows - size) / 2), round((columns - size) / 2)
    # The same as to resize the whole and crop it, without what is cropped away: of a strip that is most.
    down, across = height / rows, width / columns
    box = (left * across, top * down, (left + size) * across, (top + size) * down)
    # All pixels, never a reduced decoding: published weights were measured so.
    whole = Pillow.fromarray(picture.pixels())
    return np.asarray(whole.resize((size, size), Pillow.Resampling.BILINEAR, box=box))


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


def mirror(image: Image, rng: np.random.Generator, out: Image | None = None) -> Image:
    """Swaps left and right half the time; same shape, in `out` if it is given."""
    # Not a view with negative strides, which takes NumPy ten times as long to copy into a batch.
    return np.asarray(cv2.flip(image, 1, dst=out), np.uint8) if rng.random() < 0.5 else image


def random_resized_crop(
    picture: Picture, size: int, rng: np.random.Generator, out: Image | None = None
) -> Image:
    """Cuts out 8% to 100% of the area, at a width:height of 3:4 to 4:3, and resizes it to [size, size, 3].

    The crop is that of Szegedy et al. 2014 in torchvision's form. A crop of twice the size or more is decoded
    at half of its resolution, and so on (which averages); the rest of the way is bilinear. The result is in
    `out`, if that is given.
    """
    top, left, height, width = sample_crop(picture.height, picture.width, rng)
    reduce = next((r for r in (8, 4, 2) if min(height, width) >= r * size), 1)
    image = picture.pixels(reduce)
    down, across = image.shape[0] / picture.height, image.shape[1] / picture.width
    rows = slice(int(top * down), math.ceil((top + height) * down))
    columns = slice(int(left * across), math.ceil((left + width) * across))
    # Contiguous, as OpenCV wants it; a rotated photograph is not.
    crop = image[rows, columns]
    crop = crop if crop.strides[2] == 1 and crop.strides[1] == 3 else np.ascontiguousarray(crop)
    return np.asarray(cv2.resize(crop, (size, size), dst=out, interpolation=cv2.INTER_LINEAR), np.uint8)


def sample_crop(height: int, width: int, rng: np.random.Generator) -> tuple[int, int, int, int]:
    """Draws top, left, height and width of a crop: ten attempts, then the largest of an allowed ratio."""
    low, high = math.log(_CROP_RATIO[0]), math.log(_CROP_RATIO[1])
    for _ in range(_CROP_ATTEMPTS):
        area = height * width * rng.uniform(*_CROP_AREA)
        ratio = math.exp(rng.uniform(low, high))
        crop_width, crop_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < crop_width <= width and 0 < crop_height <= height:
            top = int(rng.integers(height - crop_height, endpoint=True))
            left = int(rng.integers(width - crop_width, endpoint=True))
            return top, left, crop_height, crop_width
    crop_width = min(width, max(1, round(height * _CROP_RATIO[1])))
    crop_height = min(height, max(1, round(width / _CROP_RATIO[0])))
    return (height - crop_height) // 2, (width - crop_width) // 2, crop_height, crop_width
