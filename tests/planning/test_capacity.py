import pytest

from jaxdl.errors import ConfigError
from jaxdl.planning.capacity import available_memory, device_capacity, parse_bytes, show_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("16GiB", 16 * 2**30),
        ("16GB", 16 * 10**9),
        ("1.5 TiB", 3 * 2**39),
        (" 500mib ", 500 * 2**20),
        (".5kB", 500),
        ("123456", 123456),
        ("7B", 7),
    ],
)
def test_sizes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "16 G iB", "-1GiB", "0", "0.1B", "nan", "inf", "1e9", "16GiBs", "1,5GiB"]
)
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="is not a size above 0"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["16G", "16 g"])
def test_a_size_of_two_meanings_is_refused_with_both(text):
    with pytest.raises(ValueError, match="16GiB or 16GB"):
        parse_bytes(text)


def test_sizes_are_shown_in_the_largest_unit_below_them():
    shown = [show_bytes(size) for size in (0, 1023, 1024, 1.5 * 2**30, 3 * 2**41)]
    assert shown == ["0 B", "1023 B", "1.0 KiB", "1.5 GiB", "6.0 TiB"]


class Device:
    def __init__(self, platform, stats):
        self.platform, self.device_kind, self._stats = platform, platform, stats

    def memory_stats(self):
        return self._stats


def test_a_device_that_tells_is_believed_and_the_smallest_counts():
    devices = [Device("gpu", {"bytes_limit": limit}) for limit in (9, 7, 8)]
    assert device_capacity(devices)[0] == 7


def test_simulated_devices_share_the_memory():
    one, _ = device_capacity([Device("cpu", None)])
    eight, told = device_capacity([Device("cpu", None)] * 8)
    assert eight == pytest.approx(one / 8, rel=0.2)
    assert "8 simulated devices" in told


def test_a_device_that_does_not_tell_needs_to_be_told():
    with pytest.raises(ConfigError, match="--capacity"):
        device_capacity([Device("odd", None)])


def machine(tmp_path, groups, line, available=1000):
    """A /proc and a /sys/fs/cgroup with files by directory."""
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 9999 kB\nMemAvailable:   {available} kB\n")
    (proc / "self" / "cgroup").write_text(f"5:cpu:/elsewhere\n{line}\n")
    for directory, files in groups.items():
        (cgroups / directory).mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (cgroups / directory / name).write_text(text)
    return proc, cgroups


def two(limit, used, inactive):
    """Files of cgroup v2."""
    return {
        "memory.max": f"{limit}\n",
        "memory.current": f"{used}\n",
        "memory.stat": f"anon 5\ninactive_file {inactive}\n",
    }


def one(limit, used, inactive):
    """Files of cgroup v1."""
    return {
        "memory.limit_in_bytes": f"{limit}\n",
        "memory.usage_in_bytes": f"{used}\n",
        "memory.stat": f"inactive_file 1\ntotal_inactive_file {inactive}\n",
    }


@pytest.mark.parametrize(
    ("groups", "line", "left"),
    [
        ({}, "0::/", 1000 * 1024),
        ({"": two("max", 9, 0), "a/b": two("max", 9, 0)}, "0::/a/b", 1000 * 1024),
        ({"a": two(5000, 900, 100), "a/b": two("max", 9, 0)}, "0::/a/b", 4200),
        ({"a": two(5000, 900, 100), "a/b": two(3000, 900, 0)}, "0::/a/b", 2100),
        ({"memory": one(6000, 1000, 500)}, "4:memory:/docker/0123/not/seen/from/inside", 5500),
        ({"memory": one(2**63 - 4096, 10, 0), "memory/x": one(50, 80, 0)}, "4:cpu,memory:/x", 0),
    ],
)
def test_the_tightest_cgroup_around_the_process_counts(tmp_path, groups, line, left):
    assert available_memory(*machine(tmp_path, groups, line)) == left


def test_a_system_that_does_not_tell_is_reported(tmp_path):
    with pytest.raises(ConfigError, match="--capacity"):
        available_memory(tmp_path, tmp_path)
