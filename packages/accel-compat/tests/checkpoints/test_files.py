"""Files of a state in Accelerate's layout."""

from typing import Any, final

from accel_compat.checkpoints.files import load_accelerator_state, save_accelerator_state


@final
class Loader:
    """A stateful loader, whose position differs between ranks that read shards of different sizes."""

    use_stateful_dataloader = True

    def __init__(self, position: int) -> None:
        self.position = position

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def test_each_rank_reads_the_position_of_its_own_loader(tmp_path):
    for rank in (0, 1):
        save_accelerator_state(tmp_path, [], [], [], [Loader(5 + rank), Loader(8 + rank)], rank, 0)
    for rank, expected in ((0, [5, 8]), (1, [6, 9]), (2, [5, 8])):
        loaders = [Loader(0), Loader(0)]
        load_accelerator_state(tmp_path, [], [], [], loaders, rank)
        assert [one.position for one in loaders] == expected
    assert {path.name for path in tmp_path.glob("dl_*")} == {
        "dl_state_dict.bin",
        "dl_state_dict_1.bin",
        "dl_state_dict_rank1.bin",
        "dl_state_dict_rank1_1.bin",
    }
