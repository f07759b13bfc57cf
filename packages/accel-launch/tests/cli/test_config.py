"""The questions of ``accel config``, the files that it writes, and the commands that read such files."""

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from accel_launch.cli.app import run
from accel_launch.cli.config import file_text, quoted, replace_file
from accel_launch.cli.questions import QUESTIONS, ask_all
from accel_launch.cli.to_fsdp2 import convert
from accel_launch.config import resolve_config, settings
from accel_state.errors import ConfigError

DOWN = "\x1b[B"


class Scripted:
    """Answers from a table, by the start of the question; everything else gets its default."""

    def __init__(self, answers: dict[str, str]) -> None:
        self.answers = answers
        self.asked: list[str] = []
        self.choices: list[str] = []

    def _answer(self, text: str, default: str) -> str:
        self.asked.append(text)
        return next((answer for start, answer in self.answers.items() if text.startswith(start)), default)

    def choose(self, text: str, choices: list[str], default: str) -> str | None:
        assert default in choices
        self.choices += choices
        answer = self._answer(text, default)
        (chosen,) = [choice for choice in choices if choice.startswith(answer)][:1]
        return chosen

    def enter(self, text: str, default: str, complaint: Callable[[str], str | None]) -> str | None:
        answer = self._answer(text, default)
        assert complaint(answer) is None
        return answer


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ({}, {}),
        (
            {"What do the processes": "the CPU", "How many processes": "4", "Which precision": "bf16"},
            {"cpu": True, "num_processes": 4, "mixed_precision": "bf16"},
        ),
        (
            {"How many machines": "2", "Which of them": "1", "Address": "10.0.0.1", "A free port": "29500"},
            {"num_machines": 2, "machine_rank": 1, "main_process_ip": "10.0.0.1", "main_process_port": 29500},
        ),
        (
            {"Which of these": "FSDP", "Which modules": "TRANSFORMER", "Which classes": "Block", "Keep param": "yes"},
            {
                "use_fsdp": True,
                "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                "fsdp_transformer_layer_cls_to_wrap": "Block",
                "fsdp_offload_params": True,
            },
        ),
        (
            {"Which of these": "DeepSpeed", "Which stage": "3", "Where do parameters": "cpu", "Clip": "1.0"},
            {"use_deepspeed": True, "zero_stage": 3, "offload_param_device": "cpu", "gradient_clipping": 1.0},
        ),
        (
            {"Which precision": "fp8", "What computes": "te", "Which FP8": "E4M3"},
            {"mixed_precision": "fp8", "fp8_backend": "te", "fp8_format": "E4M3"},
        ),
    ],
)
def test_answers_become_settings(answers: dict[str, str], expected: dict[str, object]) -> None:
    assert ask_all(Scripted(answers), {}) == expected


def test_only_what_follows_from_the_answers_is_asked() -> None:
    plain = Scripted({})
    ask_all(plain, {})
    assert not [text for text in plain.asked if "FSDP?" in text or "ZeRO" in text or "Address" in text]


@pytest.mark.parametrize(
    ("count", "answer", "asked"), [(0, "accel", False), (1, "accel", False), (2, "accel", True), (2, "the CPU", False)]
)
def test_accelerators_are_offered_where_there_are_several(count: int, answer: str, asked: bool) -> None:
    plain = Scripted({"What do the processes": answer})
    ask_all(plain, {}, num_accelerators=count)
    assert any(text.startswith("Which accelerators") for text in plain.asked) == asked


@pytest.mark.parametrize(
    ("count", "has_megatron", "where"),
    [(0, True, "accel"), (1, False, "accel"), (1, True, "the CPU"), (1, True, "TPUs")],
)
def test_a_backend_that_cannot_work_is_neither_offered_nor_kept(count: int, has_megatron: bool, where: str) -> None:
    asker = Scripted({"What do the processes": where})
    answers = ask_all(asker, {"use_megatron_lm": True}, num_accelerators=count, has_megatron=has_megatron)
    assert answers is not None
    assert "use_megatron_lm" not in answers
    assert not any("Megatron-LM" in choice for choice in asker.choices)
    assert not any("tensor-parallel" in text for text in asker.asked)


def test_megatron_is_offered_with_its_library_and_a_gpu() -> None:
    plain = Scripted({"Which of these": "Megatron-LM"})
    assert ask_all(plain, {}, num_accelerators=8, has_megatron=True) == {"use_megatron_lm": True}
    assert not any("over them" in text or "go through them" in text for text in plain.asked)
    divided = Scripted(
        {"Which of these": "Megatron-LM", "How many tensor": "2", "Shard seq": "yes", "How many pipe": "4"}
    )
    assert ask_all(divided, {}, num_accelerators=8, has_megatron=True) == {
        "use_megatron_lm": True,
        "megatron_lm_tp_degree": 2,
        "megatron_lm_sequence_parallelism": True,
        "megatron_lm_pp_degree": 4,
    }
    assert any("go through them" in text for text in divided.asked)


def test_every_question_is_about_a_setting_or_a_choice_of_switches() -> None:
    for question in QUESTIONS:
        names = [name for name in (question.options or {}).values() if name] or [question.name]
        assert set(names) <= set(settings())


def test_what_stands_in_the_file_is_offered() -> None:
    start = {"use_fsdp": True, "fsdp_version": 1, "num_processes": 8}
    assert ask_all(Scripted({}), start) == start


def test_without_a_terminal_it_says_what_to_do(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "accel", "config"],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "asks its questions in a terminal" in done.stderr
    assert "accel config default" in done.stderr
    assert not list(tmp_path.iterdir())


@contextmanager
def in_terminal(
    command: list[str], folder: Path, variables: dict[str, str]
) -> Iterator[tuple[int, "subprocess.Popen[bytes]"]]:
    """A command in a real terminal, and the file that types into it and reads from it; it is killed at the end."""
    control, terminal = pty.openpty()
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, **variables},
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
    )
    os.close(terminal)
    try:
        yield control, process
    finally:
        process.kill()
        process.wait()
        os.close(control)


def talk(folder: Path, answers: list[tuple[str, str]]) -> tuple[int, str]:
    """Runs ``accel config`` in a real terminal and answers its questions by keys; what follows gets the enter key."""
    variables = {"PROMPT_TOOLKIT_NO_CPR": "1", "TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
    seen, position, deadline = "", 0, time.monotonic() + 120
    left = [question.text for question in QUESTIONS] + ["Write this to"]
    with in_terminal([sys.executable, "-m", "accel", "config"], folder, variables) as (control, process):
        while time.monotonic() < deadline:
            ready, _, _ = select.select([control], [], [], 0.2)
            if ready:
                try:
                    data = os.read(control, 65536)
                except OSError:
                    break  # the terminal's other end is closed
                if not data:
                    break
                seen += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", data.decode(errors="replace"))
            # An answered question is drawn once more, so only those that come after it are waited for.
            new = next((place for place, text in enumerate(left) if text[:24] in seen[position:]), None)
            if new is not None:
                text, left, position = left[new], left[new + 1 :], len(seen)
                keys = next((keys for start, keys in answers if text.startswith(start)), "\r")
                os.write(control, keys.encode())
        return process.wait(timeout=120), seen


def test_questions_are_answered_in_a_real_terminal(tmp_path: Path) -> None:
    answers = [
        ("What do the processes compute on", DOWN + "\r"),
        ("How many processes", "2\r"),
        ("Which precision", DOWN * 2 + "\r"),
        ("Which of these strategies", DOWN + "\r"),
    ]
    status, seen = talk(tmp_path, answers)
    assert status == 0, seen
    summary = seen[: seen.rindex("Write this to")]
    assert re.search(r"setting +value\s.*cpu +true\s.*num_processes +2\s", summary, re.DOTALL), seen
    assert "wrote accel.yaml" in seen
    assert yaml.safe_load((tmp_path / "accel.yaml").read_text()) == {
        "mixed_precision": "bf16",
        "cpu": True,
        "num_processes": 2,
        "use_fsdp": True,
    }


def test_leaving_writes_nothing(tmp_path: Path) -> None:
    status, seen = talk(tmp_path, [("What do the processes compute on", "\x03")])
    assert status == 130, seen
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["no", "1e3", "a: b", "#x", "", "12", "null", "a'b", "-", "true", "2:3", "{", "é"])
def test_texts_come_back_as_they_were(text: str) -> None:
    assert yaml.safe_load(f"x: {quoted(text)}")["x"] == text


@pytest.mark.parametrize("name", list(settings()))
def test_a_written_file_means_what_was_written(name: str, tmp_path: Path) -> None:
    row = settings()[name]
    value = (
        row.facts.choices[-1]
        if row.facts.choices
        else {bool: not row.default, int: 1, float: 0.5, str: "a b"}.get(row.type, "90s")
    )
    config = resolve_config({name: value}, {})
    path = tmp_path / "mine.yaml"
    path.write_text(file_text(config))
    assert resolve_config({}, {}, path) == config


@pytest.mark.parametrize("seconds", ["0.001", "90.5", "123456.75", "1234567", "2592000"])
def test_a_written_duration_is_the_one_that_was_given(seconds: str, tmp_path: Path) -> None:
    config = resolve_config({"timeout": seconds}, {})
    path = tmp_path / "mine.yaml"
    path.write_text(file_text(config))
    assert f"timeout: {seconds}s\n" in path.read_text()
    assert resolve_config({}, {}, path) == config


def test_default_takes_values(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    assert run(["config", "default", "--output", str(path), "--mixed_precision", "bf16", "--use_fsdp"]) == 0
    config = resolve_config({}, {}, path)
    assert (config.mixed_precision, config.use_fsdp) == ("bf16", True)


def test_update_writes_accelerates_files_in_our_names_and_keeps_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "theirs.yaml"
    theirs = "distributed_type: FSDP\nfp16: true\nnum_processes: 4\nfsdp_config:\n  sharding_strategy: SHARD_GRAD_OP\n"
    path.write_text(theirs)
    before = resolve_config({}, {}, path)
    assert run(["config", "update", str(path)]) == 0
    assert resolve_config({}, {}, path) == before
    assert yaml.safe_load(path.read_text()) == {
        "mixed_precision": "fp16",
        "num_processes": 4,
        "use_fsdp": True,
        "fsdp_sharding_strategy": "SHARD_GRAD_OP",
    }
    assert (tmp_path / "theirs.yaml.bak").read_text() == theirs


def test_update_of_a_file_with_a_mistake_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "theirs.yaml"
    path.write_text("sede: 1\n")
    assert run(["config", "update", str(path)]) == 2
    assert "theirs.yaml:1" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["theirs.yaml"]


def test_a_link_stays_and_the_file_behind_it_keeps_its_permissions(tmp_path: Path) -> None:
    folder, link = tmp_path / "shared", tmp_path / "mine.yaml"
    folder.mkdir()
    file = folder / "settings.yaml"
    link.symlink_to(Path("shared") / file.name)
    replace_file(link, "seed: 1\n")
    file.chmod(0o640)
    replace_file(link, "seed: 2\n")
    assert link.is_symlink()
    assert file.read_text() == "seed: 2\n"
    assert file.stat().st_mode & 0o777 == 0o640
    assert [one.name for one in folder.iterdir()] == [file.name]


@pytest.mark.parametrize("command", [["to-fsdp2", "--overwrite", "--config_file"], ["config", "update"]])
def test_what_is_no_regular_file_is_written_to(command: list[str], tmp_path: Path) -> None:
    source, pipe = tmp_path / "one.yaml", tmp_path / "pipe"
    source.write_text("fsdp_config: {fsdp_offload_params: true}\n")
    os.mkfifo(pipe)
    option = "--output_file" if command[0] == "to-fsdp2" else "--output"
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert run([*command, str(source), option, str(pipe)]) == 0
        assert b"fsdp_offload_params: true\n" in os.read(reader, 4096)
    finally:
        os.close(reader)
    assert pipe.is_fifo()
    assert sorted(one.name for one in tmp_path.iterdir()) == ["one.yaml", "pipe"]


def test_a_file_that_cannot_be_written_is_named_and_leaves_nothing_behind(tmp_path: Path) -> None:
    for target, reason in ((tmp_path, "Is a directory"), (tmp_path / "absent" / "one.yaml", "No such file")):
        with pytest.raises(ConfigError, match=f"cannot write {re.escape(str(target))}: {reason}"):
            replace_file(target, "seed: 1\n")
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------------------------------------------- to-fsdp2


@pytest.mark.parametrize(
    ("strategy", "reshard"),
    [
        ("FULL_SHARD", True),
        ("SHARD_GRAD_OP", False),
        ("HYBRID_SHARD", True),
        ("HYBRID_SHARD_ZERO2", False),
        ("NO_SHARD", False),
        (1, True),
        (2, False),
    ],
)
def test_a_strategy_becomes_what_happens_after_forward(strategy: object, reshard: bool) -> None:
    made, notes = convert({"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": strategy}})
    assert made == {
        "distributed_type": "FSDP",
        "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": reshard},
    }
    assert len(notes) == 1


KEPT = {
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_offload_params": False,
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    "fsdp_transformer_layer_cls_to_wrap": "Block",
    "fsdp_min_num_params": 3,
    "fsdp_activation_checkpointing": True,
    "fsdp_custom": 1,
}


@pytest.mark.parametrize("key", KEPT)
def test_what_version_2_has_too_is_kept(key: str) -> None:
    made, _ = convert({"fsdp_config": {key: KEPT[key]}})
    assert made["fsdp_config"] == {"fsdp_version": 2, key: KEPT[key]}


@pytest.mark.parametrize(
    "key", ["fsdp_backward_prefetch", "fsdp_sync_module_states", "fsdp_use_orig_params", "fsdp_forward_prefetch"]
)
def test_what_version_2_does_by_itself_is_left_out_and_said(key: str) -> None:
    made, notes = convert({"fsdp_config": {key: "x"}})
    assert made["fsdp_config"] == {"fsdp_version": 2}
    assert key in notes[0]


def test_other_files_stay_as_they_are() -> None:
    for data in ({"num_processes": 2}, {"fsdp_config": {"fsdp_version": 2, "fsdp_offload_params": True}}):
        made, notes = convert(data)
        assert made == data
        assert "nothing was changed" in notes[0]


def test_keys_that_are_no_settings_keep_their_names() -> None:
    made, _ = convert({"fsdp_config": {"mine": 1, "offload_params": True}})
    assert made["fsdp_config"] == {"fsdp_version": 2, "mine": 1, "fsdp_offload_params": True}


def test_our_own_flat_files_are_converted_too() -> None:
    made, _ = convert({"use_fsdp": True, "fsdp_version": 1, "fsdp_sharding_strategy": "SHARD_GRAD_OP"})
    assert made == {"fsdp_version": 2, "use_fsdp": True, "fsdp_reshard_after_forward": False}


def test_a_strategy_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="SHARD_ALL"):
        convert({"fsdp_config": {"fsdp_sharding_strategy": "SHARD_ALL"}})


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--config_file", "one.yaml"], "--output_file PATH, or --overwrite"),
        (["--config_file", "absent.yaml", "--output_file", "x.yaml"], "cannot read absent.yaml"),
        (["--config_file", "one.yaml", "--output_file", "two.yaml"], "two.yaml exists"),
        (["--config_file", "empty.yaml", "--output_file", "x.yaml"], "empty.yaml is empty; expected lines of the form"),
        (["--config_file", "list.yaml", "--output_file", "x.yaml"], "list.yaml is a list; expected lines of the form"),
        (["--config_file", "word.json", "--output_file", "x.yaml"], "word.json is the single value 'seed'; expected"),
    ],
)
def test_to_fsdp2_refuses_to_guess(
    argv: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("one.yaml", "two.yaml"):
        Path(name).write_text("fsdp_config: {fsdp_version: 1}\n")
    Path("empty.yaml").write_text("")
    Path("list.yaml").write_text("- seed\n")
    Path("word.json").write_text('"seed"')
    assert run(["to-fsdp2", *argv]) == 2
    assert words in capsys.readouterr().err


def test_to_fsdp2_writes_the_file(tmp_path: Path) -> None:
    path = tmp_path / "one.yaml"
    path.write_text("distributed_type: FSDP\nfsdp_config:\n  sharding_strategy: 1\n  backward_prefetch: BACKWARD_PRE\n")
    assert run(["to-fsdp2", "--config_file", str(path), "--overwrite"]) == 0
    config = resolve_config({}, {}, path)
    assert (config.use_fsdp, config.fsdp_version, config.fsdp_reshard_after_forward) == (True, 2, "true")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", shell]) == 0
    assert f"_ACCEL_COMPLETE={shell}_complete" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("accel la", ["launch"]),
        ("accel config sc", ["schema"]),
        ("accel launch --fsdp_sharding_str", ["--fsdp_sharding_strategy"]),
        ("accel launch --mixed_precision bf16-", ["bf16-true"]),
        ("accel launch --mixed-precision bf16-", ["bf16-true"]),
        ("accel launch --fsdp-sharding-str", ["--fsdp-sharding-strategy"]),
    ],
)
def test_commands_options_and_values_are_completed(words: str, expected: list[str]) -> None:
    env = dict(os.environ) | {"_ACCEL_COMPLETE": "bash_complete", "COMP_WORDS": words}
    env["COMP_CWORD"] = str(len(words.split()) - 1)
    done = subprocess.run([sys.executable, "-m", "accel"], env=env, capture_output=True, text=True)
    assert [line.partition(",")[2] for line in done.stdout.splitlines()] == expected


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("accel launch tra", "accel launch train.py"),
        ("accel launch --cpu train.py da", "accel launch --cpu train.py data.txt"),
        ("accel launch --config_file my", "accel launch --config_file my.yaml"),
        ("accel launch --num-proc", "accel launch --num-processes"),
        ("accel report ru", "accel report runs/"),
        ("accel ckpt ls ru", "accel ckpt ls runs/"),
        ("accel explain tra", "accel explain train.py"),
    ],
)
@pytest.mark.sampled(2)
def test_a_shell_with_the_script_still_completes_files(typed: str, completed: str, tmp_path: Path) -> None:
    for name in ("train.py", "data.txt", "my.yaml"):
        (tmp_path / name).touch()
    (tmp_path / "runs").mkdir()
    bin_folder = tmp_path / ".bin"
    bin_folder.mkdir()
    command = bin_folder / "accel"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m accel "$@"\n')
    command.chmod(0o755)
    variables = {"PATH": f"{bin_folder}:{os.environ['PATH']}", "TERM": "dumb", "PS1": "$ "}
    with in_terminal(["bash", "--norc", "--noprofile", "-i"], tmp_path, variables) as (control, _):
        setup = 'bind "set enable-bracketed-paste off"; eval "$(accel completion bash)"'
        os.write(control, f"{setup}\n{typed}\t".encode())
        said = ""
        deadline = time.monotonic() + 60
        while completed not in said and time.monotonic() < deadline:
            if select.select([control], [], [], 1)[0]:
                said += os.read(control, 4096).decode()
        assert completed in said
