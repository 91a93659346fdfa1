"""Rematerialisation changes what is kept, and nothing else."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from jaxdl.errors import ConfigError
from jaxdl.models import ResNet, attention, build, resnet
from jaxdl.models.remat import Remat
from jaxdl.models.transformer import Encoder, EncoderLayer

LEVELS = ("dots", "blocks", "full", "names:norm1,conv3")
ENCODER_LEVELS = ("dots", "blocks", "full", "names:attention,mlp_in")
LENGTH, EMBED = 16, 32


def small_resnet(remat: str = "none", offload: bool = False) -> ResNet:
    kept = Remat.parse(remat, dots=resnet.DOTS, others=resnet.NORMS, offload=offload)
    return ResNet((2, 2), bottleneck=True, num_classes=5, width=8, stem="small", remat=kept)


def small_encoder(
    remat: str = "none", *, scan: bool = True, offload: bool = False, depth: int = 12
) -> Encoder:
    kept = Remat.parse(remat, dots=attention.DOTS, others=attention.OTHERS, offload=offload)
    return Encoder(depth, {"heads": 4, "mlp": 64}, kept, scan)


def drop_keys() -> jax.Array:
    return jax.random.split(jax.random.key(7), 2)


def images() -> jax.Array:
    return jax.random.normal(jax.random.key(1), (4, 8, 8, 3))


def tokens() -> tuple[jax.Array, jax.Array]:
    x = jax.random.normal(jax.random.key(1), (2, LENGTH, EMBED))
    return x, jnp.arange(LENGTH)[None, :] < jnp.array([LENGTH, 10])[:, None]


def resnet_step(model: ResNet):
    """(variables) -> (loss, new statistics), gradients."""

    def loss(params, statistics):
        variables = {"params": params, "batch_stats": statistics}
        logits, updated = model.apply(variables, images(), train=True, mutable=["batch_stats"])
        return jnp.square(logits - 1).mean(), updated

    return jax.jit(lambda v: jax.value_and_grad(loss, has_aux=True)(v["params"], v["batch_stats"]))


def encoder_step(model: Encoder):
    def loss(variables):
        y = model.apply(variables, *tokens(), drop_keys())
        return jnp.square(y - 1).mean()

    return jax.jit(jax.value_and_grad(loss))


def awake(variables):
    """The scales that start at zero would hide all gradients of their blocks."""
    key = jax.random.key(3)
    return jax.tree.map(lambda x: x + 0.1 * jax.random.normal(key, x.shape, x.dtype), variables)


def assert_close(tree, expected, tolerance=1e-6):
    """Equal to a share of the tree's largest norm, which tells rounding from faults."""
    assert jax.tree.structure(tree) == jax.tree.structure(expected)
    size = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(expected))
    for leaf, other in zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(leaf, other, rtol=tolerance, atol=tolerance * size)


@pytest.mark.parametrize("remat", LEVELS)
def test_a_resnet_gives_the_same_loss_gradients_and_statistics(remat):
    variables = awake(nn.unbox(small_resnet().init(jax.random.key(0), images(), train=False)))
    expected = resnet_step(small_resnet())(variables)
    assert_close(resnet_step(small_resnet(remat))(variables), expected)


@pytest.mark.parametrize("remat", LEVELS)
def test_remat_changes_no_initial_value_of_a_resnet(remat):
    fresh = [
        model.init(jax.random.key(0), images(), train=False)
        for model in (small_resnet(), small_resnet(remat))
    ]
    assert jax.tree.structure(fresh[0]) == jax.tree.structure(fresh[1])
    jax.tree.map(np.testing.assert_array_equal, *map(nn.unbox, fresh))


@pytest.mark.parametrize(("scan", "depth"), [(True, 12), (False, 3)])
@pytest.mark.parametrize("remat", ENCODER_LEVELS)
def test_an_encoder_gives_the_same_loss_gradients_and_dropout(remat, scan, depth):
    model = small_encoder(depth=depth)
    variables = nn.unbox(model.init(jax.random.key(0), *tokens()))
    expected = encoder_step(model)(variables)
    other = small_encoder(remat, scan=scan, depth=depth)
    assert_close(encoder_step(other)(variables), expected)
    jax.tree.map(
        np.testing.assert_array_equal,
        nn.unbox(other.init(jax.random.key(0), *tokens())),
        variables,
    )


def resnet_loss(model):
    variables = jax.eval_shape(lambda: nn.unbox(model.init(jax.random.key(0), images(), train=False)))
    apply = partial(model.apply, train=True, mutable=["batch_stats"])
    return variables, lambda variables: apply(variables, images())[0].sum()


def encoder_loss(model):
    variables = jax.eval_shape(lambda: nn.unbox(model.init(jax.random.key(0), *tokens())))
    apply = partial(model.apply, keys=drop_keys())
    return variables, lambda variables: apply(variables, *tokens()).sum()


@pytest.mark.parametrize(
    ("make", "loss_of"),
    [(small_resnet, resnet_loss), (small_encoder, encoder_loss)],
    ids=["resnet", "encoder"],
)
def test_each_level_keeps_less_than_the_one_before(make, loss_of):
    """What differentiation keeps of the forward pass, before any compiler looks at it."""

    def kept(remat: str) -> int:
        variables, loss = loss_of(make(remat))
        # The function that jax.vjp returns is a tree of what it holds.
        _, backward = jax.eval_shape(partial(jax.vjp, loss), variables)
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(backward))

    sizes = [kept(remat) for remat in ("none", "dots", "blocks", "full")]
    assert sizes == sorted(set(sizes), reverse=True)


def test_a_compiled_encoder_needs_less_from_none_to_dots_to_full():
    def temporaries(remat: str) -> int:
        variables, loss = encoder_loss(small_encoder(remat))
        return jax.jit(jax.grad(loss)).lower(variables).compile().memory_analysis().temp_size_in_bytes

    sizes = [temporaries(remat) for remat in ("none", "dots", "full")]
    assert sizes == sorted(set(sizes), reverse=True)


@pytest.mark.parametrize("make", [small_resnet, small_encoder])
def test_a_name_that_the_model_does_not_have_is_refused_with_those_it_has(make):
    with pytest.raises(ConfigError, match=r"no activation conv9; it names .*"):
        make("names:conv9")


def test_build_takes_the_names_of_its_model():
    assert build("resnet18", num_classes=2, remat="names:conv1, norm1").remat.names == ("conv1", "norm1")
    with pytest.raises(ConfigError, match="conv7"):
        build("resnet18", num_classes=2, remat="names:conv7")


@pytest.mark.parametrize(("make", "step"), [(small_resnet, resnet_step), (small_encoder, encoder_step)])
def test_activations_offloaded_to_the_host_give_the_same_gradients(make, step):
    example = (images(), False) if make is small_resnet else tokens()
    variables = nn.unbox(make().init(jax.random.key(0), *example))
    model = make("dots", offload=True)
    for_gpu = step(model).trace(variables).lower(lowering_platforms=("cuda",)).as_text()
    offloads = for_gpu.count("pinned_host")  # on a CPU, where the check of the values runs, there are none
    assert offloads > 0
    assert_close(step(model)(variables), step(make())(variables))


def test_an_encoder_layer_of_bert_size_has_the_published_number_of_parameters():
    # BERT-Large: 24 layers of 12,596,224 (Devlin et al. 2018).
    layer = EncoderLayer(heads=16, mlp=4096)
    x, mask = jax.ShapeDtypeStruct((1, 8, 1024), jnp.float32), jax.ShapeDtypeStruct((1, 8), jnp.bool_)
    params = jax.eval_shape(lambda x, mask: layer.init(jax.random.key(0), x, mask), x, mask)
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 12_596_224
