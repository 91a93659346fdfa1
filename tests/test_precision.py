import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdl.config import POLICY_NAMES, PrecisionConfig
from jaxdl.precision import POLICIES, Policy, init_loss_scale, next_loss_scale, parse_policy


def test_every_name_of_the_configuration_is_a_policy():
    assert set(POLICIES) == set(POLICY_NAMES)


def test_a_custom_policy_names_what_differs_from_float32():
    policy = parse_policy("params=float32,compute=bfloat16")
    assert policy == Policy(compute=jnp.dtype("bfloat16"))
    assert not policy.needs_loss_scale


@pytest.mark.parametrize(
    ("policy", "words"),
    [("fp8", "fp32, tf32"), ("params=int8", "float32, bfloat16"), ("weights=float32", "compute=")],
)
def test_unknown_policies_are_refused(policy, words):
    with pytest.raises(ValueError, match=words):
        PrecisionConfig(policy=policy)


@pytest.mark.parametrize("scale", ["0", "-1", "nan", "inf", "big"])
def test_impossible_scales_are_refused(scale):
    with pytest.raises(ValueError, match="loss_scale"):
        PrecisionConfig(loss_scale=scale)


def test_only_float16_is_scaled_by_default():
    scaled = {name for name in POLICY_NAMES if init_loss_scale(PrecisionConfig(policy=name)) is not None}
    assert scaled == {"fp16", "O1", "O2", "O3"}


class Reference:
    """Megatron-LM's rule, written out."""

    def __init__(self, config):
        self.config, self.scale = config, config.scale_start
        self.growth, self.hysteresis = 0, config.scale_hysteresis

    def update(self, finite):
        if finite:
            self.growth += 1
            if self.growth == self.config.scale_window:
                self.growth, self.hysteresis = 0, self.config.scale_hysteresis
                self.scale = min(self.scale * self.config.scale_growth, self.config.scale_maximum)
        else:
            self.growth = 0
            self.hysteresis -= 1
            if self.hysteresis <= 0:
                self.scale = max(self.scale * self.config.scale_backoff, self.config.scale_minimum)


@pytest.mark.parametrize("hysteresis", [1, 2, 3])
def test_dynamic_scale_follows_the_published_rule(hysteresis):
    config = PrecisionConfig(
        policy="fp16", scale_start=64, scale_window=3, scale_maximum=256, scale_hysteresis=hysteresis
    )
    update = jax.jit(lambda state, finite: next_loss_scale(state, finite, config))
    reference, state = Reference(config), init_loss_scale(config)
    rng = np.random.default_rng(0)
    # Long runs of either kind, so that ceiling and floor are met.
    outcomes = [bool(finite) for finite in np.repeat(rng.random(60) < 0.5, rng.integers(1, 12, 60))]
    seen = set()
    for finite in outcomes:
        reference.update(finite)
        state = update(state, finite)
        seen.add(float(state.scale))
        assert float(state.scale) == reference.scale
    assert {1.0, 256.0} <= seen
    assert int(state.skipped) == outcomes.count(False)


def test_a_fixed_scale_stays_and_counts():
    config = PrecisionConfig(policy="fp16", loss_scale="128")
    state = init_loss_scale(config)
    for finite in (False, False, True, False):
        state = next_loss_scale(state, jnp.asarray(finite), config)
    assert (float(state.scale), int(state.skipped), int(state.skipped_in_a_row)) == (128, 3, 1)
