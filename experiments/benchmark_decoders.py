"""Contenders that turn JPEG files into random crops of 224 x 224, as training does, on one core each.

Each is a function without arguments that handles the next file. All draw crops of 8% to 100% of the area at
3:4 to 4:3, resize them bilinearly and mirror half of them.
"""

import importlib.util
import io
import itertools
import multiprocessing
import multiprocessing.connection
import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

Next = Callable[[], Any]


def jaxdl(files: Sequence[bytes], size: int) -> Next:
    """The framework's own: simplejpeg, reduced where the crop allows it, and OpenCV."""
    from jaxdl.data.images.decode import Encoded
    from jaxdl.data.images.transforms import augmentation

    numbers = itertools.count()
    transform = augmentation("crop_flip", size, photographs=True)

    def run() -> Any:
        number = next(numbers)
        picture = Encoded(files[number % len(files)], "picture")
        return transform(picture, np.random.default_rng(number))

    return run


def pillow(files: Sequence[bytes], size: int) -> Next:
    """Pillow alone."""
    numbers = itertools.count()
    return lambda: np.asarray(_pillow(files, size, next(numbers)))


def pytorch(files: Sequence[bytes], size: int) -> Next:
    """What a PyTorch data set does: torchvision's transforms, or the same by Pillow where it is missing."""
    import torch

    torch.set_num_threads(1)
    numbers = itertools.count()
    if importlib.util.find_spec("torchvision") is None:
        return lambda: torch.from_numpy(np.array(_pillow(files, size, next(numbers)))).permute(2, 0, 1)
    from PIL import Image
    from torchvision.transforms import v2

    transform = v2.Compose([v2.RandomResizedCrop(size), v2.RandomHorizontalFlip(), v2.PILToTensor()])

    def run() -> Any:
        with Image.open(io.BytesIO(files[next(numbers) % len(files)])) as opened:
            return transform(opened.convert("RGB"))

    return run


def tf_data(files: Sequence[bytes], size: int) -> Next:
    """tf.data with TensorFlow's fused decoding and cropping."""
    os.environ["CUDA_VISIBLE_DEVICES"], os.environ["TF_CPP_MIN_LOG_LEVEL"] = "", "3"
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)

    def crop(data: Any) -> Any:
        begin, extent, _ = tf.image.sample_distorted_bounding_box(
            tf.image.extract_jpeg_shape(data),
            tf.zeros([0, 0, 4], tf.float32),
            area_range=(0.08, 1.0),
            aspect_ratio_range=(3 / 4, 4 / 3),
            max_attempts=10,
            use_image_if_no_bounding_boxes=True,
        )
        window = tf.stack([begin[0], begin[1], extent[0], extent[1]])
        image = tf.image.resize(tf.image.decode_and_crop_jpeg(data, window, channels=3), [size, size])
        return tf.cast(tf.image.random_flip_left_right(image), tf.uint8)

    options = tf.data.Options()
    options.threading.private_threadpool_size = 1
    # It would make images ahead while the others have their turns.
    options.autotune.enabled = False
    options.experimental_optimization.inject_prefetch = False
    examples = tf.data.Dataset.from_tensor_slices(list(files)).repeat().map(crop).with_options(options)
    iterator = iter(examples)
    return lambda: next(iterator)


CONTENDERS = {"jaxdl": jaxdl, "Pillow": pillow, "PyTorch": pytorch, "tf.data": tf_data}
NEEDED = {"jaxdl": "jaxdl", "Pillow": "PIL", "PyTorch": "torch", "tf.data": "tensorflow"}


def compare(files: Sequence[bytes], size: int, rounds: int, images: int) -> dict[str, list[float]]:
    """Lets the contenders that are installed take turns, each in a process of its own, on one and the same
    core.

    Args:
        files: contents of JPEG files.
        size: height and width of the crops.
        rounds: how often each has its turn.
        images: in a turn.

    Returns:
        Images per second of every turn, by contender.
    """
    names = [name for name in CONTENDERS if importlib.util.find_spec(NEEDED[name]) is not None]
    core = min(os.sched_getaffinity(0))
    rates: dict[str, list[float]] = {name: [] for name in names}
    with ExitStack() as stack:
        turns = {name: stack.enter_context(_process(name, files, size, core)) for name in names}
        for _ in range(rounds):
            for name, turn in turns.items():
                turn.send(images)
                rates[name].append(images / turn.recv())
    return rates


def medians(rates: dict[str, list[float]]) -> dict[str, float]:
    """The median of each contender's turns."""
    return {name: statistics.median(each) for name, each in rates.items()}


@contextmanager
def _process(name: str, files: Sequence[bytes], size: int, core: int) -> Any:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there, name, list(files), size, core), daemon=True)
    process.start()
    there.close()
    try:
        yield here
    finally:
        here.close()
        process.join()


def _serve(
    requests: multiprocessing.connection.Connection, name: str, files: list[bytes], size: int, core: int
) -> None:
    """Handles as many images as each request says, and answers with the seconds; ends with the requests."""
    os.sched_setaffinity(0, {core})
    run = CONTENDERS[name](files, size)
    for _ in range(50):
        run()
    while True:
        try:
            images = requests.recv()
        except EOFError:
            return
        began = time.perf_counter()
        for _ in range(images):
            run()
        requests.send(time.perf_counter() - began)


def _pillow(files: Sequence[bytes], size: int, number: int) -> Any:
    from PIL import Image

    from jaxdl.data.images.transforms import sample_crop

    rng = np.random.default_rng(number)
    with Image.open(io.BytesIO(files[number % len(files)])) as opened:
        image = opened.convert("RGB")
    top, left, height, width = sample_crop(image.height, image.width, rng)
    box = (left, top, left + width, top + height)
    image = image.resize((size, size), Image.Resampling.BILINEAR, box=box)
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if rng.random() < 0.5 else image
