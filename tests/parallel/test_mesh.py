import pytest

from jaxdl.config import ParallelConfig
from jaxdl.errors import ConfigError
from jaxdl.parallel.mesh import make_mesh


def test_all_devices_share_the_batch_by_default():
    assert dict(make_mesh(ParallelConfig(), batch_size=16, accumulate=1).shape) == {
        "node": 1,
        "pipeline": 1,
        "data": 8,
        "fsdp": 1,
        "tensor": 1,
    }


def test_fewer_devices_can_be_chosen():
    assert make_mesh(ParallelConfig(data=3), batch_size=12, accumulate=2).size == 3


def test_more_devices_than_there_are_is_refused():
    with pytest.raises(ConfigError, match=r"parallel\.data 9 = 9 devices .* there are 8 .*1 to 8; -1"):
        make_mesh(ParallelConfig(data=9), batch_size=72, accumulate=1)


@pytest.mark.parametrize(
    ("batch", "accumulate", "near"), [(12, 1, "8 or 16"), (3, 1, ": take 8$"), (40, 2, "32 or 48")]
)
def test_batch_that_does_not_divide_names_the_nearest_that_does(batch, accumulate, near):
    with pytest.raises(ConfigError, match=near):
        make_mesh(ParallelConfig(), batch_size=batch, accumulate=accumulate)
