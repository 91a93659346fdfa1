import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from jaxdl.data.images import transforms
from jaxdl.data.images.normalize import normalize
from jaxdl.data.images.types import Pixels


def rng(seed=0):
    return np.random.default_rng(seed)


def array(height, width, seed=0):
    return rng(seed).integers(256, size=(height, width, 3), dtype=np.uint8)


@pytest.mark.parametrize("name", ["none", "shift", "shift_flip", "crop_flip"])
@pytest.mark.parametrize("shape", [(8, 8), (28, 28), (50, 31), (1, 400), (300, 2), (1, 1)])
@pytest.mark.parametrize("photographs", [False, True])
def test_every_shape_becomes_the_wanted_one(name, shape, photographs):
    transform = transforms.augmentation(name, 8, photographs=photographs)
    for seed in range(5):
        result = transform(Pixels(array(*shape)), rng(seed))
        assert (result.shape, result.dtype) == ((8, 8, 3), np.uint8)


def test_fitting_image_is_left_alone():
    image = array(28, 28)
    assert transforms.fit(Pixels(image), 28, photographs=False) is image


def test_photographs_are_cropped_to_the_centre():
    """224 of 256, as in the ImageNet recipe: the outer parts of a wide image are not seen."""
    image = np.zeros((256, 512, 3), np.uint8)
    image[16:240, 144:368] = 200
    cropped = transforms.fit(Pixels(image), 224, photographs=True)
    assert (cropped == 200).all()
    assert transforms.fit(Pixels(image), 224, photographs=False).min() == 0


@pytest.mark.parametrize("shape", [(1, 60_000), (60_000, 1), (3, 20_000)])
def test_a_strip_takes_no_more_memory_than_its_centre(shape):
    """Resized as a whole it would have billions of pixels."""
    image = np.full((*shape, 3), 50, np.uint8)
    image[: shape[0] // 2, : shape[1] // 2] = 200
    fitted = transforms.fit(Pixels(image), 224, photographs=True)
    assert fitted.shape == (224, 224, 3)
    assert {50, 200} >= {int(value) for value in np.unique(fitted[:, [0, -1]][[0, -1]])}


@pytest.mark.parametrize("shape", [(375, 500), (500, 375), (64, 64), (240, 1000), (31, 17)])
def test_the_centre_is_that_of_the_whole_resized(shape):
    """Within rounding, as torchvision resizes a whole image and crops it."""
    image = array(*shape)
    height, width = shape
    rows, columns = max(256, 256 * height // width), max(256, 256 * width // height)
    whole = np.asarray(Image.fromarray(image).resize((columns, rows), Image.Resampling.BILINEAR))
    top, left = round((rows - 224) / 2), round((columns - 224) / 2)
    expected = whole[top : top + 224, left : left + 224].astype(int)
    difference = np.abs(transforms.fit(Pixels(image), 224, photographs=True) - expected)
    assert difference.max() <= 2
    assert difference.mean() < 0.1


def test_resize_does_not_alias():
    stripes = np.zeros((64, 64, 3), np.uint8)
    stripes[:, ::2] = 255
    small = transforms.resize(stripes, 8, 8)
    assert abs(small.astype(int) - 127).max() < 20


def test_shift_stays_in_its_limit_and_uses_all_of_it():
    image = np.full((8, 8, 3), 255, np.uint8)
    seen = set()
    for seed in range(200):
        rows, columns = transforms.shift(image, 1, rng(seed))[..., 0].astype(bool).nonzero()
        seen.add((rows.min(), rows.max(), columns.min(), columns.max()))
    ranges = [(0, 6), (0, 7), (1, 7)]
    assert seen == {(*vertical, *horizontal) for vertical in ranges for horizontal in ranges}


def test_digits_move_by_one_pixel():
    """An eighth of 8 pixels."""
    move = transforms.augmentation("shift", 8, photographs=False)
    image = np.full((8, 8, 3), 255, np.uint8)
    assert min(int((move(Pixels(image), rng(seed)) > 0).sum()) for seed in range(50)) == 7 * 7 * 3


def test_shift_zero_keeps_the_image():
    image = array(4, 4)
    np.testing.assert_array_equal(transforms.shift(image, 0, rng()), image)


def test_mirror_half_the_time():
    image = array(4, 4)
    mirrored = [np.array_equal(transforms.mirror(image, rng(seed)), image[:, ::-1]) for seed in range(400)]
    assert 160 < sum(mirrored) < 240


def test_crops_have_the_published_range():
    """Areas of 8% to 100% and ratios of 3:4 to 4:3, measured on an image that holds its own coordinates."""
    rows, columns = np.mgrid[:100, :100]
    image = np.stack([rows, columns, rows], axis=-1).astype(np.uint8)
    areas, ratios = [], []
    for seed in range(500):
        crop = transforms.random_resized_crop(Pixels(image), 50, rng(seed)).astype(float)
        height = (crop[-1, 0, 0] - crop[0, 0, 0]) * 50 / 49
        width = (crop[0, -1, 1] - crop[0, 0, 1]) * 50 / 49
        areas.append(height * width / 10_000)
        ratios.append(width / height)
    assert 0.06 < min(areas) < 0.12
    assert 0.85 < max(areas) < 1.1
    assert 0.4 < np.mean(areas) < 0.6
    assert 0.68 < min(ratios) < 0.8
    assert 1.25 < max(ratios) < 1.45


def test_normalize_inside_a_compiled_step():
    images = array(4, 4)[None]
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)
    result = jax.jit(lambda x: normalize(x, mean, std))(images)
    assert (result.shape, result.dtype) == ((1, 4, 4, 3), jnp.float32)
    np.testing.assert_allclose(result, (images / 255 - mean) / std, rtol=1e-5, atol=1e-6)
    assert normalize(jnp.asarray(images), mean, std, jnp.bfloat16).dtype == jnp.bfloat16
