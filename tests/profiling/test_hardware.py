"""Peaks of accelerators, by the names that JAX gives them."""

import jax
import jax.numpy as jnp
import pytest

from jaxdl.profiling.hardware import peak_flops

TERA = 1e12
BF16_PEAKS = {
    "NVIDIA H200": 989.4,
    "NVIDIA H100 80GB HBM3": 989.4,
    "NVIDIA H100 PCIe": 756.0,
    "NVIDIA A100-SXM4-80GB": 312.0,
    "NVIDIA A100-SXM4-40GB": 312.0,
    "NVIDIA A100 80GB PCIe": 312.0,
    "NVIDIA L40S": 362.0,
    "NVIDIA L4": 121.0,
    "Tesla V100-SXM2-32GB": 125.0,
    "Tesla T4": 65.0,
    "TPU v4": 275.0,
    "TPU v5 lite": 197.0,
    "TPU v5e": 197.0,
    "TPU v5": 459.0,
    "TPU v5p": 459.0,
    "TPU v6 lite": 918.0,
    "TPU v6e": 918.0,
}


@pytest.mark.parametrize("kind", BF16_PEAKS)
def test_a_known_device_has_the_peak_of_its_data_sheet(kind):
    assert peak_flops(kind, jnp.bfloat16) == pytest.approx(BF16_PEAKS[kind] * TERA)
    assert peak_flops(kind, jnp.float16) == peak_flops(kind, jnp.bfloat16)


@pytest.mark.parametrize(
    ("kind", "tf32", "fp32"),
    [
        ("NVIDIA H100 80GB HBM3", 494.7, 66.9),
        ("NVIDIA A100-SXM4-80GB", 156.0, 19.5),
        ("NVIDIA L40S", 183.0, 91.6),
        ("NVIDIA L4", 60.0, 30.3),
    ],
)
def test_float32_has_its_own_figure_and_another_where_factors_may_be_rounded(kind, tf32, fp32):
    assert peak_flops(kind, jnp.float32) == pytest.approx(fp32 * TERA)
    assert peak_flops(kind, jnp.float32, tf32=True) == pytest.approx(tf32 * TERA)
    assert peak_flops(kind, jnp.bfloat16, tf32=True) == peak_flops(kind, jnp.bfloat16)


@pytest.mark.parametrize(("kind", "fp32"), [("Tesla V100-SXM2-16GB", 15.7), ("Tesla T4", 8.1)])
def test_devices_without_tensorfloat32_multiply_float32_as_it_is(kind, fp32):
    for tf32 in (False, True):
        assert peak_flops(kind, jnp.float32, tf32=tf32) == pytest.approx(fp32 * TERA)


@pytest.mark.parametrize("kind", ["TPU v4", "TPU v5 lite", "TPU v6 lite"])
def test_a_tpu_has_one_figure_for_every_format(kind):
    for dtype in (jnp.float32, jnp.bfloat16):
        for tf32 in (False, True):
            assert peak_flops(kind, dtype, tf32=tf32) == pytest.approx(BF16_PEAKS[kind] * TERA)


@pytest.mark.parametrize("kind", ["cpu", "", "NVIDIA GeForce GT 710", "TPU v99", "Quadro NVIDIA A100"])
def test_of_an_unknown_device_nothing_is_claimed(kind):
    assert peak_flops(kind, jnp.bfloat16) is None


def test_of_this_cpu_nothing_is_claimed():
    assert peak_flops(jax.devices()[0].device_kind, jnp.float32) is None


@pytest.mark.parametrize(
    ("kind", "own"), [("NVIDIA L40", 181.0), ("NVIDIA H200 NVL", 835.5), ("TPU v5 something", 0)]
)
def test_a_name_that_only_begins_like_a_known_one_is_another_device(kind, own):
    found = peak_flops(kind, jnp.bfloat16)
    assert found is None or found == pytest.approx(own * TERA, rel=0.01)
