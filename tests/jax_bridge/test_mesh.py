"""Placements and partition specs say the same thing."""

import itertools

import pytest
from jax.sharding import PartitionSpec as P

from pure_backend.errors import DeviceError
from pure_backend.ir.layout import Layout, MeshOfRanks
from pure_backend.jax_bridge.mesh import cuts_of_spec, jax_mesh, named_sharding, partition_spec

NAMES = ("dp", "tp")


@pytest.mark.parametrize(
    ("cuts", "spec"),
    [((None, None), P()), ((0, None), P("dp")), ((None, 1), P(None, "tp")), ((1, 0), P("tp", "dp")), ((0, 0), P(("dp", "tp")))],
)
def test_placements_as_specs(cuts, spec):
    assert partition_spec(cuts, NAMES) == spec


def test_there_and_back():
    for cuts in itertools.product((None, 0, 1, 2), repeat=3):
        assert cuts_of_spec(partition_spec(cuts, "abc"), "abc") == cuts


def test_an_order_that_no_placements_say():
    with pytest.raises(ValueError, match="not in the order of the mesh"):
        cuts_of_spec(P(("tp", "dp")), NAMES)


def mesh(*shape, ranks):
    return MeshOfRanks(shape, NAMES[: len(shape)], ranks, "cpu", object())


def test_a_mesh_is_its_axes_and_ranks():
    assert mesh(1, ranks=(0,)) == mesh(1, ranks=(0,)) != mesh(2, ranks=(0, 1)) != mesh(2, ranks=(1, 0))
    assert jax_mesh(mesh(1, ranks=(0,))).axis_names == ("dp",)
    assert named_sharding(Layout(mesh(1, ranks=(0,)), (0,))).spec == P("dp")


def test_ranks_that_jax_does_not_see():
    with pytest.raises(DeviceError, match=r"of ranks \[1\]"):
        jax_mesh(mesh(2, ranks=(0, 1)))


def test_what_does_not_divide_is_named():
    layout = Layout(mesh(2, 2, ranks=(0, 1, 2, 3)), (0, 0))
    assert not layout.undivided((8, 3))
    assert "dimension 0 of size 6 does not divide by the 4 ranks" in layout.undivided((6, 3))
