"""How many examples may be skipped."""

import pytest

from jaxdl.errors import DataError
from jaxdl.train.skips import Skips


def skips(share, examples=100, batch_size=10, total=0):
    return Skips(share=share, examples=examples, batch_size=batch_size, total=total)


@pytest.mark.parametrize(("share", "allowed"), [(0.29, 29), (0.57, 57), (0.05, 5), (0.0, 0)])
def test_exactly_the_share_is_allowed(share, allowed):
    skips(share, total=allowed).check(10)
    skips(share).check_evaluation(100 - allowed, 100)
    with pytest.raises(
        DataError, match=rf"{allowed + 1} examples could not be read in 1 epochs of 100, .* {share:g} of"
    ):
        skips(share, total=allowed + 1).check(10)
    with pytest.raises(DataError, match=rf"{allowed + 1} of 100 examples to evaluate on"):
        skips(share).check_evaluation(99 - allowed, 100)


def test_each_epoch_meets_a_bad_example_again():
    counter = skips(0.02)
    for step in range(1, 31):
        metrics = {"skipped": 2 if step % 10 == 1 else 0, "loss": 1.0}
        counter.hear(metrics)
        counter.check(step)
        assert metrics == {"skipped_examples": 2 * -(-step // 10), "loss": 1.0}


def test_nothing_is_counted_where_batches_do_not_say():
    metrics = {"loss": 1.0}
    skips(0.1).hear(metrics)
    assert metrics == {"loss": 1.0}
