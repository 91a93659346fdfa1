import collections

import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageOps

from jaxdl.data.images import augmentations

FUNCTIONS = {
    "color_jitter": lambda image, rng: augmentations.color_jitter(image, 0.4, rng),
    "rand_augment": augmentations.rand_augment,
    "strongest": lambda image, rng: augmentations.rand_augment(image, rng, layers=3, magnitude=30),
    "trivial_augment": augmentations.trivial_augment,
    "random_erasing": lambda image, rng: augmentations.random_erasing(image, rng, probability=1.0),
}
NAMES = [
    *("identity", "shear_x", "shear_y", "translate_x", "translate_y", "rotate"),
    *("brightness", "color", "contrast", "sharpness"),
    *("posterize", "solarize", "autocontrast", "equalize"),
]


def rng(seed=0):
    return np.random.default_rng(seed)


def picture(height, width, seed=0, high=256):
    return rng(seed).integers(high, size=(height, width, 3), dtype=np.uint8)


def smooth_picture(size=64):
    """Values from 20 to 219 that change by a few from pixel to pixel."""
    small = Image.fromarray(picture(8, 8, high=200) + np.uint8(20))
    return np.array(small.resize((size, size), Image.Resampling.BILINEAR))


def distance(image, other):
    return int(np.abs(np.asarray(image).astype(int) - np.asarray(other).astype(int)).max())


def operate(name, image, value):
    return augmentations._operations(*image.shape[:2])[name].apply(image, value)


def watch(monkeypatch):
    """Has every operation do nothing but write its name and value into the list that is returned."""
    seen, table = [], augmentations._operations

    def watched(height, width):
        def watcher(name):
            return lambda image, value: seen.append((name, value)) or image

        return {name: row._replace(apply=watcher(name)) for name, row in table(height, width).items()}

    monkeypatch.setattr(augmentations, "_operations", watched)
    return seen


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("shape", [(1, 1), (1, 40), (40, 1), (2, 3), (20, 31)])
@pytest.mark.parametrize("layout", ["plain", "mirrored", "read_only"])
def test_shape_is_kept_and_the_input_untouched(name, shape, layout):
    image = picture(*shape)
    if layout == "mirrored":
        image = image[:, ::-1]
    elif layout == "read_only":
        image.flags.writeable = False
    before = image.copy()
    for seed in range(40):
        result = FUNCTIONS[name](image, rng(seed))
        assert (result.shape, result.dtype) == ((*shape, 3), np.uint8)
    np.testing.assert_array_equal(image, before)


@pytest.mark.parametrize("operation", NAMES)
@pytest.mark.parametrize("shape", [(1, 1), (1, 40), (40, 1), (2, 3), (20, 31)])
def test_every_operation_takes_every_shape(operation, shape):
    image = picture(*shape)
    before = image.copy()
    row = augmentations._operations(*shape)[operation]
    negative = {-row.rand, -row.trivial} if row.signed else set()
    for value in {row.weakest, row.rand, row.trivial} | negative:
        result = row.apply(image, value)
        assert (result.shape, result.dtype) == ((*shape, 3), np.uint8)
    np.testing.assert_array_equal(image, before)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_generator_decides(name):
    image = picture(16, 16)
    results = [FUNCTIONS[name](image, rng(seed)) for seed in range(20)]
    for seed, result in enumerate(results):
        np.testing.assert_array_equal(FUNCTIONS[name](image.copy(), rng(seed)), result)
    assert len({result.tobytes() for result in results}) > 12


def test_no_jitter_is_the_image():
    image = picture(16, 16)
    for seed in range(5):
        np.testing.assert_array_equal(augmentations.color_jitter(image, 0.0, rng(seed)), image)


def test_jitter_of_a_grey_square_is_its_brightness_factor():
    """Contrast and saturation keep it; the factors are 0.6 ... 1.4, and 0 ... 3 at strength 2."""
    image = np.full((4, 4, 3), 80, np.uint8)
    for strength, low, high in [(0.4, 48, 112), (2.0, 0, 240)]:
        results = [augmentations.color_jitter(image, strength, rng(seed)) for seed in range(400)]
        values = [int(result[0, 0, 0]) for result in results]
        assert low <= min(values) < low + 0.05 * (high - low)
        assert high - 0.05 * (high - low) < max(values) <= high
        assert abs(np.mean(values) - (low + high) / 2) < 0.06 * (high - low)


def test_jitter_changes_contrast_and_saturation_too():
    """The distance of two greys and that of two channels, relative to the brightness."""
    greys = np.repeat(np.array([[[80], [120]]], np.uint8), 3, axis=2)
    colours = np.full((2, 2, 3), (80, 110, 140), np.uint8)
    ratios, chroma = [], []
    for seed in range(200):
        dark, light = augmentations.color_jitter(greys, 0.4, rng(seed))[0, :, 0].astype(float)
        ratios.append((light - dark) / (light + dark))
        red, _, blue = augmentations.color_jitter(colours, 0.4, rng(seed))[0, 0].astype(float)
        chroma.append((blue - red) / (blue + red))
    assert 0.11 < min(ratios) < 0.15 < 0.25 < max(ratios) < 0.3  # 0.2 * 0.6 ... 0.2 * 1.4
    assert max(chroma) > 1.4 * min(chroma)


def test_jitter_comes_in_every_order(monkeypatch):
    orders, order = collections.Counter(), []

    def watcher(name):
        return lambda image, change: order.append(name) or image

    for name in ("_brightness", "_contrast", "_saturation"):
        monkeypatch.setattr(augmentations, name, watcher(name))
    for seed in range(600):
        order.clear()
        augmentations.color_jitter(picture(1, 1), 0.4, rng(seed))
        orders[tuple(order)] += 1
    assert len(orders) == 6
    assert min(orders.values()) > 60


@pytest.mark.parametrize(
    ("name", "enhancer"),
    [
        ("brightness", ImageEnhance.Brightness),
        ("color", ImageEnhance.Color),
        ("contrast", ImageEnhance.Contrast),
        ("sharpness", ImageEnhance.Sharpness),
    ],
)
@pytest.mark.parametrize("change", [-1.0, -0.9, -0.3, 0.0, 0.5, 0.99])
def test_enhancements_are_pillows(name, enhancer, change):
    """Within 2: Pillow truncates where this rounds, and rounds the grey by another rule."""
    image = smooth_picture()
    expected = enhancer(Image.fromarray(image)).enhance(1 + change)
    assert distance(operate(name, image, change), expected) <= 2


@pytest.mark.parametrize("bits", [8, 7, 4, 2])
def test_posterize_is_pillows(bits):
    image = picture(16, 16)
    expected = ImageOps.posterize(Image.fromarray(image), bits)
    np.testing.assert_array_equal(operate("posterize", image, bits), expected)


@pytest.mark.parametrize("threshold", [255, 178.5, 100, 0])
def test_solarize_is_pillows(threshold):
    image = np.arange(256, dtype=np.uint8).repeat(3).reshape(16, 16, 3)
    expected = ImageOps.solarize(Image.fromarray(image), threshold)
    np.testing.assert_array_equal(operate("solarize", image, threshold), expected)


def test_autocontrast_and_equalize_are_pillows():
    image = smooth_picture()
    for name in ("autocontrast", "equalize"):
        expected = getattr(ImageOps, name)(Image.fromarray(image))
        np.testing.assert_array_equal(operate(name, image, 0.0), expected)
    stretched = operate("autocontrast", image, 0.0)
    assert (stretched.min(axis=(0, 1)) == 0).all()
    assert (stretched.max(axis=(0, 1)) >= 254).all()  # rounded down


@pytest.mark.parametrize("pixels", [-5, -1, 0, 1, 5, 5.9, -5.9])
def test_translation_is_by_whole_pixels(pixels):
    image, moved = picture(12, 9), abs(int(pixels))
    right = np.zeros_like(image)
    down = np.zeros_like(image)
    if pixels >= 0:
        right[:, moved:] = image[:, : 9 - moved]
        down[moved:] = image[: 12 - moved]
    else:
        right[:, : 9 - moved] = image[:, moved:]
        down[: 12 - moved] = image[moved:]
    np.testing.assert_array_equal(operate("translate_x", image, pixels), right)
    np.testing.assert_array_equal(operate("translate_y", image, pixels), down)


def test_shear_of_one_moves_each_row_by_its_number():
    image = picture(6, 8)
    expected = np.zeros_like(image)
    for row in range(6):
        expected[row, row:] = image[row, : 8 - row]
    np.testing.assert_array_equal(operate("shear_x", image, 1.0), expected)
    turned = operate("shear_y", image.transpose(1, 0, 2), 1.0)
    np.testing.assert_array_equal(turned.transpose(1, 0, 2), expected)


def test_rotation_is_counter_clockwise_about_the_centre():
    image = smooth_picture(33)
    assert distance(operate("rotate", image, 90.0), np.rot90(image)) <= 1
    for degrees in (-135.0, -30.0, 17.0, 135.0):
        expected = Image.fromarray(image).rotate(degrees, Image.Resampling.BILINEAR)
        inside = np.hypot(*np.mgrid[-16:17, -16:17]) < 15  # Pillow treats the border otherwise
        assert distance(operate("rotate", image, degrees)[inside], np.asarray(expected)[inside]) <= 3
    assert operate("rotate", image, 45.0)[0, 0].max() == 0


def test_policies_have_the_published_operations():
    assert list(augmentations._operations(8, 8)) == NAMES


def test_magnitude_zero_keeps_the_image():
    """Without 255, which solarize inverts, and with a flat histogram for autocontrast and equalize."""
    image = picture(16, 16, high=255)
    for name, row in augmentations._operations(16, 16).items():
        result = augmentations._apply(row, image, row.rand, 0, rng())
        if name not in ("autocontrast", "equalize"):
            np.testing.assert_array_equal(result, image, err_msg=name)
    flat = np.stack([rng(seed).permutation(256) for seed in range(3)], axis=-1)
    flat = flat.reshape(16, 16, 3).astype(np.uint8)
    for name in ("autocontrast", "equalize"):
        np.testing.assert_array_equal(operate(name, flat, 0.0), flat)


def test_no_layers_keep_the_image():
    image = picture(4, 4)
    np.testing.assert_array_equal(augmentations.rand_augment(image, rng(), layers=0), image)


@pytest.mark.parametrize("layers", [1, 2, 5])
def test_rand_augment_draws_all_operations_equally(monkeypatch, layers):
    seen = watch(monkeypatch)
    generator = rng()
    for _ in range(7000 // layers):
        augmentations.rand_augment(picture(1, 1), generator, layers=layers)
    counts = collections.Counter(name for name, _ in seen)
    assert sum(counts.values()) == 7000
    assert sorted(counts) == sorted(NAMES)
    assert min(counts.values()) > 400
    assert max(counts.values()) < 600


def test_rand_augment_has_the_published_values(monkeypatch):
    """By hand for an image of 331 x 662 at the strongest and at the standard magnitude."""
    seen = watch(monkeypatch)
    nine = {"rotate": 9.0, "translate_x": 90.0, "shear_y": 0.09, "color": 0.27, "solarize": 178.5}
    most = {
        "shear_x": 0.3,
        "shear_y": 0.3,
        "translate_x": 300.0,
        "translate_y": 150.0,
        "rotate": 30.0,
        **dict.fromkeys(("brightness", "color", "contrast", "sharpness"), 0.9),
        "posterize": 4.0,
        "solarize": 0.0,
    }
    for magnitude, expected in [(9, nine), (30, most)]:
        seen.clear()
        generator = rng()
        for _ in range(400):
            augmentations.rand_augment(np.zeros((331, 662, 3), np.uint8), generator, magnitude=magnitude)
        for name, value in expected.items():
            values = sorted({round(v, 9) for n, v in seen if n == name})
            signs = [value] if name in ("posterize", "solarize") else [-value, value]
            np.testing.assert_allclose(values, signs, err_msg=name)


def test_trivial_augment_draws_operations_and_strengths_equally(monkeypatch):
    """31 strengths of either sign, up to those of the wide ranges; translation is in pixels."""
    seen = watch(monkeypatch)
    generator = rng()
    for _ in range(14_000):
        augmentations.trivial_augment(picture(1, 1), generator)
    counts = collections.Counter(name for name, _ in seen)
    assert sorted(counts) == sorted(NAMES)
    assert min(counts.values()) > 850
    assert max(counts.values()) < 1150
    strongest = {
        "shear_x": 0.99,
        "shear_y": 0.99,
        "translate_x": 32.0,
        "translate_y": 32.0,
        "rotate": 135.0,
        **dict.fromkeys(("brightness", "color", "contrast", "sharpness"), 0.99),
    }
    for name, most in strongest.items():
        values = np.array([value for n, value in seen if n == name])
        steps = np.unique(np.round(values * 30 / most, 6))
        np.testing.assert_allclose(steps, np.arange(-30, 31))
        positive = (values > 0).sum() / (values != 0).sum()
        assert abs(positive - 0.5) < 0.08
        assert abs(np.abs(values / most).mean() - 0.5) < 0.04
    assert {round(value) for name, value in seen if name == "posterize"} == set(range(2, 9))
    np.testing.assert_allclose(
        sorted({value for name, value in seen if name == "solarize"}), np.linspace(0, 255, 31), atol=1e-9
    )


def test_trivial_augment_moves_by_at_most_32_pixels():
    """On an image of one bright column, found again after every translation to the side."""
    image = np.zeros((3, 101, 3), np.uint8)
    image[:, 50] = 255
    row = augmentations._operations(3, 101)["translate_x"]
    found = {
        int(augmentations._apply(row, image, row.trivial, 30, rng(seed))[0, :, 0].argmax())
        for seed in range(20)
    }
    assert found == {50 - 32, 50 + 32}


def erased_box(image, result):
    """Height and width of the box in which a result differs."""
    rows, columns, _ = (result != image).nonzero()
    return rows.max() - rows.min() + 1, columns.max() - columns.min() + 1


def test_erased_rectangles_have_the_published_range():
    image = np.zeros((60, 90, 3), np.uint8)
    areas, ratios = [], []
    for seed in range(1500):
        result = augmentations.random_erasing(image, rng(seed), probability=1.0)
        height, width = erased_box(image, result)
        assert (result != image).any(axis=-1).sum() >= 0.98 * height * width  # filled, and one box
        areas.append(height * width / (60 * 90))
        ratios.append(height / width)
    assert 0.018 < min(areas) < 0.03
    assert 0.3 < max(areas) < 0.34
    assert 0.155 < np.mean(areas) < 0.19
    assert 0.27 < min(ratios) < 0.36  # 0.3, of whole pixels
    assert 2.2 < max(ratios) < 3.5
    low = np.mean(np.array(ratios) < 1)
    assert abs(low - 0.5) < 0.08  # uniform in the logarithm


def test_erasing_fills_with_uniform_noise_and_reaches_every_corner():
    image = np.full((50, 50, 3), 7, np.uint8)
    changed = np.zeros((50, 50), int)
    noise = []
    for seed in range(600):
        result = augmentations.random_erasing(image, rng(seed), probability=1.0)
        changed += (result != image).any(axis=-1)
        assert (result[..., 0] != result[..., 1]).any()
        noise.append(result[result != image])
    assert changed.min() > 0
    values = np.bincount(np.concatenate(noise), minlength=256)
    assert values[7] == 0
    others = np.delete(values, 7)
    assert others.min() > 0.85 * others.mean()
    assert others.max() < 1.15 * others.mean()


@pytest.mark.parametrize("probability", [0.0, 0.25, 1.0])
def test_erasing_has_its_probability(probability):
    image = np.zeros((20, 20, 3), np.uint8)
    results = [
        augmentations.random_erasing(image, rng(seed), probability=probability) for seed in range(1000)
    ]
    share = np.mean([result.any() for result in results])
    assert abs(share - probability) <= (0.05 if 0 < probability < 1 else 0)


@pytest.mark.parametrize("shape", [(1, 1), (1, 40), (40, 1)])
def test_image_one_pixel_wide_is_never_erased(shape):
    image = picture(*shape)
    for seed in range(50):
        result = augmentations.random_erasing(image, rng(seed), probability=1.0)
        np.testing.assert_array_equal(result, image)
