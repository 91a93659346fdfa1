import numpy as np
import pytest

from jaxdl.data.images import mixing


def rng(seed=0):
    return np.random.default_rng(seed)


def picture(height, width, seed=0):
    return rng(seed).integers(256, size=(height, width, 3), dtype=np.uint8)


KINDS = {
    "mixup": {"mixup": 0.4, "cutmix": 0.0},
    "cutmix": {"mixup": 0.0, "cutmix": 1.0},
    "both": {"mixup": 0.4, "cutmix": 1.0},
}


class Fixed:
    """A generator whose share is given."""

    def __init__(self, share, seed=0):
        self.share, self.uniform, self.random = share, rng(seed).uniform, rng(seed).random

    def beta(self, a, b):
        assert a == b
        return self.share


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1, 1), (1, 40), (40, 1), (3, 4), (20, 31)])
@pytest.mark.parametrize("layout", ["plain", "mirrored", "read_only"])
def test_shape_is_kept_and_the_inputs_untouched(kind, shape, layout):
    image, other = picture(*shape), picture(*shape, seed=1)
    if layout == "mirrored":
        image, other = image[:, ::-1], other[::-1]
    elif layout == "read_only":
        image.flags.writeable = other.flags.writeable = False
    before = image.copy(), other.copy()
    for seed in range(20):
        mixed, share = mixing.mix(image, other, rng(seed), **KINDS[kind])
        assert (mixed.shape, mixed.dtype) == ((*shape, 3), np.uint8)
        assert type(share) is float
        assert 0 <= share <= 1
        assert not np.shares_memory(mixed, image)
        assert not np.shares_memory(mixed, other)
    np.testing.assert_array_equal(image, before[0])
    np.testing.assert_array_equal(other, before[1])


@pytest.mark.parametrize("kind", KINDS)
def test_generator_decides(kind):
    image, other = picture(16, 16), picture(16, 16, seed=1)
    results = [mixing.mix(image, other, rng(seed), **KINDS[kind]) for seed in range(20)]
    for seed, (mixed, share) in enumerate(results):
        again, same_share = mixing.mix(image.copy(), other.copy(), rng(seed), **KINDS[kind])
        np.testing.assert_array_equal(again, mixed)
        assert same_share == share
    assert len({share for _, share in results}) > 12


def test_mixup_is_the_weighted_mean_rounded_to_nearest():
    image, other = picture(16, 16), picture(16, 16, seed=1)
    for seed in range(30):
        mixed, share = mixing.mix(image, other, rng(seed), mixup=1.0, cutmix=0.0)
        exact = share * image.astype(float) + (1 - share) * other.astype(float)
        assert np.abs(mixed - exact).max() <= 0.5 + 1e-4


@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_all_of_one_image(kind, share):
    """A CutMix box of the whole image's size is still clipped unless its centre is the image's."""
    image, other = picture(16, 12), picture(16, 12, seed=1)
    mixed, got = mixing.mix(image, other, Fixed(share), **KINDS[kind])
    if share == 1:
        np.testing.assert_array_equal(mixed, image)
        assert got == 1
    elif kind == "mixup":
        np.testing.assert_array_equal(mixed, other)
        assert got == 0
    else:
        assert 0 < got < 0.75  # at least a quarter, from any corner


@pytest.mark.parametrize("shape", [(16, 12), (1, 40), (31, 50)])
def test_cutmix_share_is_the_counted_pixels(shape):
    image, other = np.zeros((*shape, 3), np.uint8), np.full((*shape, 3), 255, np.uint8)
    pixels = shape[0] * shape[1]
    for seed in range(200):
        mixed, share = mixing.mix(image, other, rng(seed), mixup=0.0, cutmix=1.0)
        kept = int((mixed == 0).all(axis=-1).sum())
        assert kept + int((mixed == 255).all(axis=-1).sum()) == pixels
        assert share == kept / pixels
        rows, columns, _ = mixed.nonzero()
        if rows.size:  # one box
            assert (mixed[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1] == 255).all()


def test_cutmix_takes_the_other_image_at_the_same_place():
    image, other = picture(20, 20), picture(20, 20, seed=1)
    for seed in range(20):
        mixed, share = mixing.mix(image, other, rng(seed), mixup=0.0, cutmix=1.0)
        of_other = (mixed == other).all(axis=-1)
        assert (of_other | (mixed == image).all(axis=-1)).all()
        assert 1 - share == pytest.approx(of_other.mean(), abs=1e-12)


def test_cutmix_box_has_the_sides_of_the_paper():
    """At a share of 0.75 half of each side; where the border clips it, a quarter at least."""
    image, other = np.zeros((40, 80, 3), np.uint8), np.full((40, 80, 3), 255, np.uint8)
    heights, widths, corners = [], [], np.zeros((40, 80), int)
    for seed in range(400):
        mixed, share = mixing.mix(image, other, Fixed(0.75, seed), mixup=0.0, cutmix=1.0)
        rows, columns, _ = mixed.nonzero()
        heights.append(rows.max() - rows.min() + 1)
        widths.append(columns.max() - columns.min() + 1)
        corners += mixed[..., 0] > 0
        assert share >= 0.75 - 0.03  # both sides may be rounded up
    assert 10 <= min(heights) <= 11
    assert 20 <= min(widths) <= 22
    assert 20 <= max(heights) <= 21
    assert 40 <= max(widths) <= 41
    assert np.mean(np.array(heights) >= 20) > 0.4  # half the centres are far enough from both borders
    assert corners.min() > 0


def test_mean_shares():
    """0.5 for mixup; for CutMix of side r that of 1 - (r - r^2 / 4)^2 over uniform r^2, 163 / 240."""
    image, other = picture(60, 60), picture(60, 60, seed=1)
    generator = rng()
    mixup = [mixing.mix(image, other, generator, mixup=1.0, cutmix=0.0)[1] for _ in range(3000)]
    cutmix = [mixing.mix(image, other, generator, mixup=0.0, cutmix=1.0)[1] for _ in range(6000)]
    assert abs(np.mean(mixup) - 0.5) < 0.02
    assert abs(np.mean(cutmix) - 163 / 240) < 0.015


def test_shares_have_the_shape_of_their_beta():
    """Uniform for 1; for 0.2 most are near 0 or 1, with the variance 1 / (4 * (2 * 0.2 + 1))."""
    image = picture(1, 1)
    generator = rng()
    uniform, extreme = (
        np.array([mixing.mix(image, image, generator, mixup=alpha, cutmix=0.0)[1] for _ in range(3000)])
        for alpha in (1.0, 0.2)
    )
    assert abs(uniform.var() - 1 / 12) < 0.005
    assert abs(extreme.var() - 1 / 5.6) < 0.01
    assert 0.17 < (np.abs(uniform - 0.5) > 0.4).mean() < 0.23
    assert (np.abs(extreme - 0.5) > 0.4).mean() > 0.55


def test_both_kinds_are_taken_equally_often():
    """Of black and white mixup makes one grey; large alphas keep the shares off 0 and 1."""
    image, other = np.zeros((32, 32, 3), np.uint8), np.full((32, 32, 3), 255, np.uint8)
    generator = rng()
    results = [mixing.mix(image, other, generator, mixup=200.0, cutmix=200.0)[0] for _ in range(2000)]
    greys = sum(len(np.unique(mixed)) == 1 for mixed in results)
    assert abs(greys / 2000 - 0.5) < 0.04


def test_each_kind_has_its_own_alpha():
    """mixup's shares vary as Beta(200, 200); CutMix at 1 has boxes of every size, the smallest too."""
    image, other = np.zeros((32, 32, 3), np.uint8), np.full((32, 32, 3), 255, np.uint8)
    generator = rng()
    greys, boxes = [], []
    for _ in range(2000):
        mixed, share = mixing.mix(image, other, generator, mixup=200.0, cutmix=1.0)
        (greys if 0 < mixed.max() < 255 else boxes).append(share)
    assert np.std(greys) == pytest.approx(0.5 / np.sqrt(401), rel=0.1)
    assert max(boxes) > 0.99
    assert np.std(boxes) > 0.15


def test_refusals():
    image = picture(4, 4)
    with pytest.raises(ValueError, match="mixup or cutmix"):
        mixing.mix(image, image, rng(), mixup=0.0, cutmix=0.0)
    with pytest.raises(ValueError, match=r"\(4, 4, 3\) and \(4, 5, 3\)"):
        mixing.mix(image, picture(4, 5), rng(), mixup=1.0, cutmix=1.0)
