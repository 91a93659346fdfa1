"""`experiments.resnet50` that notes which examples each process trains on, for a test to read.

    RECORD=DIRECTORY python -m tests.experiments.recording --data.name image_folder ...

Images are of one shade each, which is the example's id; a line of DIRECTORY/<process>.txt is an update's
number and the ids of this process's part of it.
"""

import os
from collections.abc import Generator, Iterator
from pathlib import Path

from experiments import resnet50
from jaxdl import commandline
from jaxdl.config import ImageConfig


def main() -> None:
    from jaxdl.data.images import batches

    plain = batches.ImageFeed.train_batches

    def recorded(feed: batches.ImageFeed, *, start: int, process_index: int, **options: int) -> Iterator:
        def notes() -> Generator:
            made = plain(feed, start=start, process_index=process_index, **options)
            try:
                with path.open("a") as file:
                    for number, batch in enumerate(made, start):
                        print(number, *batch["image"][:, 0, 0, 0], file=file, flush=True)
                        yield batch
            finally:
                made.close()

        path = Path(os.environ["RECORD"]) / f"{process_index}.txt"
        return notes()

    batches.ImageFeed.train_batches = recorded
    commandline.main(resnet50.run, program="recording", config=ImageConfig)


if __name__ == "__main__":
    main()
