"""The loader's promise: what a batch holds is a function of seed and position, whatever computes it."""

import itertools
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from jaxdl.config import ImageDataConfig
from jaxdl.data.images.batches import ImageFeed, eval_batches, examples_per_epoch, train_batches
from jaxdl.data.images.types import Pixels, Source
from jaxdl.data.loader import round_up, updates_in
from jaxdl.errors import ConfigError, DataError

N = 13
SIZE = 8


def numbered(length=N, *, bad=None, same=False, augment="none"):
    """A source whose labels are the indices; example `bad` cannot be read; `same`: one image for all."""

    def read(index):
        if index == bad:
            raise DataError(f"picture-{index}.jpg is damaged")
        pixels = np.random.default_rng(0 if same else index).integers(256, size=(12, 10, 3), dtype=np.uint8)
        return {"image": Pixels(pixels), "label": index}

    return Source("numbered", "train", length, read, num_classes=length, augment=augment, photographs=True)


def config(batch=4, workers=0, augment="auto", **other):
    return ImageDataConfig(batch_size=batch, workers=workers, augment=augment, image_size=SIZE, **other)


def take(batches, count):
    try:
        return list(itertools.islice(batches, count))
    finally:
        batches.close()


def labels(batches):
    return np.concatenate([batch["label"] for batch in batches])


def assert_same(left, right):
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        assert one.keys() == other.keys()
        for key in one:
            np.testing.assert_array_equal(one[key], other[key])


def test_every_epoch_is_another_permutation_and_batches_straddle():
    order = labels(take(train_batches(numbered(), config(batch=4), seed=0), 13)).reshape(4, N)
    for epoch in order:
        assert sorted(epoch) == list(range(N))
    assert len({tuple(epoch) for epoch in order}) == 4
    assert tuple(order[0]) != tuple(range(N))


@pytest.mark.parametrize("batch", [1, 3, 16, 48, 100])
def test_batch_size_does_not_change_the_order(batch):
    expected = labels(take(train_batches(numbered(), config(batch=1), seed=7), 200))
    got = labels(take(train_batches(numbered(), config(batch=batch, workers=2), seed=7), -(-200 // batch)))
    np.testing.assert_array_equal(got[:200], expected)


def test_seeds_differ_and_are_not_each_others_epochs():
    first = labels(take(train_batches(numbered(), config(batch=N), seed=0), 20)).reshape(20, N)
    second = labels(take(train_batches(numbered(), config(batch=N), seed=1), 20)).reshape(20, N)
    assert not {tuple(epoch) for epoch in first} & {tuple(epoch) for epoch in second}


def test_one_example():
    batches = take(train_batches(numbered(1), config(batch=3, augment="crop_flip"), seed=0), 2)
    assert labels(batches).tolist() == [0] * 6
    assert len({image.tobytes() for batch in batches for image in batch["image"]}) > 3


def test_types():
    (batch,) = take(train_batches(numbered(), config(), seed=0), 1)
    assert batch.keys() == {"image", "label"}
    assert (batch["image"].dtype, batch["image"].shape) == (np.uint8, (4, SIZE, SIZE, 3))
    assert (batch["label"].dtype, batch["label"].shape) == (np.int32, (4,))


@pytest.mark.parametrize("workers", [0, 3])
@pytest.mark.parametrize("start", [1, 3, 4, 11])
def test_resume_is_bitwise_equal(start, workers):
    settings = config(batch=4, workers=workers, augment="crop_flip")
    whole = take(train_batches(numbered(), settings, seed=5), 15)
    resumed = take(train_batches(numbered(), settings, seed=5, start=start), 15 - start)
    assert_same(resumed, whole[start:])


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_workers_change_nothing(workers):
    expected = take(train_batches(numbered(), config(batch=6, augment="crop_flip"), seed=3), 8)
    got = take(train_batches(numbered(), config(batch=6, augment="crop_flip", workers=workers), seed=3), 8)
    assert_same(got, expected)


@pytest.mark.parametrize("augment", ["crop_flip", "shift_flip"])
def test_copies_of_one_image_are_augmented_differently(augment):
    source = numbered(8, same=True)

    def epochs(workers):
        settings = ImageDataConfig(batch_size=8, workers=workers, augment=augment, image_size=32)
        return [batch["image"] for batch in take(train_batches(source, settings, seed=1), 2)]

    first, second = epochs(0)
    assert len({image.tobytes() for image in first}) == 8
    assert len({image.tobytes() for image in second}) == 8
    assert not np.array_equal(np.sort(first, axis=0), np.sort(second, axis=0))
    np.testing.assert_array_equal(epochs(0), [first, second])
    np.testing.assert_array_equal(epochs(4), [first, second])


def test_augmentation_belongs_to_the_example_not_to_its_place():
    """An example's crop differs from epoch to epoch, and not with the batch size."""
    seen = {}
    for batch in (N, 1):
        batches = take(
            train_batches(numbered(), config(batch=batch, augment="crop_flip"), seed=2), 2 * N // batch
        )
        images = np.concatenate([b["image"] for b in batches])
        seen[batch] = {(p // N, label): images[p].tobytes() for p, label in enumerate(labels(batches))}
    assert seen[N] == seen[1]
    assert all(seen[N][0, label] != seen[N][1, label] for label in range(N))


def test_auto_takes_the_sources_augmentation():
    crops = take(train_batches(numbered(augment="crop_flip"), config(), seed=0), 3)
    assert_same(crops, take(train_batches(numbered(), config(augment="crop_flip"), seed=0), 3))
    assert not np.array_equal(
        crops[0]["image"], take(train_batches(numbered(), config(augment="none"), seed=0), 1)[0]["image"]
    )


@pytest.mark.parametrize("count", [2, 3])
def test_processes_share_each_batch(count):
    settings = config(batch=6, workers=2, augment="crop_flip")
    whole = take(train_batches(numbered(), settings, seed=0), 13)
    parts = [
        take(train_batches(numbered(), settings, seed=0, process_index=index, process_count=count), 13)
        for index in range(count)
    ]
    joined = [
        {key: np.concatenate([batch[key] for batch in batches]) for key in batches[0]}
        for batches in zip(*parts, strict=True)
    ]
    assert_same(joined, whole)
    first_epoch = labels(whole)[:N]
    assert sorted(first_epoch) == list(range(N))


def test_processes_that_cannot_share_the_batch():
    with pytest.raises(ConfigError, match=r"batch_size 6 .* 4 processes: use 8"):
        train_batches(numbered(), config(batch=6), seed=0, process_count=4)


@pytest.mark.parametrize("workers", [0, 2])
def test_unreadable_example_is_raised_at_its_batch(workers):
    order = labels(take(train_batches(numbered(), config(batch=1), seed=0), N))
    bad = int(order[9])
    batches = train_batches(numbered(bad=bad), config(batch=4, workers=workers), seed=0)
    np.testing.assert_array_equal(next(batches)["label"], order[:4])
    np.testing.assert_array_equal(next(batches)["label"], order[4:8])
    with pytest.raises(DataError) as caught:
        next(batches)
    assert str(caught.value) == f"picture-{bad}.jpg is damaged"
    with pytest.raises(DataError, match=rf"picture-{bad}"):
        list(eval_batches(numbered(bad=bad), config(workers=workers)))


def test_close_ends_the_threads():
    def threads():
        return [thread for thread in threading.enumerate() if thread.name.startswith("grain-prefetch")]

    def wait_for_none():
        deadline = time.monotonic() + 5
        while threads() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert threads() == []

    wait_for_none()
    batches = train_batches(numbered(), config(workers=3), seed=0)
    next(batches)
    assert threads()
    batches.close()
    batches.close()
    wait_for_none()
    assert next(batches, None) is None

    failing = train_batches(numbered(1, bad=0), config(workers=3), seed=0)
    with pytest.raises(DataError):
        next(failing)
    wait_for_none()

    list(eval_batches(numbered(), config(workers=3)))
    wait_for_none()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batch", [3, 7, 64])
@pytest.mark.parametrize("multiple_of", [1, 8])
def test_evaluation_counts_every_example_once(batch, multiple_of, workers):
    batches = eval_batches(
        numbered(), config(eval_batch_size=batch, workers=workers), multiple_of=multiple_of
    )
    shape = round_up(batch, multiple_of)
    assert (batches.batch_size, len(batches)) == (shape, -(-N // shape))
    for _ in range(2):
        seen = list(batches)
        assert len(seen) == len(batches)
        assert all(b["image"].shape == (shape, SIZE, SIZE, 3) and b["label"].shape == (shape,) for b in seen)
        mask = np.concatenate([b["mask"] for b in seen])
        assert mask.dtype == np.float32
        assert mask.tolist() == [1] * N + [0] * (len(mask) - N)
        assert labels(seen)[:N].tolist() == list(range(N))
        assert not np.concatenate([b["image"] for b in seen])[N:].any()


def test_evaluation_over_processes_and_threads():
    settings = config(eval_batch_size=5)
    whole = list(eval_batches(numbered(), settings, multiple_of=2))
    parts = [
        list(
            eval_batches(
                numbered(),
                config(eval_batch_size=5, workers=2),
                multiple_of=2,
                process_index=index,
                process_count=2,
            )
        )
        for index in range(2)
    ]
    joined = [{k: np.concatenate([a[k], b[k]]) for k in a} for a, b in zip(*parts, strict=True)]
    assert_same(joined, whole)


def test_updates():
    assert updates_in(1, 13, 4) == 4
    assert updates_in(4, 13, 4) == 13
    assert updates_in(1.1, 10, 11) == 1
    assert updates_in(0.5, 13, 4) == 2
    assert updates_in(90, 1_281_167, 256) == 450_411
    assert updates_in(0.001, 10, 64) == 1


def test_round_up():
    assert [round_up(value, 8) for value in (1, 8, 9)] == [8, 8, 16]


# What fills no batch


def test_remainder_dropped_is_another_part_in_each_epoch():
    settings = config(batch=4, remainder="drop")
    assert examples_per_epoch(settings, N) == 12
    order = labels(take(train_batches(numbered(), settings, seed=0), 9)).reshape(3, 12)
    whole = labels(take(train_batches(numbered(), config(batch=4), seed=0), 10))
    for epoch, part in enumerate(order):
        # The same permutation, but for its end.
        np.testing.assert_array_equal(part, whole[epoch * N : epoch * N + 12])
    assert len({next(iter(set(range(N)) - set(part))) for part in order.tolist()}) > 1
    resumed = take(train_batches(numbered(), settings, seed=0, start=4), 5)
    np.testing.assert_array_equal(labels(resumed), order.reshape(-1)[16:])


def test_nothing_to_drop_and_nothing_left():
    assert examples_per_epoch(config(batch=13, remainder="drop"), N) == N
    with pytest.raises(ConfigError, match=r"drop leaves nothing: 13 examples do not fill a batch of 14"):
        train_batches(numbered(), config(batch=14, remainder="drop"), seed=0)
    feed = ImageFeed(config(batch=4, remainder="drop"), numbered(), numbered())
    assert (feed.examples, feed.dropped, feed.eval_examples) == (12, 1, N)


# Images mixed in pairs


def mixed_config(batch, **other):
    return config(batch=batch, mixup=1.0, cutmix=1.0, **other)


@pytest.mark.parametrize("batch", [1, 3, 4, 48])
@pytest.mark.parametrize("workers", [0, 2])
def test_pairs_do_not_depend_on_the_batch(batch, workers):
    def columns(batch, workers):
        made = take(train_batches(numbered(), mixed_config(batch, workers=workers), seed=7), -(-96 // batch))
        return {key: np.concatenate([b[key] for b in made])[:96] for key in made[0]}

    expected, got = columns(2, 0), columns(batch, workers)
    assert expected.keys() == {"image", "label", "other", "share"}
    for key, column in expected.items():
        np.testing.assert_array_equal(got[key], column)
    # Each is the other of its other.
    np.testing.assert_array_equal(expected["other"].reshape(-1, 2)[:, ::-1].ravel(), expected["label"])
    assert (expected["share"].dtype, expected["other"].dtype) == (np.float32, np.int32)
    assert 0 <= expected["share"].min() < 0.2 < 0.8 < expected["share"].max() <= 1
    assert len(set(expected["share"].tolist())) > 40


def test_mixed_is_what_was_augmented_alone():
    """With a share of nearly 1 the image is the one without mixing, so its crop was the same."""
    plain = take(train_batches(numbered(), config(batch=8, augment="crop_flip"), seed=3), 12)
    settings = config(batch=8, augment="crop_flip", mixup=1.0)
    mixed = take(train_batches(numbered(), settings, seed=3), 12)
    near = 0
    for one, other in zip(plain, mixed, strict=True):
        np.testing.assert_array_equal(one["label"], other["label"])
        for row in np.flatnonzero(other["share"] > 0.99):
            assert np.abs(one["image"][row].astype(int) - other["image"][row]).max() <= 3
            near += 1
    assert near


@pytest.mark.parametrize("count", [2, 3])
def test_processes_share_mixed_batches(count):
    whole = take(train_batches(numbered(), mixed_config(6), seed=0), 9)
    parts = [
        take(train_batches(numbered(), mixed_config(6), seed=0, process_index=i, process_count=count), 9)
        for i in range(count)
    ]
    joined = [{k: np.concatenate([p[k] for p in step]) for k in step[0]} for step in zip(*parts, strict=True)]
    assert_same(joined, whole)


def test_every_augmentation_is_seeded_by_the_example():
    """All at once, on copies of one image, in threads: different in each place, and the same again."""
    settings = config(
        batch=8, workers=3, augment="crop_flip", policy="randaugment", color_jitter=0.4, erasing=0.5
    )
    first = take(train_batches(numbered(8, same=True), settings, seed=1), 2)
    assert len({image.tobytes() for batch in first for image in batch["image"]}) == 16
    again = replace(settings, workers=0)
    assert_same(take(train_batches(numbered(8, same=True), again, seed=1), 2), first)
    trivial = replace(settings, policy="trivialaugment")
    other = take(train_batches(numbered(8, same=True), trivial, seed=1), 2)
    assert not np.array_equal(other[0]["image"], first[0]["image"])
