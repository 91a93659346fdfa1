"""Measures the way of images from a file to the device, stage by stage.

    python -m experiments.benchmark input [--rounds 7] [--batch_size 64] [--json FILE] [--data.* options]

Three tables: JPEG files to random crops on one core, against Pillow, PyTorch and tf.data, as far as they are
installed; the time of each stage; and what reaches the device end to end, with threads and with processes, of
what the cores could decode. The pictures are two photographs, as large as those of ImageNet are on average,
unless --data.name and --data.dir name a source of your own.
"""

import contextlib
import io
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments import benchmark_decoders
from jaxdl import commandline, environment
from jaxdl.commandline.programs import Parser, refuse_no_file, table, whole_number
from jaxdl.config import ImageConfig, ImageDataConfig
from jaxdl.errors import ConfigError

PROGRAM = "python -m experiments.benchmark input"
_MOST = 64  # files of a source that are looked at


def main(argv: list[str]) -> None:
    """Runs the benchmark and prints its tables."""
    more = "`python -m experiments.resnet50 --help` explains the --data.* options."
    parser = Parser(PROGRAM, __doc__, more)
    parser.add_argument("--rounds", type=whole_number(1), default=7, metavar="N",
                        help="turns of each contender (default: %(default)s)")  # fmt: skip
    parser.add_argument("--images", type=whole_number(1), default=300, metavar="N",
                        help="images in a turn (default: %(default)s)")  # fmt: skip
    parser.add_argument("--batch_size", type=whole_number(1), default=64, metavar="N",
                        help="images in a batch, end to end (default: %(default)s)")  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    arguments, options = parser.parse_known_args(argv)
    config = commandline.parse(PROGRAM, ["--train.steps", "1", *options], ImageConfig)
    if arguments.json is not None:
        refuse_no_file(arguments.json)
    environment.prepare(config.memory.allocator)
    files = photographs() if config.data.name == "digits" else source_files(config.data)
    size = config.data.image_size
    cores = len(os.sched_getaffinity(0))

    rates = benchmark_decoders.compare(files, size, arguments.rounds, arguments.images)
    decoded = benchmark_decoders.medians(rates)
    best = max(rate for name, rate in decoded.items() if name != "jaxdl")
    print(f"{len(files)} JPEG files to random crops of {size} x {size}, on one core\n")
    rows = []
    for name, rate in decoded.items():
        ratio, turns = decoded["jaxdl"] / rate, rates[name]
        rows.append([name, f"{rate:,.0f}", f"{ratio:.2f}", f"{min(turns):,.0f}-{max(turns):,.0f}"])
    print(table(["", "images/s", "jaxdl is x", "min-max"], rows))
    print(f"jaxdl is {decoded['jaxdl'] / best:.2f} x the best of the others\n", flush=True)

    stages = measure_stages(files, config.data)
    print("one stage after the other, in one thread\n")
    print(table(["stage", "us an image"], [[name, f"{1e6 * each:,.1f}"] for name, each in stages.items()]))
    print(flush=True)

    ways = {}
    for workers, processes in ((1, 0), (cores, 0), (1, cores)):
        data = replace(
            config.data, batch_size=arguments.batch_size, workers=workers, worker_processes=processes
        )
        ways[f"{processes or 1} processes x {workers} threads"] = end_to_end(files, data, arguments.rounds)
    print(f"from files to the device in batches of {arguments.batch_size}, on {cores} cores\n")
    possible = cores * decoded["jaxdl"]
    rows = [[name, f"{rate:,.0f}", f"{rate / possible:.0%}"] for name, rate in ways.items()]
    print(table(["", "images/s", "of cores x decoding"], rows))
    if arguments.json is not None:
        figures = {"decoders": rates, "stages": stages, "end_to_end": ways, "cores": cores}
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


def photographs() -> list[bytes]:
    """Two photographs that come with scikit-learn, as JPEG files of 500 x 375."""
    from PIL import Image
    from sklearn.datasets import load_sample_images

    files = []
    for pixels in load_sample_images().images:
        file = io.BytesIO()
        Image.fromarray(pixels).resize((500, 375), Image.Resampling.LANCZOS).save(file, "JPEG", quality=92)
        files.append(file.getvalue())
    return files


def source_files(config: ImageDataConfig) -> list[bytes]:
    """The first JPEG files of a source, evenly spread over it.

    Raises:
        ConfigError: it has none.
        DataError: one of them cannot be decoded.
    """
    from jaxdl.data.images.decode import Encoded
    from jaxdl.data.images.sources import open_source

    source = open_source(config, "train")
    pictures = (source[index]["image"] for index in range(0, len(source), max(1, len(source) // _MOST)))
    encoded = [picture for picture in pictures if isinstance(picture, Encoded)]
    for picture in encoded:
        picture.pixels()  # a damaged one is named here, and not by whichever contender meets it
    files = [picture.data for picture in encoded if picture.data.startswith(b"\xff\xd8\xff")]
    if not files:
        raise ConfigError(f"data.name {config.name} has no JPEG files, so there is nothing to decode")
    return files


def measure_stages(files: list[bytes], config: ImageDataConfig) -> dict[str, float]:
    """Times each stage by itself; returns the median seconds an image."""
    import jax
    import numpy as np

    from jaxdl.data.images import augmentations, mixing
    from jaxdl.data.images.decode import Encoded
    from jaxdl.data.images.normalize import normalize
    from jaxdl.data.images.transforms import fit, mirror, random_resized_crop
    from jaxdl.data.images.types import IMAGENET_MEAN, IMAGENET_STD, Pixels

    size, rng = config.image_size, np.random.default_rng(0)
    pictures = itertools.cycle([Pixels(Encoded(data, "picture").pixels()) for data in files])
    encoded = itertools.cycle([Encoded(data, "picture") for data in files])
    crops = np.stack([random_resized_crop(next(pictures), size, rng) for _ in range(config.batch_size)])
    crop, other = crops[0], crops[1 % len(crops)]
    on_device = jax.device_put(crops)
    normalized = jax.jit(lambda images: normalize(images, IMAGENET_MEAN, IMAGENET_STD))
    several = len(crops)

    with contextlib.ExitStack() as stack:
        path = Path(stack.enter_context(tempfile.TemporaryDirectory()), "picture.jpg")
        path.write_bytes(files[0])
        stages: dict[str, tuple[Callable[[], Any], int]] = {
            "read the file (in the page cache)": (path.read_bytes, 1),
            "decode, whole": (lambda: next(encoded).pixels(), 1),
            "decode at half of the resolution": (lambda: next(encoded).pixels(2), 1),
            "random crop, resized": (lambda: random_resized_crop(next(pictures), size, rng), 1),
            "mirror": (lambda: mirror(crop, rng), 1),
            "resize and centre crop of evaluation": (lambda: fit(next(pictures), size, photographs=True), 1),
            "data.color_jitter 0.4": (lambda: augmentations.color_jitter(crop, 0.4, rng), 1),
            "data.policy randaugment": (lambda: augmentations.rand_augment(crop, rng), 1),
            "data.policy trivialaugment": (lambda: augmentations.trivial_augment(crop, rng), 1),
            "data.erasing 1": (lambda: augmentations.random_erasing(crop, rng, probability=1.0), 1),
            "data.mixup 0.2": (lambda: mixing.mix(crop, other, rng, mixup=0.2, cutmix=0.0), 1),
            "data.cutmix 1": (lambda: mixing.mix(crop, other, rng, mixup=0.0, cutmix=1.0), 1),
            "gather a batch": (lambda: np.stack(list(crops)), several),
            "put a batch on the device": (lambda: jax.block_until_ready(jax.device_put(crops)), several),
            "normalise it there": (lambda: jax.block_until_ready(normalized(on_device)), several),
        }
        return {name: _seconds(run) / images for name, (run, images) in stages.items()}


def end_to_end(files: list[bytes], config: ImageDataConfig, rounds: int) -> float:
    """Measures what the loader brings to the device; returns the median of images per second."""
    import jax

    from jaxdl.data.images.batches import train_batches
    from jaxdl.data.images.decode import Encoded
    from jaxdl.data.images.types import Source

    source = Source(
        name="files",
        split="train",
        length=10_000,
        read=lambda index: {"image": Encoded(files[index % len(files)], "picture"), "label": 0},
        num_classes=1,
        augment="crop_flip",
        photographs=True,
    )
    batches, rates = 16, []
    with contextlib.closing(train_batches(source, config, seed=0)) as made:
        for _ in range(8):  # what was made ahead while nobody measured
            jax.block_until_ready(jax.device_put(next(made)))
        for _ in range(rounds):
            began = time.perf_counter()
            for batch in itertools.islice(made, batches):
                jax.block_until_ready(jax.device_put(batch))
            rates.append(batches * config.batch_size / (time.perf_counter() - began))
    return statistics.median(rates)


def _seconds(run: Callable[[], Any], runs: int = 60) -> float:
    times = []
    for _ in range(runs):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return statistics.median(times)
