"""Collectives of one rank by kind and axis."""

from accel_observe.report.rank_report import axis_of, by_axis
from accel_state import ParallelismConfig
from accel_state.process_group.fake_group import CountedCollective


def test_a_group_is_named_after_the_axes_along_which_it_goes() -> None:
    degrees = ParallelismConfig(pp_size=2, dp_shard_size=2, tp_size=2)
    assert axis_of((0, 1), degrees, 8) == "tp"
    assert axis_of((0, 2), degrees, 8) == "dp_shard"
    assert axis_of((0, 4), degrees, 8) == "pp"
    assert axis_of((0, 1, 2, 3), degrees, 8) == "dp_shard x tp"
    assert axis_of((0,), degrees, 8) == "this rank"
    assert axis_of(range(8), ParallelismConfig(), 8) == "all ranks"
    assert axis_of((0, 1), ParallelismConfig(), 8) == "some ranks"


def test_collectives_of_one_kind_along_one_axis_are_summed() -> None:
    degrees = ParallelismConfig(dp_shard_size=2, tp_size=2)
    counted = [
        CountedCollective("all_reduce", (0, 1), 2, 10),
        CountedCollective("all_reduce", (2, 3), 1, 5),
        CountedCollective("all_gather", (0, 2), 1, 40),
    ]
    gathered, reduced = by_axis(counted, degrees, 4)
    assert (gathered.axis, gathered.bytes) == ("dp_shard", 40)
    assert (reduced.axis, reduced.calls, reduced.bytes) == ("tp", 3, 15)
