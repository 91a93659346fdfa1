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
    ("settings", "message"),
    [
        ({"data": 4, "tensor": 3}, r"parallel\.data 4 x parallel\.tensor 3 = 12 devices .* there are 8 "),
        (
            {"tensor": 3},
            r"parallel\.tensor 3 = 3 does not divide the 8 devices .* 2 in its place leaves 2 idle",
        ),
        ({"node": 2, "pipeline": 2, "fsdp": 4}, "= 16 devices are asked for"),
    ],
)
def test_a_product_that_the_devices_do_not_have_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        make_mesh(ParallelConfig(**settings), batch_size=48, accumulate=1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data": 0}, "parallel.data 0 leaves no device"),
        ({"fsdp": -1}, "parallel.data and parallel.fsdp cannot both take the devices that are left"),
        ({"sequence": True}, "set that above 1"),
        ({"microbatches": 4}, "memory.accumulate divides a batch"),
        ({"repeats": 2, "pipeline": 2}, "circular only"),
        ({"cut": "1,x"}, "is not estimated, measured or a number of blocks"),
        ({"coordinator": "a:1"}, "set all three"),
        ({"coordinator": "a:1", "processes": 2, "process": 2}, "is not one of 2 processes"),
        ({"coordinator": "a:1", "processes": 2, "process": 1, "cluster": "auto"}, "one or the other"),
    ],
)
def test_what_does_not_go_together_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        ParallelConfig(**settings)


def test_neighbours_differ_in_the_last_axis():
    mesh = make_mesh(ParallelConfig(node=2, tensor=2), batch_size=16, accumulate=1)
    ids = [[device.id for device in row] for row in mesh.devices.reshape(4, 2)]
    assert ids == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize(
    ("batch", "accumulate", "near"), [(12, 1, "8 or 16"), (3, 1, ": take 8$"), (40, 2, "32 or 48")]
)
def test_batch_that_does_not_divide_names_the_nearest_that_does(batch, accumulate, near):
    with pytest.raises(ConfigError, match=near):
        make_mesh(ParallelConfig(), batch_size=batch, accumulate=accumulate)
