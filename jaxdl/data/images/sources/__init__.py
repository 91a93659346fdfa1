"""Where examples come from: one function for each `data.name`."""

from collections.abc import Callable

from jaxdl.config import ImageDataConfig
from jaxdl.data.files import printable
from jaxdl.data.images.sources.arrays import open_arrays, open_digits, open_synthetic
from jaxdl.data.images.sources.folder import open_image_folder
from jaxdl.data.images.sources.idx import open_fashion_mnist
from jaxdl.data.images.sources.imagenet import open_imagenet
from jaxdl.data.images.sources.records import open_tfds
from jaxdl.data.images.types import Source
from jaxdl.data.types import Split
from jaxdl.errors import DataError

SOURCES: dict[str, Callable[[ImageDataConfig, Split], Source]] = {
    "arrays": open_arrays,
    "digits": open_digits,
    "fashion_mnist": open_fashion_mnist,
    "image_folder": open_image_folder,
    "imagenet": open_imagenet,
    "synthetic": open_synthetic,
    "tfds": open_tfds,
}


def open_source(config: ImageDataConfig, split: Split) -> Source:
    """Opens the examples that `config` names.

    Args:
        config: the `data` section.
        split: `train`, or `eval` for the examples held out.

    Returns:
        The source; it has at least one example.

    Raises:
        ConfigError: there is no such TFDS split.
        DataError: the data is missing or is not what it claims to be.
    """
    try:
        return SOURCES[config.name](config, split)
    except (OSError, RuntimeError) as error:  # an impossible path: too long, no such user, not permitted
        raise DataError(f"data.dir {config.dir}: {printable(str(error))}") from error
