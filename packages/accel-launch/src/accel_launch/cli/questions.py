"""Questionnaire of ``accel config``: the questions that depend on earlier answers, and the terminal dialogue."""

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, final

from accel_launch.config.model import settings
from accel_launch.config.setting import Setting
from accel_state.errors import ConfigError

Answers = Mapping[str, object]
_WAYS = {
    "nothing of these: one process, or DDP": None,
    "FSDP, which shards parameters, gradients and optimizer states": "use_fsdp",
    "DeepSpeed": "use_deepspeed",
    "Megatron-LM, whose models compute in place of the Transformers model": "use_megatron_lm",
}
# Keys among the answers that are not settings.
_FOUND = "accelerators of this machine"
_HAS_MEGATRON = "megatron-core is installed"
_WHERE = {"accelerators, where there are any": None, "the CPU, whatever there is": "cpu", "TPUs": "tpu"}


@final
@dataclass(frozen=True, slots=True)
class Question:
    """One question: about a setting, or (``options``) about which of several switches is on."""

    name: str
    text: str
    when: Callable[[Answers], bool] = lambda answers: True
    options: Mapping[str, str | None] | None = None


def _on(name: str) -> Callable[[Answers], bool]:
    return lambda answers: bool(answers.get(name))


def _equal(name: str, value: object) -> Callable[[Answers], bool]:
    return lambda answers: answers.get(name) == value


def _many(answers: Answers) -> bool:
    return isinstance(count := answers.get("num_machines"), int) and count > 1


def _above_one(name: str, switch: str) -> Callable[[Answers], bool]:
    return lambda answers: bool(answers.get(switch)) and isinstance(one := answers.get(name), int) and one > 1


def _elsewhere(answers: Answers) -> bool:
    return bool(answers.get("cpu") or answers.get("tpu"))


def _offers_accelerators(answers: Answers) -> bool:
    several = isinstance(count := answers.get(_FOUND), int) and count > 1
    return (several or bool(answers.get("gpu_ids"))) and not _elsewhere(answers)


def _offers(way: str | None, answers: Answers) -> bool:
    """Whether a strategy can work; Megatron-LM needs its library and a GPU."""
    return way != "use_megatron_lm" or bool(
        answers.get(_HAS_MEGATRON) and answers.get(_FOUND) and not _elsewhere(answers)
    )


QUESTIONS = (
    Question("where", "What do the processes compute on?", options=_WHERE),
    Question("num_machines", "How many machines form the job?"),
    Question("machine_rank", "Which of them is this one, from 0?", _many),
    Question("main_process_ip", "Address of machine 0, as the others reach it?", _many),
    Question("main_process_port", "A free port there?", _many),
    Question(
        "num_processes",
        "How many processes on all machines together? (empty: one per accelerator, or one where none is used)",
    ),
    Question("gpu_ids", "Which accelerators of this machine? (all, or like 0,1)", _offers_accelerators),
    Question("mixed_precision", "Which precision?"),
    Question("fp8_backend", "What computes FP8?", _equal("mixed_precision", "fp8")),
    Question("fp8_format", "Which FP8 format?", lambda a: a.get("fp8_backend") == "te"),
    Question("way", "Which of these strategies?", options=_WAYS),
    Question("fsdp_version", "Which version of FSDP?", _on("use_fsdp")),
    Question("fsdp_sharding_strategy", "What is sharded?", _on("use_fsdp")),
    Question("fsdp_auto_wrap_policy", "Which modules are gathered as a unit?", _on("use_fsdp")),
    Question(
        "fsdp_transformer_layer_cls_to_wrap",
        "Which classes are units? (with commas; empty: the model's own, or its repeated blocks)",
        _equal("fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"),
    ),
    Question("fsdp_min_num_params", "Size of a unit?", _equal("fsdp_auto_wrap_policy", "SIZE_BASED_WRAP")),
    Question("fsdp_offload_params", "Keep parameters, gradients and states on the host?", _on("use_fsdp")),
    Question("fsdp_activation_checkpointing", "Compute activations again in backward?", _on("use_fsdp")),
    Question("fsdp_cpu_ram_efficient_loading", "Load values on rank 0 only?", _on("use_fsdp")),
    Question("deepspeed_config_file", "A configuration of DeepSpeed's own? (empty: none)", _on("use_deepspeed")),
    Question("zero_stage", "Which stage of ZeRO?", lambda a: _asks_zero(a)),
    Question("offload_optimizer_device", "Where do optimizer states live?", lambda a: _asks_zero(a)),
    Question("offload_param_device", "Where do parameters live?", lambda a: a.get("zero_stage") == 3),
    Question("gradient_clipping", "Clip the gradients' norm to? (empty: no)", _on("use_deepspeed")),
    Question("megatron_lm_tp_degree", "How many tensor-parallel ranks?", _on("use_megatron_lm")),
    Question(
        "megatron_lm_sequence_parallelism",
        "Shard sequences over them, too?",
        _above_one("megatron_lm_tp_degree", "use_megatron_lm"),
    ),
    Question("megatron_lm_pp_degree", "How many pipeline stages?", _on("use_megatron_lm")),
    Question(
        "megatron_lm_num_micro_batches",
        "How many micro-batches of a batch go through them?",
        _above_one("megatron_lm_pp_degree", "use_megatron_lm"),
    ),
    Question("megatron_lm_recompute_activations", "Compute activations again in backward?", _on("use_megatron_lm")),
    Question("megatron_lm_use_distributed_optimizer", "Shard optimizer states over replicas?", _on("use_megatron_lm")),
    Question("megatron_lm_gradient_clipping", "Clip the gradients' norm to? (0: no)", _on("use_megatron_lm")),
    Question("gradient_accumulation_steps", "How many micro-batches per optimizer step?"),
    Question("dynamo_backend", "Which backend of torch.compile? (no: none)"),
    Question("dynamo_mode", "What should it optimise for?", lambda a: a.get("dynamo_backend") not in (None, "no")),
    Question("max_restarts", "How often may all processes be started again after a failure?"),
    Question("debug", "Check every collective on all ranks before it runs?"),
)
"""All questions, in order."""


def _asks_zero(answers: Answers) -> bool:
    return bool(answers.get("use_deepspeed")) and not answers.get("deepspeed_config_file")


class Asker(Protocol):
    """Source of answers; each method returns None when the user has quit."""

    def choose(self, text: str, choices: list[str], default: str) -> str | None:
        """Asks for one of ``choices``."""
        ...

    def enter(self, text: str, default: str, complaint: Callable[[str], str | None]) -> str | None:
        """Asks for a text for which ``complaint`` returns no objection."""
        ...


def ask_all(
    asker: Asker, start: Answers, *, num_accelerators: int = 0, has_megatron: bool = False
) -> dict[str, object] | None:
    """Asks all questions; returns the settings that differ from their defaults, or None when the user has quit.

    ``start`` holds the values offered instead of the defaults; ``num_accelerators`` is the number of this machine,
    which makes a choice among several accelerators possible. Megatron-LM is offered with an accelerator if
    ``has_megatron``.
    """
    answers: dict[str, object] = {**start, _FOUND: num_accelerators, _HAS_MEGATRON: has_megatron}
    for question in QUESTIONS:
        if not question.when(answers):
            continue
        given = _choose_way(asker, question, answers) if question.options else _ask(asker, question, answers)
        if given is None:
            return None
        answers |= given
    rows = settings()
    return {name: value for name, value in answers.items() if name in rows and value not in (None, rows[name].default)}


def _choose_way(asker: Asker, question: Question, answers: Answers) -> dict[str, object] | None:
    assert question.options is not None
    options = {text: name for text, name in question.options.items() if _offers(name, answers)}
    now = next((text for text, name in options.items() if name and answers.get(name)), next(iter(options)))
    chosen = asker.choose(question.text, list(options), now)
    if chosen is None:
        return None
    switches: dict[str, object] = {name: False for name in question.options.values() if name}
    name = options[chosen]
    return switches | ({name: True} if name else {})


def _ask(asker: Asker, question: Question, answers: Answers) -> dict[str, object] | None:
    row = settings()[question.name]
    now = answers.get(row.name, row.default)
    if row.type is bool:
        chosen = asker.choose(question.text, ["no", "yes"], "yes" if now else "no")
        return None if chosen is None else {row.name: chosen == "yes"}
    if row.facts.choices:
        choices = [*(["(not given)"] if row.optional else []), *row.facts.choices]
        default = str(now) if now in choices else choices[0]
        chosen = asker.choose(question.text, choices, default)
        return None if chosen is None else {row.name: None if chosen == "(not given)" else chosen}
    entered = asker.enter(question.text, "" if now is None else row.text(now), lambda text: _complaint(row, text))
    if entered is None:
        return None
    return {row.name: row.parse(entered, "your answer") if entered else None}


def _complaint(row: Setting, text: str) -> str | None:
    if not text and row.optional:
        return None
    try:
        row.parse(text, "your answer")
    except ConfigError as error:
        return str(error)
    return None


@final
class TerminalAsker:
    """Asks with arrow keys, through questionary.

    Raises:
        ConfigError: there is no terminal, or questionary is not installed.
    """

    def __init__(self) -> None:
        if not (sys.stdin.isatty() and sys.stdout.isatty()):
            raise ConfigError(
                "accel config asks its questions in a terminal, and there is none here; 'accel config default' writes "
                "a file of all settings, which 'accel config validate FILE' checks"
            )
        try:
            import questionary
        except ImportError:
            raise ConfigError(
                "accel config asks with questionary, which is not installed: pip install questionary; without it, "
                "'accel config default' writes a file of all settings"
            ) from None
        self._library: Any = questionary

    def choose(self, text: str, choices: list[str], default: str) -> str | None:
        """Asks for one of ``choices``, selected with arrow keys."""
        answer: str | None = self._library.select(text, choices=choices, default=default, qmark="").ask()
        return answer

    def enter(self, text: str, default: str, complaint: Callable[[str], str | None]) -> str | None:
        """Asks for a line of text; objections are shown below it."""

        def check(entered: str) -> bool | str:
            return complaint(entered) or True

        answer: str | None = self._library.text(text, default=default, validate=check, qmark="").ask()
        return answer


def shown_answers(answers: Answers) -> Iterator[tuple[str, object]]:
    """Answers in the order of the settings table."""
    for name in settings():
        if name in answers:
            yield name, answers[name]
