"""Collectives of compiled programs. The literal texts are what compilers for H100s and TPUs wrote, cut."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxdl.planning.communication import (
    Collective,
    collectives,
    data_parallel,
    fully_sharded,
    payload,
    pipeline,
    ring_bytes,
    table,
    tensor_parallel,
    zero,
)

KIB = 2**10
ALL = ("a", "b")
REPLICATED = P()
PARTS = ("Start", "Step", "Done")
SUM = """
%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}
"""


def compiled(function, *shapes, takes=REPLICATED, gives=REPLICATED):
    mesh = jax.make_mesh((4, 2), ALL, axis_types=(AxisType.Auto, AxisType.Auto))
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=(takes,) * len(shapes), out_specs=gives, check_vma=False
    )
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return collectives(jax.jit(mapped).lower(*arrays).compile().as_text())


def repeated(times, function):
    return lambda x: lax.scan(lambda carry, _: (function(carry), None), x, None, length=times)[0]


def module(*lines, before=SUM, devices=8):
    """The text of a program whose entry has these lines."""
    body = "\n".join(f"  {line}" for line in lines)
    return f"HloModule jit_step, num_partitions={devices}\n{before}\nENTRY %main () -> f32[] {{\n{body}\n}}\n"


def test_a_sum_over_all_devices():
    (found,) = compiled(lambda x: lax.psum(x, ALL), (8, 256), takes=P(ALL))
    assert found == Collective("all-reduce", 1, KIB, 8, ("f32[1,256]",))
    assert found.sent == 2 * 7 * KIB // 8


@pytest.mark.parametrize(("axes", "group"), [("a", 4), ("b", 2), (ALL, 8)])
def test_groups_are_those_of_the_mesh_axes(axes, group):
    (found,) = compiled(lambda x: lax.psum(x, axes), (16, 16))
    assert (found.group, found.bytes) == (group, KIB)


def test_loops_multiply():
    def mixed(x):
        return lax.psum(jnp.tanh(x), "a")

    def outer(x):
        return lax.psum(jnp.sin(repeated(3, mixed)(x)), "b")

    (once,) = compiled(repeated(5, mixed), (16, 16))
    assert (once.count, once.exact) == (5, True)
    assert once.sent == 5 * 2 * 3 * KIB // 4
    inner, around = compiled(repeated(5, outer), (16, 16))
    assert (inner.count, inner.group, around.count, around.group) == (15, 4, 5, 2)


def test_a_loop_of_unknown_length_counts_as_one_and_says_so():
    def until(x):
        return lax.while_loop(lambda x: jnp.sum(x) < 100.0, lambda x: lax.psum(jnp.tanh(x), "a"), x)

    (found,) = compiled(until, (16, 16))
    assert (found.count, found.exact) == (1, False)
    assert table([found])[1][1] == "~1"


def test_of_a_conditional_the_branch_that_sends_most_counts():
    def either(x):
        branches = [lambda x: x, lambda x: lax.psum(x, "b"), lambda x: lax.psum(x, ALL)]
        return lax.switch(jnp.int32(x[0, 0]), branches, x)

    (found,) = compiled(either, (16, 16))
    assert (found.count, found.group, found.exact) == (1, 8, False)


def test_each_kind_with_its_payload_and_what_a_device_sends():
    full = 4 * KIB
    (gather,) = compiled(lambda x: lax.all_gather(x, "a", tiled=True), (16, 64), takes=P("a"))
    assert gather == Collective("all-gather", 1, full, 4, ("f32[16,64]",))
    (scatter,) = compiled(lambda x: lax.psum_scatter(x, "a", tiled=True), (16, 64), gives=P("a"))
    assert scatter == Collective("reduce-scatter", 1, full, 4, ("f32[16,64]",))
    (exchange,) = compiled(lambda x: lax.all_to_all(x, "a", 1, 0, tiled=True), (16, 64), gives=P(None, "a"))
    assert (exchange.kind, exchange.bytes, exchange.group) == ("all-to-all", full, 4)
    around = [(i, (i + 1) % 4) for i in range(4)]
    (permute,) = compiled(lambda x: lax.ppermute(x, "a", around), (16, 64))
    assert permute == Collective("collective-permute", 1, full, 4, ("f32[16,64]",))
    sent = [one.sent for one in (gather, scatter, exchange, permute)]
    assert sent == [3 * KIB, 3 * KIB, 3 * KIB, 4 * KIB]


def test_a_sum_of_two_arrays_lists_both():
    (found,) = compiled(lambda x, y: lax.psum((x, y), ALL), (16, 16), (16, 32))
    assert (found.count, found.bytes) == (1, 3 * KIB)
    assert sorted(found.shapes) == ["f32[16,16]", "f32[16,32]"]


def test_equal_collectives_are_one_with_their_number():
    (found,) = compiled(lambda x: lax.psum(jnp.tanh(lax.psum(x, "a")), "a"), (16, 16))
    assert found.count == 2


def test_an_asynchronous_pair_on_a_gpu_is_one():
    text = module(
        "%p = bf16[512,4096]{1,0} parameter(0)",
        "%all-gather-start = (bf16[512,4096]{1,0}, bf16[4096,4096]{1,0}) all-gather-start(%p), channel_id=1, "
        "replica_groups=mesh['axis_0'=8,'axis_1'=1] {'axis_0'}, dimensions={0}, use_global_device_ids=true",
        "%all-gather-done = bf16[4096,4096]{1,0} all-gather-done(%all-gather-start)",
        "%reduce-scatter-start = ((bf16[4096,4096]{1,0}), bf16[512,4096]{1,0}) "
        "reduce-scatter-start(%all-gather-done), channel_id=4, "
        "replica_groups=mesh['axis_0'=8,'axis_1'=1] {'axis_0'}, to_apply=%add",
        "ROOT %reduce-scatter-done = bf16[512,4096]{1,0} reduce-scatter-done(%reduce-scatter-start)",
    )
    full = 2 * 4096 * 4096
    assert collectives(text) == [
        Collective("all-gather", 1, full, 8, ("bf16[4096,4096]",)),
        Collective("reduce-scatter", 1, full, 8, ("bf16[4096,4096]",)),
    ]


def test_an_asynchronous_wrapper_is_followed_once():
    before = """
%wrapped (p: f32[64]) -> f32[64] {
  %p = f32[64]{0} parameter(0)
  ROOT %all-to-all.1 = f32[64]{0} all-to-all(%p), channel_id=1, replica_groups={{0,1,2,3}}, dimensions={0}
}
"""
    text = module(
        "%x = f32[64]{0} parameter(0)",
        "%async-start = ((f32[64]{0}), f32[64]{0}, u32[]) async-start(%x), calls=%wrapped",
        "%async-update = ((f32[64]{0}), f32[64]{0}, u32[]) async-update(%async-start), calls=%wrapped",
        "ROOT %async-done = f32[64]{0} async-done(%async-update), calls=%wrapped",
        before=before,
    )
    assert [(one.kind, one.count) for one in collectives(text)] == [("all-to-all", 1)]


LOOP = """
%body (p: (s32[], f32[64])) -> (s32[], f32[64]) {
  %one = s32[]{:T(128)} constant(STEP)
  %p = (s32[]{:T(128)}, f32[64]{0:T(128)S(1)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  %copy.18 = s32[]{:T(128)} copy(%i)
  %next = s32[]{:T(128)} add(%copy.18, %one), metadata={op_name="jit(step)/while/body/add"}
  %x = f32[64]{0:T(128)S(1)} get-tuple-element(%p), index=1
  %psum = f32[64]{0:T(128)S(1)} all-reduce(%x), channel_id=1, \
replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
  ROOT %tuple.1 = (s32[]{:T(128)}, f32[64]{0:T(128)S(1)}) tuple(%next, %psum)
}
%condition (q: (s32[], f32[64])) -> pred[] {
  %bound = s32[]{:T(128)} constant(5)
  %q = (s32[]{:T(128)}, f32[64]{0:T(128)S(1)}) parameter(0)
  %j = s32[]{:T(128)} get-tuple-element(%q), index=0
  ROOT %lt = pred[]{:T(512)} compare(%j, %bound), direction=LT
}
"""


def loop(step=1, start=0, direction="LT", noted=""):
    return module(
        "%x = f32[64]{0:T(128)} parameter(0)",
        f"%constant.3 = s32[]{{:T(128)}} constant({start})",
        "%copy.12 = s32[]{:T(128)} copy(%constant.3)",
        "%tuple.2 = (s32[]{:T(128)}, f32[64]{0:T(128)S(1)}) tuple(%copy.12, %x)",
        "%while.9 = (s32[]{:T(128)}, f32[64]{0:T(128)S(1)}) while(%tuple.2), condition=%condition, body=%body"
        f"{noted}",
        "ROOT %out = f32[64]{0:T(128)} get-tuple-element(%while.9), index=1",
        before=SUM + LOOP.replace("STEP", str(step)).replace("LT", direction),
    )


def test_trips_that_a_gpu_compiler_notes_count():
    noted = ', backend_config={"known_trip_count":{"n":"7"},"known_init_step":{"init":"0","step":"1"}}'
    (found,) = collectives(loop(noted=noted))
    assert (found.count, found.group, found.exact) == (7, 4, True)


@pytest.mark.parametrize(("step", "start", "trips"), [(1, 0, 5), (2, 0, 3), (1, 3, 2)])
def test_trips_on_a_tpu_follow_from_the_condition(step, start, trips):
    (found,) = collectives(loop(step, start))
    assert (found.count, found.exact) == (trips, True)


def test_a_loop_that_never_runs_sends_nothing_and_one_of_another_form_is_not_exact():
    assert collectives(loop(start=5)) == []
    (found,) = collectives(loop(direction="NE"))
    assert (found.count, found.exact) == (1, False)


PART = """
%NAME (p: bf16[512,1024]) -> bf16[4096,1024] {
  %p = bf16[512,1024]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %all-gather.1 = bf16[4096,1024]{1,0:T(8,128)(2,1)} all-gather(%p), channel_id=1, \
replica_groups=mesh['axis_0'=8] {'axis_0'}, dimensions={0}, \
backend_config={"async_collective_fusion_config":{"flag_start":"2","flag_end":"8"}}
  ROOT %custom-call.1 = bf16[4096,1024]{1,0:T(8,128)(2,1)S(1)} custom-call(%all-gather.1), TARGET
}
"""


def test_a_tpu_s_asynchronous_collective_is_one_however_often_it_is_repeated():
    """Two of one channel, as in a `shard_map`, each in three parts; a third one is not asynchronous."""
    targets = {f"{part}{i}": f'custom_call_target="AsyncCollective{part}"' for part in PARTS for i in (1, 2)}
    text = module(
        "%x = bf16[512,1024]{1,0} parameter(0)",
        *(f"%f.{name} = bf16[4096,1024]{{1,0}} fusion(%x), kind=kCustom, calls=%{name}" for name in targets),
        "ROOT %all-gather.3 = bf16[4096,1024]{1,0} all-gather(%x), channel_id=1, "
        "replica_groups=mesh['axis_0'=8] {'axis_0'}, dimensions={0}",
        before="".join(PART.replace("NAME", name).replace("TARGET", what) for name, what in targets.items()),
    )
    (found,) = collectives(text)
    assert (found.count, found.bytes, found.group) == (3, 2 * 4096 * 1024, 8)
    with pytest.raises(ValueError, match="without a start"):
        collectives(text.replace("AsyncCollectiveStart", "AsyncCollectiveBegin"))


def test_a_tpu_s_fused_sum_and_slice_is_a_scatter():
    before = """
%all-reduce-scatter (input: f32[4096,1024]) -> f32[1032,1024] {
  %input = f32[4096,1024]{1,0:T(8,128)S(1)} parameter(0)
  %zero = f32[] constant(0)
  %pad = f32[4128,1024]{1,0:T(8,128)} pad(%input, %zero), padding=0_32x0_0
  %all-reduce.1 = f32[4128,1024]{1,0:T(8,128)} all-reduce(%pad), channel_id=2, \
replica_groups={{0,2,4,6},{1,3,5,7}}, to_apply=%add
  %at = u32[] partition-id()
  ROOT %part = f32[1032,1024]{1,0:T(8,128)S(1)} dynamic-slice(%all-reduce.1, %at, %at)
}
"""
    text = module(
        "%x = f32[4096,1024]{1,0:T(8,128)} parameter(0)",
        "ROOT %fusion = f32[1032,1024]{1,0:T(8,128)} fusion(%x), kind=kCustom, calls=%all-reduce-scatter",
        before=SUM + before,
    )
    assert collectives(text) == [Collective("reduce-scatter", 1, 4 * 4128 * 1024, 4, ("f32[4128,1024]",))]


@pytest.mark.parametrize(("sliced", "kind"), [("%one", "reduce-scatter"), ("%whole", "all-reduce")])
def test_a_tpu_s_fused_sum_of_two_arrays_and_their_slices_is_a_scatter(sliced, kind):
    before = """
%all-reduce-scatter (x: f32[512,64], y: f32[64,512]) -> (f32[64,64], f32[64,64]) {
  %x = f32[512,64]{1,0} parameter(0)
  %y = f32[64,512]{1,0} parameter(1)
  %all-reduce.1 = (f32[512,64]{1,0}, f32[64,512]{1,0}) all-reduce(%x, %y), channel_id=1, \
replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
  %whole = f32[512,64]{1,0} get-tuple-element(%all-reduce.1), index=0
  %at = u32[] partition-id()
  %one = f32[64,64]{1,0} dynamic-slice(%whole, %at, %at), dynamic_slice_sizes={64,64}
  %second = f32[64,512]{1,0} get-tuple-element(%all-reduce.1), index=1
  %two = f32[64,64]{1,0} dynamic-slice(%second, %at, %at), dynamic_slice_sizes={64,64}
  ROOT %both = (f32[64,64]{1,0}, f32[64,64]{1,0}) tuple(SLICED, %two)
}
""".replace("SLICED", sliced)
    text = module(
        "%x = f32[512,64]{1,0} parameter(0)",
        "%y = f32[64,512]{1,0} parameter(1)",
        "ROOT %f = (f32[64,64]{1,0}, f32[64,64]{1,0}) fusion(%x, %y), calls=%all-reduce-scatter",
        before=SUM + before,
    )
    (found,) = collectives(text)
    assert (found.kind, found.bytes) == (kind, 2 * 4 * 512 * 64)


@pytest.mark.parametrize(
    ("written", "group"),
    [
        ("replica_groups={{0,1},{2,3}}", 2),
        ("replica_groups={{0},{1}}", 1),
        ("replica_groups={}", 8),
        ("replica_groups=[2,4]<=[8]", 4),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", 2),
        ("replica_groups=mesh['x'=2,'y'=4] {'y'}", 4),
        ("replica_groups=mesh['x'=2,'y'=4] {'x','y'}", 8),
        ("replica_groups=mesh['x'=2,'y'=4] {'x','y':(2)2}", 4),
        ("replica_groups=mesh['x'=2,'y'=4], device_ids=([4,2]T(1,0)) {'x'}", 2),
        ("source_target_pairs={{0,2},{2,4},{4,6},{1,3},{3,5},{5,7}}", 4),
        ("source_target_pairs={{2,3},{0,1},{1,2},{3,0}}", 4),
    ],
)
def test_every_way_to_write_groups(written, group):
    kind = "all-reduce" if "replica" in written else "collective-permute"
    lines = ("%x = f32[256]{0} parameter(0)", f"ROOT %y = f32[256]{{0}} {kind}(%x), channel_id=1, {written}")
    assert collectives(module(*lines)) == [Collective(kind, 1, KIB, group, ("f32[256]",))]


@pytest.mark.parametrize(
    ("array", "size"),
    [("pred[3]", 3), ("s4[5]", 3), ("bf16[2,3]", 12), ("f8e4m3fn[7]", 7), ("f32[]", 4), ("c64[2]", 16)],
)
def test_bytes_of_each_type(array, size):
    (found,) = collectives(
        module(f"%x = {array} parameter(0)", f"ROOT %y = {array} all-reduce(%x), replica_groups={{}}")
    )
    assert found.bytes == size


def test_other_text_is_refused():
    with pytest.raises(ValueError, match="no ENTRY"):
        collectives("module @jit_step {}")
    with pytest.raises(ValueError, match="without groups"):
        collectives(module("%x = f32[] parameter(0)", "ROOT %y = f32[] all-reduce(%x), replica_groups=?"))


def test_what_is_listed():
    found = Collective("all-reduce", 2, 5 * KIB, 4, ("f32[256]",) * 2 + ("f32[8]", "f32[9]", "f32[10]"))
    head, row = table([found])
    assert len(head) == len(row)
    assert row[:5] == ("all-reduce", "2", "4", "5.0 KiB", "15.0 KiB")
    assert row[5] == "2 x f32[256], 1 x f32[8], 1 x f32[9] and 1 more"


def test_what_the_papers_expect():
    def sent(expected, group=8):
        return sum(ring_bytes(kind, size, group) for kind, size in expected.items())

    plain = sent(data_parallel(800))
    assert plain == 1400
    assert sent(zero(800, 800)) == plain
    assert sent(fully_sharded(800, 800)) == 1.5 * plain
    assert sent(tensor_parallel(800, 3)) == 12 * plain == sent(tensor_parallel(800, 3, sequence=True))
    assert pipeline(100, 4, repeats=2) == {"collective-permute": 1600}
    assert sent(pipeline(100, 4), 1) == sent(data_parallel(800), 1) == 0


def test_programs_move_what_is_expected_of_them():
    layers, length, width = 3, 8, 16

    def loss(gather, weights, x):
        def layer(h, weight):
            return jnp.tanh(h @ gather(weight)), None

        return jnp.sum(lax.scan(jax.checkpoint(layer), x, weights)[0])

    def replicated(weights, x):
        return lax.psum(jax.grad(partial(loss, lambda weight: weight))(weights, x), ALL)

    def sharded(weights, x):
        part = weights[:, : width // 8]
        return jax.grad(partial(loss, lambda weight: lax.all_gather(weight, ALL, tiled=True)))(part, x)

    shapes, size = ((layers, width, width), (length, width)), 4 * layers * width * width
    assert payload(compiled(replicated, *shapes)) == data_parallel(size)
    assert payload(compiled(sharded, *shapes, gives=P(None, ALL))) == fully_sharded(size, size)
