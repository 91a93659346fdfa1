"""The configured optimizer as one optax transformation."""

import optax

from jaxdl.config import EPSILON, OptimizerConfig
from jaxdl.optim.clip import clip_by_global_norm
from jaxdl.optim.lamb import scale_by_trust_ratio
from jaxdl.optim.lars import scale_by_lars
from jaxdl.optim.masks import LayerAxes, decay_mask, unstacked


def build_optimizer(
    config: OptimizerConfig, schedule: optax.Schedule, *, layer_axes: LayerAxes = unstacked
) -> optax.GradientTransformation:
    """Builds clip -> update rule with masked weight decay -> learning rate.

    - SGD takes decay as part of the gradient, before momentum, as the ResNet
      recipe does (He et al. 2015).
    - AdamW adds it after the adaptive step (Loshchilov and Hutter 2017).
    - LAMB does so too and then gives the sum the norm of the parameters, as
      MLPerf and NVIDIA define it. Their definition begins with a clip to global
      norm 1.0, which is `config.clip_norm` here. Without decay it still adapts.
    - LARS is the MLPerf reference, with the learning rate inside the momentum
      buffer: v = momentum * v + rate * u. SGD's is outside, v = momentum * v + u
      and then rate * v. The two agree while the rate stands still; when it
      falls, LARS's buffer keeps moving at the rates of the past.

    Biases and normalisation parameters are neither decayed nor adapted: they
    get the plain Adam step (AdamW, LAMB) or momentum SGD (SGD, LARS).

    Args:
        config: update rule and its constants.
        schedule: learning rate by update count.
        layer_axes: for LAMB and LARS, tells which parameters are stacks of layers.

    Returns:
        A transformation of mean gradients in the parameters' dtype.
    """
    # What is switched off keeps its place: a resumed run may switch it on, and the state must still fit.
    clip = [optax.identity() if config.clip_norm is None else clip_by_global_norm(config.clip_norm)]
    decay = [
        optax.add_decayed_weights(config.weight_decay, mask=decay_mask)
        if config.weight_decay > 0
        else optax.identity()
    ]
    momentum = [optax.trace(config.momentum, nesterov=config.nesterov)] if config.momentum > 0 else []
    rate = optax.scale_by_learning_rate(schedule)
    match config.name:
        case "sgd":
            rule = [*decay, *momentum, rate]
        case "adamw":
            rule = [_adam(config), *decay, rate]
        case "lamb":
            rule = [_adam(config), *decay, scale_by_trust_ratio(decay_mask, layer_axes), rate]
        case "lars":
            adapted = scale_by_lars(config.trust_coefficient, config.weight_decay, decay_mask, layer_axes)
            rule = [adapted, rate, *momentum]
    return optax.chain(*clip, *rule)


def _adam(config: OptimizerConfig) -> optax.GradientTransformation:
    epsilon = EPSILON[config.name] if config.epsilon is None else config.epsilon
    return optax.scale_by_adam(config.momentum, config.beta2, epsilon)
