"""Checkpoints behind URLs: in fsspec's memory, and in a server that speaks S3's protocol over HTTP."""

import itertools
import logging
import os
import signal
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import accel_ckpt
from accel_ckpt import AsyncSaver, CheckpointDirectory, keep_last, open_checkpoint
from accel_ckpt.format.blocks import BLOCK
from accel_ckpt.io import remote
from accel_ckpt.io.storage import Url, locate
from accel_ckpt.rank_group import RankGroup
from accel_ckpt.saving.plan import make_draft
from accel_ckpt.saving.transaction import SaveTransaction
from accel_ckpt.tools.inspection import compare_checkpoints, describe, list_checkpoints, verify
from accel_state.errors import CheckpointCorruptError, CheckpointError
from accel_testing import RankPool
from accel_testing.faults.faults import injected

fsspec: Any = pytest.importorskip("fsspec")
pytest.importorskip("tenacity")
_NUMBERS = itertools.count()
_LocalFiles: Any = import_module("fsspec.implementations.local").LocalFileSystem


def use_server(endpoint: str) -> None:
    """What a user does by a file or a variable: tells fsspec where S3 is and with which keys."""
    import_module("s3fs").S3FileSystem.clear_instance_cache()
    fsspec.config.conf["s3"] = {"endpoint_url": endpoint, "key": "test", "secret": "test"}


@pytest.fixture(scope="session")
def endpoint() -> Iterator[str]:
    """A server with one bucket."""
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server.start()
    host, port = server.get_host_and_port()
    try:
        yield f"http://{host}:{port}"
    finally:
        server.stop()


@pytest.fixture(params=["memory", "s3"])
def folder(request: pytest.FixtureRequest, endpoint: str) -> Iterator[str]:
    """A place of its own for a test."""
    if request.param == "memory":
        yield f"memory://runs/{next(_NUMBERS)}"
        return
    use_server(endpoint)
    bucket = f"bucket{next(_NUMBERS)}"
    fsspec.filesystem("s3").mkdir(bucket)
    try:
        yield f"s3://{bucket}/runs"
    finally:
        del fsspec.config.conf["s3"]


def files_in(folder: str) -> list[str]:
    fs, path = fsspec.core.url_to_fs(folder)
    fs.invalidate_cache()
    return sorted(name.removeprefix(path).lstrip("/") for name in fs.find(path))


def state(number: int) -> dict[str, Any]:
    return {"model": {"w": torch.full((300, 50), float(number)), "b": torch.arange(7)}, "n": number}


def damage(file: str) -> None:
    fs, path = fsspec.core.url_to_fs(file)
    content = bytearray(fs.cat_file(path))
    content[len(content) // 2] ^= 4
    fs.pipe_file(path, bytes(content))


def test_a_url_holds_what_was_saved_there(folder: str) -> None:
    rng = torch.get_rng_state()
    saved = accel_ckpt.save(f"{folder}/one", state(3), local={"rng": rng}, metadata={"loss": 0.5})
    assert saved.path == Url(f"{folder}/one")
    found = open_checkpoint(f"{folder}/one/")
    assert torch.equal(found.read("model")["w"], state(3)["model"]["w"])
    assert torch.equal(found.read_local("rng", 0), rng)
    assert found.metadata == {"loss": 0.5}
    assert [name.partition("/")[2].partition("/")[2] or name for name in files_in(folder)] == [
        "local-00000.json",
        "tensors-00000.safetensors",
        "tree.json",
        "one/manifest.json",
    ]


def test_a_copy_of_it_is_a_checkpoint_on_a_disk(folder: str, tmp_path: Path) -> None:
    accel_ckpt.save(f"{folder}/one", state(3))
    fs, path = fsspec.core.url_to_fs(f"{folder}/one")
    fs.get(path, str(tmp_path / "one"), recursive=True)
    assert open_checkpoint(tmp_path / "one").read("n") == 3


def test_a_series_is_numbered_pruned_and_found_again(folder: str) -> None:
    series = CheckpointDirectory(folder, retention=keep_last(2))
    for number in range(4):
        series.save(state(number), metadata={"number": number})
    assert [entry.metadata["number"] for entry in CheckpointDirectory(folder).entries()] == [2, 3]
    assert {name.partition("/")[0] for name in files_in(folder)} == {"checkpoint_2", "checkpoint_3"}
    latest = series.latest()
    assert latest is not None
    assert latest.read("n") == 3
    assert series.next_path().name == "checkpoint_4"


def test_overwriting_leaves_only_the_new(folder: str) -> None:
    for number in (1, 2):
        accel_ckpt.save(f"{folder}/one", state(number))
        assert open_checkpoint(f"{folder}/one").read("n") == number
    assert len(files_in(folder)) == 3
    with pytest.raises(CheckpointError, match="a checkpoint is there already"):
        accel_ckpt.save(f"{folder}/one", state(3), overwrite=False)
    assert open_checkpoint(f"{folder}/one").read("n") == 2


def test_overwriting_a_copied_checkpoint_keeps_the_files_of_users(tmp_path: Path) -> None:
    place = f"memory://runs/{next(_NUMBERS)}"
    fs, path = fsspec.core.url_to_fs(place)
    fs.put(f"{accel_ckpt.save(tmp_path / 'one', state(1)).path}/", path, recursive=True)
    fs.pipe_file(f"{path}/notes.txt", b"mine")
    accel_ckpt.save(place, state(2))
    assert open_checkpoint(place).read("n") == 2
    assert fs.cat_file(f"{path}/notes.txt") == b"mine"
    assert len(files_in(place)) == 4


@pytest.mark.parametrize("name", ["lr=[1]", "a*", "b?"])
@pytest.mark.sampled(1)
def test_a_name_that_looks_like_a_pattern_is_a_name(folder: str, name: str) -> None:
    """Pruning and overwriting touch no folder that the name would match as a pattern of a shell."""
    other = CheckpointDirectory(f"{folder}/{name.replace('[1]', '1').replace('*', 'b').replace('?', 'c')}")
    series = CheckpointDirectory(f"{folder}/{name}", retention=keep_last(1))
    for number in range(2):
        other.save(state(number))
        series.save(state(number))
    accel_ckpt.save(series.path / "checkpoint_1", state(2))
    assert [verify(entry.path) for entry in other.entries()] == [None, None]
    assert [entry.number for entry in series.entries()] == [1]
    assert len(files_in(f"{folder}/{name}")) == 3


def test_a_commit_counts_although_leftovers_cannot_be_removed(caplog: pytest.LogCaptureFixture) -> None:
    place = f"memory://kept/{next(_NUMBERS)}"
    accel_ckpt.save(place, state(1))
    with injected("raise(EPERM) at fsspec.implementations.memory:MemoryFileSystem.rm"):
        accel_ckpt.save(place, state(2))
    assert "stays behind" in caplog.text
    assert open_checkpoint(place).read("n") == 2


def test_an_error_after_the_commit_removes_nothing_of_the_checkpoint(folder: str) -> None:
    """As when another rank is lost then."""
    target, alone = Url(f"{folder}/one"), RankGroup(None)
    transaction = SaveTransaction.begin(alone, target, partial(make_draft, state(1), None, None, alone))

    def lose(stage: str) -> None:
        if stage == "committed":
            raise CheckpointError("a rank is gone")

    transaction.on_stage = lose
    with pytest.raises(CheckpointError, match="a rank is gone"):
        transaction.finish(alone, transaction.part.pieces)
    assert open_checkpoint(target).read("n") == 1


@pytest.mark.parametrize("file", ["tensors-00000.safetensors", "tree.json", "manifest.json"])
@pytest.mark.sampled(2)
def test_damage_is_found_by_its_files_name(folder: str, file: str, caplog: pytest.LogCaptureFixture) -> None:
    series = CheckpointDirectory(folder)
    for number in range(2):
        series.save(state(number))
    damage(
        f"{folder}/{next(name for name in files_in(f'{folder}') if name.startswith('checkpoint_1') and file in name)}"
    )
    with pytest.raises(CheckpointCorruptError, match=file.replace(".", r"\.")):
        open_checkpoint(f"{folder}/checkpoint_1")
    latest = series.latest()
    assert latest is not None
    assert latest.path.name == "checkpoint_0"
    assert "passing over checkpoint_1" in caplog.text


@pytest.mark.parametrize("overwrite", [False, True], ids=["series", "overwriting"])
def test_a_save_that_ends_anywhere_shows_the_old_or_the_new(overwrite: bool) -> None:
    """The store lives on in this process, so the writer's death is an exception that nothing catches or cleans up."""
    memory = fsspec.filesystem("memory")
    for call in range(1, 100):
        folder = f"memory://ends/{next(_NUMBERS)}"
        series = CheckpointDirectory(folder, retention=keep_last(1))
        series.save(state(1))
        target = "checkpoint_0" if overwrite else "checkpoint_1"
        died = _dies_at(call, lambda folder=folder, target=target: accel_ckpt.save(f"{folder}/{target}", state(2)))  # type: ignore[misc]
        latest = series.latest()
        assert latest is not None
        assert latest.read("n") in (1, 2)
        series.sweep(grace=0)
        latest = series.latest()
        assert latest is not None
        value = latest.read("model")["w"].unique().tolist()
        assert value == [float(latest.read("n"))]
        saves = {name.rpartition("/")[0] for name in memory.find(folder) if not name.endswith("manifest.json")}
        assert len(saves) == len(list_checkpoints(folder))
        if not died:
            assert value == [2.0]
            return
    pytest.fail("100 calls were not enough to save")


class Died(BaseException):
    """The end of a process, as far as the store can tell."""


def _dies_at(call: int, work: Any) -> bool:
    memory = type(fsspec.filesystem("memory"))
    left = [call]
    originals = {name: getattr(memory, name) for name in ("ls", "info", "open", "pipe_file", "cat_file", "rm")}

    def counted(original: Any) -> Any:
        def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] <= 0:
                raise Died
            return original(self, *args, **kwargs)

        return wrapped

    for name, original in originals.items():
        setattr(memory, name, counted(original))
    try:
        work()
    except Died:
        return True
    finally:
        for name, original in originals.items():
            setattr(memory, name, original)
    return False


def test_leftovers_are_swept_once_they_are_old_and_never_what_counts(folder: str) -> None:
    series = CheckpointDirectory(folder)
    series.save(state(0))
    staged = remote.RemoteStorage.of(Url(folder)).stage(Url(f"{folder}/checkpoint_1"), overwrite=False)
    assert series.sweep() == []
    assert series.next_path().name == "checkpoint_2"
    assert series.sweep(grace=0) == [staged.folder]
    assert series.next_path().name == "checkpoint_1"
    assert verify(f"{folder}/checkpoint_0") is None


def test_two_runs_that_want_one_place_do_not_mix(folder: str) -> None:
    store, target = remote.RemoteStorage.of(Url(folder)), Url(f"{folder}/checkpoint_0")
    late = store.stage(target, overwrite=False)
    accel_ckpt.save(target, state(1), overwrite=False)
    late.seal(b"{}")
    with pytest.raises(CheckpointError, match="already"):
        late.commit()
    with pytest.raises(FileExistsError):
        store.put(target / "manifest.json", b"{}", overwrite=False)
    assert open_checkpoint(target).read("n") == 1


class _Folders(_LocalFiles):
    """A file system with folders, as SFTP and SMB have them, whose files do not say how much they have written."""

    protocol = "folders"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(_LocalFiles._strip_protocol(path.removeprefix("folders://")))

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        file = super().open(path, mode, **options)
        if "w" in mode:
            write = file.write
            file.write = lambda content: write(content) and None
        return file


def test_a_file_system_with_folders_gets_those_that_it_needs(tmp_path: Path) -> None:
    fsspec.register_implementation("folders", _Folders, clobber=True)
    place = f"folders://{tmp_path}/run"
    large = {"w": torch.arange(BLOCK // 4, dtype=torch.float64)}
    series = CheckpointDirectory(f"{place}/series", retention=keep_last(1))
    for number in range(2):
        series.save({"model": large, "n": number})
    assert open_checkpoint(f"{place}/series/checkpoint_1").read("n") == 1
    assert os.listdir(tmp_path / "run" / "series") == ["checkpoint_1"]
    accel_ckpt.export_model(large, f"{place}/out/a")
    assert torch.equal(accel_ckpt.load_model_files(f"{place}/out/a")["w"], large["w"])
    with pytest.raises(CheckpointError, match="there is no such place"):
        accel_ckpt.save("folders:///misspelt/run", {"n": 1})
    assert not os.path.exists("/misspelt")


def test_a_request_that_fails_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "FIRST_WAIT", 0.001)
    place = f"memory://again/{next(_NUMBERS)}"
    for function in ("pipe_file", "ls"):
        with injected(f"raise(EIO) at call 2 of fsspec.implementations.memory:MemoryFileSystem.{function}"):
            accel_ckpt.save(place, state(1))
    with injected("raise(ETIMEDOUT) at call 2 of fsspec.implementations.memory:MemoryFileSystem.cat_file"):
        assert open_checkpoint(place).read("n") == 1


def test_a_large_file_whose_upload_fails_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "FIRST_WAIT", 0.001)
    place, weight = f"memory://again/{next(_NUMBERS)}", torch.arange(3 * 2**20)
    with injected("raise(EIO) at call 2 of fsspec.implementations.memory:MemoryFile.write"):
        accel_ckpt.save(place, {"w": weight})
    assert torch.equal(open_checkpoint(place).read("w"), weight)


def test_what_stays_broken_is_said_and_nothing_appears(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "FIRST_WAIT", 0.001)
    place = f"memory://broken/{next(_NUMBERS)}"
    memory = type(fsspec.filesystem("memory"))

    def refuses(self: Any, path: str, value: bytes, **kwargs: Any) -> None:
        raise OSError("the network is down")

    with monkeypatch.context() as patch:
        patch.setattr(memory, "pipe_file", refuses)
        with pytest.raises(CheckpointError, match=r"the network is down \(tried 6 times\)"):
            accel_ckpt.save(place, state(1))
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        open_checkpoint(place)


def test_a_place_without_permission_is_not_asked_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def refuses(self: Any, path: str, value: bytes, **kwargs: Any) -> None:
        asked.append(path)
        raise PermissionError("Forbidden")

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "pipe_file", refuses)
    with pytest.raises(CheckpointError, match=r"PermissionError: Forbidden$"):
        accel_ckpt.save("memory://closed", state(1))
    assert len(asked) == 1


def test_saving_in_the_background(folder: str) -> None:
    weight = torch.zeros(1000)
    series = CheckpointDirectory(folder, retention=keep_last(1))
    with AsyncSaver() as saver:
        for number in range(2):
            saver.save(f"{folder}/checkpoint_{number}", {"w": weight}, series=series)
            weight += 1
    latest = series.latest()
    assert latest is not None
    assert latest.read("w").unique().tolist() == [1.0]
    assert len(series.entries()) == 1


def test_it_is_looked_into_like_any_other(folder: str, tmp_path: Path) -> None:
    for number in range(2):
        accel_ckpt.save(f"{folder}/checkpoint_{number}", state(number))
    assert [(one.number, one.problem) for one in list_checkpoints(folder)] == [(0, None), (1, None)]
    assert [one.name for one in describe(f"{folder}/checkpoint_1")] == ["model", "n"]
    assert [one.place for one in compare_checkpoints(f"{folder}/checkpoint_0", f"{folder}/checkpoint_1").tensors] == [
        "model/w"
    ]
    accel_ckpt.export_checkpoint(f"{folder}/checkpoint_1", tmp_path)
    assert torch.equal(accel_ckpt.load_model_files(tmp_path)["w"], state(1)["model"]["w"])


@pytest.mark.parametrize(
    ("folder", "sizes"),
    [
        pytest.param("s3", ("20KB", "1GB")),
        *(pytest.param("s3", sizes, marks=pytest.mark.slow) for sizes in (("1GB", "20KB"), ("10KB", "20KB"))),
        *(
            pytest.param("memory", sizes, marks=pytest.mark.slow)
            for sizes in (("20KB", "1GB"), ("1GB", "20KB"), ("10KB", "20KB"))
        ),
    ],
    indirect=["folder"],
    ids=str,
)
def test_models_are_exported_to_urls_and_shards_of_earlier_exports_removed(folder: str, sizes: tuple[str, str]) -> None:
    for number, size in enumerate(sizes):
        weight = torch.full((30, 40), float(number))
        model = {f"layer{i}": weight + i for i in range(9)} | {"tied": weight, "head": weight}
        files = accel_ckpt.export_model(model, f"{folder}/out", size)
    assert set(files_in(f"{folder}/out")) - {"model.safetensors.index.json"} == {file.name for file in files}
    loaded = accel_ckpt.load_model_files(f"{folder}/out")
    assert loaded["tied"] is loaded["head"]
    assert all(torch.equal(loaded[key], value) for key, value in model.items())
    parts = accel_ckpt.load_model_parts(f"{folder}/out", {"layer3": torch.zeros(30, 40, dtype=torch.float64)})
    assert torch.equal(parts["layer3"], model["layer3"])


def test_a_checkpoint_is_exported_from_url_to_url(folder: str) -> None:
    accel_ckpt.save(f"{folder}/one", state(3))
    files = accel_ckpt.export_checkpoint(f"{folder}/one", f"{folder}/out", "50KB")
    assert [file.name for file in files] == [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    assert torch.equal(accel_ckpt.load_model_files(f"{folder}/out")["w"], state(3)["model"]["w"])
    assert accel_ckpt.export_tensors({"a": torch.ones(2)}, f"{folder}/a.safetensors") == Url(f"{folder}/a.safetensors")
    assert accel_ckpt.load_model_files(f"{folder}/a.safetensors")["a"].tolist() == [1, 1]


def test_an_export_that_is_cut_short_shows_nothing_and_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "FIRST_WAIT", 0.001)
    place, model = f"memory://cut/{next(_NUMBERS)}", {"w": torch.arange(3 * 2**20)}
    with injected("raise(EIO) at call 2 of fsspec.implementations.memory:MemoryFile.write"):
        accel_ckpt.export_model(model, place)
    assert torch.equal(accel_ckpt.load_model_files(place)["w"], model["w"])
    with (
        injected("raise(EPERM) at fsspec.implementations.memory:MemoryFileSystem.pipe_file"),
        pytest.raises(CheckpointError, match="PermissionError"),
    ):
        accel_ckpt.export_model({"other": torch.ones(2)}, place)
    assert files_in(place) == ["model.safetensors"]
    assert list(accel_ckpt.load_model_files(place)) == ["w"]


def read_together(endpoint: str, place: str, shared: bool) -> int:
    """Bytes of tensors that this rank asks the server for."""
    from accel_ckpt.loading import cooperative_read as sharing

    use_server(endpoint)
    asked: list[int] = []
    original, decides = remote.RemoteStorage.get, sharing.broadcast_is_cheaper

    def get(self: remote.RemoteStorage, file: Any, begin: int | None = None, end: int | None = None) -> bytes:
        content = original(self, file, begin, end)
        asked.append(len(content))
        return content

    remote.RemoteStorage.get, sharing.broadcast_is_cheaper = get, lambda *_, **__: shared  # type: ignore[method-assign,assignment]
    try:
        world = torch.distributed.group.WORLD
        with open_checkpoint(place, verify=False, group=world) as opened:
            values = opened.fetch({"w": None}, group=world)["w"]()
            opened.verify(group=world)
        assert torch.equal(values, torch.arange(18 * 2**20, dtype=torch.int32))
    finally:
        remote.RemoteStorage.get, sharing.broadcast_is_cheaper = original, decides  # type: ignore[method-assign]
    return sum(asked)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("shared", [True, False], ids=["one reader", "each for itself"])
def test_what_all_ranks_want_is_asked_for_once(endpoint: str, rank_pool: RankPool, shared: bool) -> None:
    """The first rounds, by which it is decided, are passed on in either case."""
    use_server(endpoint)
    fs = fsspec.filesystem("s3")
    if not fs.exists("large"):
        fs.mkdir("large")
    saved = accel_ckpt.save("s3://large/one", {"w": torch.arange(18 * 2**20, dtype=torch.int32)})
    asked = sum(rank_pool.run(read_together, endpoint, "s3://large/one", shared, ranks=2))
    beyond = (asked - saved.manifest.nbytes) / BLOCK
    assert beyond < 0.1 if shared else beyond >= 5


def save_sharded(endpoint: str, place: str) -> int:
    """Ranks with parts of one tensor, in columns, so that reading it in rows takes pieces of every file."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    use_server(endpoint)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    whole = torch.arange(60 * 80, dtype=torch.float64).view(60, 80)
    series = CheckpointDirectory(place)
    series.save({"w": distribute_tensor(whole, mesh, [Shard(1)]), "same": whole + 1})
    latest = series.latest()
    assert latest is not None
    rows = distribute_tensor(torch.zeros_like(whole), mesh, [Shard(0)])
    read = latest.read("w", like=rows)
    assert torch.equal(read.full_tensor(), whole)
    assert torch.equal(latest.read("same"), whole + 1)
    return int(read.to_local().shape[0])


def test_ranks_save_and_load_one_checkpoint(endpoint: str, rank_pool: RankPool) -> None:
    use_server(endpoint)
    fsspec.filesystem("s3").mkdir("ranks")
    place = "s3://ranks/series"
    assert rank_pool.run(save_sharded, endpoint, place, ranks=2) == [30, 30]
    found = open_checkpoint(f"{place}/checkpoint_0").read("w")
    assert torch.equal(found, torch.arange(60 * 80, dtype=torch.float64).view(60, 80))


@pytest.mark.ranks(2)
def test_memory_is_no_place_that_ranks_share(rank: int) -> None:
    with pytest.raises(CheckpointError, match="a place that all ranks share"):
        accel_ckpt.save("memory://own", {"w": torch.zeros(100_000)}, local={"rank": rank})


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.parametrize("seed", range(4))
def test_writers_killed_at_random_times_leave_complete_checkpoints(endpoint: str, seed: int) -> None:
    """Five of them each time."""
    use_server(endpoint)
    fsspec.filesystem("s3").mkdir(f"kills{seed}")
    place = f"s3://kills{seed}/series"
    CheckpointDirectory(place).save(state(0))
    import random
    import subprocess
    import sys
    import time

    script = (
        "import sys, torch, accel_ckpt, fsspec\n"
        f"fsspec.config.conf['s3'] = {{'endpoint_url': {endpoint!r}, 'key': 'test', 'secret': 'test'}}\n"
        f"series = accel_ckpt.CheckpointDirectory({place!r}, retention=accel_ckpt.keep_last(2))\n"
        "print('go', flush=True)\n"
        "for number in range(1, 1000):\n"
        "    series.save({'model': {'w': torch.full((300, 50), float(number))}, 'n': number})\n"
    )
    dice = random.Random(seed)
    for _ in range(5):
        writer = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        assert writer.stdout.readline() == "go\n"
        time.sleep(dice.random())
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        latest = CheckpointDirectory(place).latest()
        assert latest is not None
        assert latest.read("model")["w"].unique().tolist() == [float(latest.read("n"))]


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("s3://b/c/", Url("s3://b/c")),
        ("memory://x", Url("memory://x")),
        ("file:///a/b", Path("/a/b")),
        ("a/b", Path.cwd() / "a" / "b"),
        (Path("/a"), Path("/a")),
        (Url("gs://b"), Url("gs://b")),
    ],
)
def test_a_place_is_a_path_or_a_url(text: Any, place: object) -> None:
    assert locate(text) == place


def test_a_url_that_was_made_a_path_is_refused() -> None:
    with pytest.raises(CheckpointError, match="was a URL before it became a path"):
        locate(Path("s3://bucket/key"))


@pytest.mark.parametrize("text", ["s3://", "memory:///", "~nosuchuser/checkpoint"])
def test_a_place_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(CheckpointError, match=r"names no folder|the home of this user is unknown"):
        locate(text)


def test_an_unknown_protocol_names_the_nearest() -> None:
    with pytest.raises(CheckpointError, match=r"Protocol not known: memry; near it: memory"):
        open_checkpoint("memry://a/b")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tenacity", None)
    with pytest.raises(CheckpointError, match=r"tenacity.*accel-ckpt\[remote\]"):
        open_checkpoint("memory://a/b")


def test_urls_have_the_operations_of_paths_that_make_sense() -> None:
    url = Url("s3://bucket/a/b")
    assert (url.name, str(url.parent), str(url / "c"), os.fspath(url)) == (
        "b",
        "s3://bucket/a",
        "s3://bucket/a/b/c",
        "s3://bucket/a/b",
    )
    assert Url("s3://bucket").parent == Url("s3://bucket")
