"""A picture as it is stored."""

import io

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image as Pillow

from jaxdl.data.images.decode import Encoded
from jaxdl.data.images.transforms import resize
from jaxdl.data.images.types import Picture
from jaxdl.errors import DataError

# What TFDS allows in a record; every other format is converted.
_STORABLE = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n")


def stored(picture: Picture, name: str, size: int | None, quality: int) -> bytes:
    """Encodes a picture as it is stored; it is decoded once in any case, so what is stored is sound.

    Args:
        picture: the picture.
        name: what an error message calls it.
        size: see `Plan`.
        quality: see `Plan`.

    Returns:
        With a size an upright JPEG file in colour (4:2:0). Without one the file as it is if it is JPEG or
        PNG, else a PNG file of its upright pixels.

    Raises:
        DataError: it is damaged, or too long for a JPEG file.
    """
    if size is not None:
        image = shrunk(picture, size)
        try:
            return bytes(
                simplejpeg.encode_jpeg(
                    np.ascontiguousarray(image), quality=quality, colorspace="RGB", colorsubsampling="420"
                )
            )
        except ValueError as error:
            raise DataError(f"{name} cannot be stored as JPEG ({error}): replace or remove it") from error
    image = picture.pixels()
    if isinstance(picture, Encoded) and picture.data.startswith(_STORABLE):
        return picture.data
    file = io.BytesIO()
    Pillow.fromarray(image).save(file, "PNG")
    return file.getvalue()


def shrunk(picture: Picture, size: int) -> NDArray[np.uint8]:
    """Returns the pixels, with the shorter side `size` long if it is longer: uint8 [height, width, 3]."""
    height, width = picture.height, picture.width
    short = min(height, width)
    if short <= size:
        return picture.pixels()
    # The decoder halves what it can; resizing does the rest, and never enlarges.
    reduce = next(factor for factor in (8, 4, 2, 1) if short // factor >= size)
    return resize(picture.pixels(reduce), round(height * size / short), round(width * size / short))
