"""Encoded images to RGB arrays, one way for all sources."""

import io
import struct

import numpy as np
from PIL import Image as Pillow

from jaxdl.data.types import Image
from jaxdl.errors import DataError

EXTENSIONS = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".ppm", ".tif", ".tiff"})

# Pillow would also try formats that start programs (EPS runs Ghostscript) or that nobody trains on.
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "PPM", "TIFF")

_ORIENTATION_TAG = 0x0112
_UPRIGHT = {
    2: Pillow.Transpose.FLIP_LEFT_RIGHT,
    3: Pillow.Transpose.ROTATE_180,
    4: Pillow.Transpose.FLIP_TOP_BOTTOM,
    5: Pillow.Transpose.TRANSPOSE,
    6: Pillow.Transpose.ROTATE_270,
    7: Pillow.Transpose.TRANSVERSE,
    8: Pillow.Transpose.ROTATE_90,
}


def decode_image(data: bytes, name: str) -> Image:
    """Decodes an image file by its content.

    The EXIF orientation is applied, of an animation the first frame is taken,
    and transparent pixels are laid on white (what they show in a browser; the
    colour stored under full transparency is arbitrary). CMYK, palette, 1-bit
    and greyscale images become RGB; 16-bit greyscale keeps its upper 8 bits.

    Args:
        data: the whole file.
        name: what an error message calls it.

    Returns:
        uint8 [height, width, 3].

    Raises:
        DataError: the content is empty, damaged or not an image of 8 or 16 bits a channel.
    """
    if not data:
        raise DataError(f"{name} is empty: replace or remove it")
    try:
        with Pillow.open(io.BytesIO(data), formats=_FORMATS) as opened:
            opened.load()
            return np.asarray(_rgb(_upright(opened)))
    except (
        Exception
    ) as error:  # damaged bytes make decoders raise anything: OSError, SyntaxError, struct.error, ...
        raise DataError(
            f"{name} cannot be decoded ({error or type(error).__name__}): replace or remove it"
        ) from error


def printable(name: object) -> str:
    """Returns a file name or path that any log accepts.

    File names are bytes: undecodable ones arrive as lone surrogates, which no
    encoder takes, and a line feed would break a log line; both are escaped.
    """
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(name))


def _upright(image: Pillow.Image) -> Pillow.Image:
    """Applies the EXIF orientation, where there is a readable one."""
    # Not ImageOps.exif_transpose: it writes the whole EXIF block anew, and fails if another entry is damaged.
    try:
        orientation = image.getexif().get(_ORIENTATION_TAG)
    except (OSError, SyntaxError, ValueError, LookupError, TypeError, struct.error):
        return image  # sound pixels with a damaged EXIF block, of which ImageNet has several
    turn = _UPRIGHT.get(orientation) if isinstance(orientation, int) else None
    return image if turn is None else image.transpose(turn)


def _rgb(image: Pillow.Image) -> Pillow.Image:
    """Converts any mode to RGB."""
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode.startswith("I;16"):
        return Pillow.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        raise ValueError(f"pixel mode {image.mode} has no known range, convert the file to 8 bits a channel")
    if image.has_transparency_data:
        colours = image.convert("RGBA")
        white = Pillow.new("RGBA", image.size, "white")
        return Pillow.alpha_composite(white, colours).convert("RGB")
    return image.convert("RGB")
