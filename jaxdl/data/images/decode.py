"""Encoded images to RGB arrays, one way for all sources, for training and for evaluation.

- The content decides, not the name: JPEG, PNG, WebP, BMP, GIF, PPM and TIFF.
- The EXIF orientation is applied.
- Of an animation or a file of several pages the first is taken.
- Transparent pixels are laid on white, which is what they show in a browser; the colour stored under full
  transparency is arbitrary.
- CMYK, palette, 1-bit and grey images become RGB; of 16 bits the upper 8 are kept. Colour profiles are
  ignored.
- Damage that leaves a decoder without pixels is an error; an EXIF block that cannot be read is not, nor are
  the slips in a JPEG that libjpeg recovers from, since ImageNet has both.
"""

import io
import math
import struct
from functools import cached_property

import numpy as np
import simplejpeg
from PIL import Image as Pillow
from PIL import UnidentifiedImageError

from jaxdl.data.images.types import Image, Pixels
from jaxdl.errors import DataError

EXTENSIONS = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".ppm", ".tif", ".tiff"})

# Pillow's own limit, which it applies to some formats as a warning, to others earlier; `_decoded` has ours.
Pillow.MAX_IMAGE_PIXELS = None

# Pillow would also try formats that start programs (EPS runs Ghostscript) or that nobody trains on.
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "PPM", "TIFF")

_MOST_PIXELS = 2**28  # of an image: 805 MB when it is decoded

_ORIENTATION_TAG = 0x0112
_APP1 = 0xE1  # the segments of a JPEG that may hold it, as EXIF or XMP
_START_OF_SCAN = 0xDA


class Encoded:
    """An image file, decoded when its pixels are asked for; see `jaxdl.data.images.types.Picture`.

    JPEG is decoded by libjpeg-turbo, all else by Pillow.

    Args:
        data: the whole file.
        name: what an error message calls it.

    Raises:
        DataError: (by its attributes and methods) the content is empty, damaged or not an image of 8 or 16
            bits a channel.
    """

    def __init__(self, data: bytes, name: str) -> None:
        self.data, self.name = data, name

    @property
    def height(self) -> int:
        """Rows of the upright image."""
        return self._shape[0]

    @property
    def width(self) -> int:
        """Columns of the upright image."""
        return self._shape[1]

    def pixels(self, reduce: int = 1) -> Image:
        """Decodes the image; see `Picture.pixels`."""
        if self._jpeg is None:
            return Pixels(self._decoded).pixels(reduce)
        height, width, orientation = self._jpeg
        try:
            image = simplejpeg.decode_jpeg(
                self.data, min_height=math.ceil(height / reduce), min_width=math.ceil(width / reduce)
            )
        except ValueError:
            # Pillow is the judge: it takes what libjpeg only warns of.
            return Pixels(self._decoded).pixels(reduce)
        return _turned(image, orientation)

    @cached_property
    def _shape(self) -> tuple[int, ...]:
        if self._jpeg is None:
            return self._decoded.shape[:2]
        height, width, orientation = self._jpeg
        return (width, height) if orientation > 4 else (height, width)

    @cached_property
    def _jpeg(self) -> tuple[int, int, int] | None:
        """Height and width as stored, and orientation; None where Pillow is to decode the file."""
        if not self.data.startswith(b"\xff\xd8\xff"):
            return None
        try:
            height, width, colours, _ = simplejpeg.decode_jpeg_header(self.data)
        except ValueError:
            return None
        if colours in ("CMYK", "YCCK") or height * width > _MOST_PIXELS:
            return None
        orientation = 1
        if _has_app1(self.data):
            with self._opened() as opened:
                orientation = _orientation(opened)
        return height, width, orientation

    @cached_property
    def _decoded(self) -> Image:
        """All pixels, by Pillow."""
        with self._opened() as opened:
            try:
                if opened.width * opened.height > _MOST_PIXELS:
                    raise ValueError(
                        f"{opened.width} x {opened.height} pixels are more than {_MOST_PIXELS:,}"
                    )
                opened.load()
                # The orientation first: the conversion to RGB loses it.
                orientation = _orientation(opened)
                return _turned(np.asarray(_rgb(opened)), orientation)
            except (
                Exception
            ) as error:  # damaged bytes make decoders raise anything: SyntaxError, struct.error
                raise self._refusal(error) from error

    def _opened(self) -> Pillow.Image:
        if not self.data:
            raise DataError(f"{self.name} is empty: replace or remove it")
        try:
            return Pillow.open(io.BytesIO(self.data), formats=_FORMATS)
        except Exception as error:
            raise self._refusal(error) from error

    def _refusal(self, error: Exception) -> DataError:
        reason = str(error) or type(error).__name__
        if isinstance(error, UnidentifiedImageError):  # whose text speaks of memory addresses
            reason = f"its content is none of {', '.join(_FORMATS)}"
        return DataError(f"{self.name} cannot be decoded ({reason}): replace or remove it")


def _has_app1(jpeg: bytes) -> bool:
    """Whether one of the segments before the pixels may say how the image is to be turned."""
    place = 2
    while jpeg[place : place + 1] == b"\xff" and len(jpeg) > place + 4:
        marker = jpeg[place + 1]
        if marker in (_APP1, _START_OF_SCAN):
            return marker == _APP1
        place += 2 + int.from_bytes(jpeg[place + 2 : place + 4])
    return True  # an odd file, or one that ends here: let Pillow look


def _orientation(image: Pillow.Image) -> int:
    """The EXIF orientation, 1 to 8; 1 (upright) where there is none or none that can be read."""
    # Not ImageOps.exif_transpose: it writes the whole EXIF block anew, and fails if another entry is damaged.
    try:
        orientation = image.getexif().get(_ORIENTATION_TAG)
    except (OSError, SyntaxError, ValueError, LookupError, TypeError, struct.error):
        return 1  # sound pixels with a damaged EXIF block, of which ImageNet has several
    return orientation if isinstance(orientation, int) and 1 <= orientation <= 8 else 1


def _turned(image: Image, orientation: int) -> Image:
    """Turns an image as stored so that it stands upright."""
    if orientation > 4:
        image = image.transpose(1, 0, 2)
    down, left = orientation in (3, 4, 7, 8), orientation in (2, 3, 6, 7)
    return image[:: -1 if down else 1, :: -1 if left else 1]


def _rgb(image: Pillow.Image) -> Pillow.Image:
    """Converts any mode to RGB."""
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    # Portable greymaps of 16 bits come in the mode of 32.
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM"):
        return Pillow.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        raise ValueError(f"pixel mode {image.mode} has no known range, convert the file to 8 bits a channel")
    if image.has_transparency_data:
        colours = image.convert("RGBA")
        white = Pillow.new("RGBA", image.size, "white")
        return Pillow.alpha_composite(white, colours).convert("RGB")
    return image.convert("RGB")
