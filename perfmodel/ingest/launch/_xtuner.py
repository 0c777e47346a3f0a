"""XTuner's Python configurations (`xtuner/configs` of InternLM/xtuner); only plain data is read, no
code is run.

A configuration assigns numbers, names and nested `dict(...)`. Nothing of it is executed: its syntax
tree is read, names stand for what was assigned to them before, and every other expression stays
unknown.
"""

import ast
from collections.abc import Callable, Mapping
from itertools import product
from typing import Any, Final

from perfmodel.ingest.launch._adapters import peft_fields
from perfmodel.ingest.launch._entries import Entries, Entry, Source, broken
from perfmodel.ingest.launch._finetuning import (
    Adapters,
    accumulation_fields,
    is_on,
    objective_fields,
    optimizer_fields,
    padding_note,
    sharded_sequences,
    torch_framework,
)
from perfmodel.ingest.launch._format import LaunchFormat, patterns
from perfmodel.ingest.launch._python_values import (
    LARGEST,
    MISSING,
    calculated_number,
    parsed_module,
)
from perfmodel.ingest.launch._table import TEXT, Fields, Rule, read_only, words
from perfmodel.ingest.launch._trainer import WORLD_RULE

_ROUNDING: Final[Mapping[str, Callable[[Any], Any]]] = {"int": int, "float": float, "round": round}
"""Functions of one number that configurations apply to sizes: `int(2048 - (336 / 14) ** 2)`."""
_HIGHEST_POWER: Final = 8
"""Highest accepted exponent; larger powers are not sizes and would fill the memory."""


def read_python(text: str, place: str) -> Source:
    """Entries of a Python file that only assigns: nested dictionaries have keys with dots.

    Raises:
        LaunchFileError: the text is not Python.
    """
    module = parsed_module(text, place)
    values: dict[str, Any] = {}
    lines: dict[str, int] = {}
    notes: list[str] = []
    # Only the top level is read: what stands in a function or behind a condition depends on a run.
    for statement in module.body:
        target, value = _assignment(statement)
        if target is None or value is None:
            if isinstance(statement, (ast.If, ast.For, ast.With, ast.While)):
                notes.append(
                    f"line {statement.lineno}: perfmodel does not run code, so settings that depend on this "
                    "line are not read"
                )
            continue
        try:
            values[target] = _value(value, values)
        except RecursionError:
            raise broken(
                place, statement.lineno, "nested too deeply; this is not a launch file"
            ) from None
        lines[target] = statement.lineno
    entries: dict[str, Entry] = {}
    for name, value in values.items():
        _add(entries, name, value, lines[name])
    return Source(place=place, entries=entries, notes=tuple(notes))


def plain_value(value: ast.expr | str, known: Mapping[str, Any] | None = None) -> Any:
    """The value of a Python literal, or of a setting on a command line.

    Args:
        value: the expression, or its text; a text that is not an expression stands for itself.
        known: values of names.
    """
    if isinstance(value, ast.expr):
        return _value(value, known or {})
    constants = {"true": True, "false": False, "null": None}
    if value.lower() in constants:
        return constants[value.lower()]
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return value


def _assignment(statement: ast.stmt) -> tuple[str | None, ast.expr | None]:
    """Name and value of `NAME = VALUE` and of `NAME *= VALUE`; None for other statements."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target = statement.targets[0]
        return (target.id, statement.value) if isinstance(target, ast.Name) else (None, None)
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        return statement.target.id, statement.value
    if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
        # `batch_size *= 2` is read as `batch_size = batch_size * 2`.
        before = ast.Name(statement.target.id, ast.Load())
        return statement.target.id, ast.BinOp(before, statement.op, statement.value)
    return None, None


def _value(node: ast.expr, known: Mapping[str, Any]) -> Any:
    """Return the value of an expression; one that is not data stays as text in `$( )`, which counts
    as undefined."""
    match node:
        case ast.Constant():
            return node.value
        case ast.Name():
            # Names that nothing assigned are classes and functions: the name itself says which
            # optimizer or type it is.
            return known.get(node.id, node.id)
        case ast.Attribute():
            return ast.unparse(node)
        case ast.List() | ast.Tuple():
            return [_value(element, known) for element in node.elts]
        case ast.Dict():
            return {
                str(_value(key, known)): _value(value, known)
                for key, value in zip(node.keys, node.values, strict=True)
                if key is not None
            }
        case ast.Call(func=ast.Name(id="dict")):
            return {
                word.arg: _value(word.value, known)
                for word in node.keywords
                if word.arg is not None
            }
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in _ROUNDING:
            number = _value(argument, known)
            is_finite = isinstance(number, (int, float)) and abs(number) < LARGEST
            return _ROUNDING[name](number) if is_finite else _unknown(node)
        case ast.UnaryOp(op=ast.USub()):
            operand = _value(node.operand, known)
            return -operand if isinstance(operand, (int, float)) else _unknown(node)
        case ast.BinOp():
            return _result(node, _value(node.left, known), _value(node.right, known))
        case _:
            return _unknown(node)


def _result(node: ast.BinOp, lhs: Any, rhs: Any) -> Any:
    """A sum, product, quotient or power of numbers."""
    # A text times a number would be repeated: a stranger's file must not fill the memory.
    if not all(isinstance(operand, (int, float)) for operand in (lhs, rhs)):
        return _unknown(node)
    result = calculated_number(node.op, lhs, rhs, _HIGHEST_POWER)
    return _unknown(node) if result is MISSING else result


def _unknown(node: ast.expr) -> str:
    return f"$({' '.join(ast.unparse(node).split())[:80]})"


def _add(entries: dict[str, Entry], name: str, value: Any, line: int) -> None:
    """Add a value, or the values of a dictionary under dotted names."""
    if not isinstance(value, dict) or not value:
        entries[name] = Entry(value, line)
        return
    for key, inner in value.items():
        _add(entries, f"{name}.{key}", inner, line)


_NAMES: Final = ("model.llm.pretrained_model_name_or_path", "pretrained_model_name_or_path")
_WHOLE: Final = "model.model_path"
_BATCHES: Final = (
    "train_dataloader.batch_size",
    "batch_size",
    "optim_wrapper.accumulative_counts",
    "accumulative_counts",
)
_OPTIMIZERS: Final = ("optim_wrapper.optimizer.type", "optim_type")
_LORA_TABLES: Final = ("model.lora.", "model.llm_lora.")
"""Tables of adapters: of a language model alone, and of one with a vision tower."""
_LORA_SETTINGS: Final = (
    "type",
    "r",
    "target_modules",
    "lora_dropout",
    "use_dora",
    "modules_to_save",
    "layers_to_transform",
)
_LORA_KEYS: Final = tuple(
    table + setting for table, setting in product(_LORA_TABLES, _LORA_SETTINGS)
)
_QUANTIZED: Final = (
    "model.quantization_llm",
    "model.llm.quantization_config.load_in_4bit",
    "model.llm.quantization_config.load_in_8bit",
)
_TYPES: Final = ("optim_wrapper.dtype", "model.llm.torch_dtype")
_TORCH_TYPES: Final = words(
    {
        "float16": "fp16",
        "bfloat16": "bf16",
        "float32": "fp32",
        "torch.float16": "fp16",
        "torch.bfloat16": "bf16",
        "torch.float32": "fp32",
    }
)


def _first_of(settings: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((settings[name] for name in names if name in settings), None)


def _batches(settings: Mapping[str, Any]) -> Fields:
    # The nested value counts, because it is the one passed to the runner.
    stated = {
        "micro": _first_of(settings, _BATCHES[:2]),
        "passes": _first_of(settings, _BATCHES[2:]),
    }
    stated = {name: value for name, value in stated.items() if value is not None}
    return accumulation_fields(stated, "micro", "passes", 1)


_VISION: Final = "model.visual_encoder.pretrained_model_name_or_path"


def _vision(settings: Mapping[str, Any]) -> Fields:
    return {
        "doubt.vision": f"the model may be wrong: the vision tower {settings[_VISION]} and its projector are left out; "
        "only the language model is counted"
    }


def _frozen(settings: Mapping[str, Any]) -> Fields:
    """Frozen language models, in the stages of LLaVA that train only the projector."""
    if not is_on(settings.get("model.freeze_llm")) or "model.llm_lora.type" in settings:
        return {}
    return {
        "doubt.trained": (
            "the training method may be wrong: freeze_llm freezes the language model, but the prediction trains it"
        )
    }


_PREFERENCES: Final = ("model.beta", "loss_beta", "model.loss_type", "reward_token_id")


def _objective(settings: Mapping[str, Any]) -> Fields:
    """DPO, ORPO and reward models, which are model classes here; names of classes are all that a
    file tells of them."""
    fields = objective_fields(settings.get("model.type", ""), "model.type")
    if fields or not settings.keys() - {"model.type"}:
        return fields
    return objective_fields("reward", "model.type")


def _tower_within(settings: Mapping[str, Any]) -> Fields:
    """Models of several parts in one folder (InternVL)."""
    name = settings[_WHOLE]
    return {
        "model": TEXT.read(name),
        "doubt.vision": f"the model may be wrong: {name} has a vision tower; only a language model can be given with "
        "--model",
    }


def _has_keys_of(table: str, settings: Mapping[str, Any]) -> bool:
    return any(name.startswith(table) for name in settings)


def _adapters(settings: Mapping[str, Any]) -> Fields:
    """LoRA, if the model has a configuration of it; frozen weights may be quantized."""
    # Without adapters quantized weights say nothing: such a configuration serves a model.
    if not any(name in settings for name in _LORA_KEYS):
        return {}
    table = next(table for table in _LORA_TABLES if _has_keys_of(table, settings))
    tower_is_quantized, four_bits, eight_bits = (is_on(settings.get(name)) for name in _QUANTIZED)
    bits = 8 if eight_bits else 0
    if four_bits or tower_is_quantized:
        bits = 4
    adapters = Adapters(
        rank=settings.get(f"{table}r", 8),
        targets=settings.get(f"{table}target_modules", "all-linear"),
        dropout=settings.get(f"{table}lora_dropout", 0),
        bits=bits,
    )
    return adapters.fields | peft_fields(
        {name.removeprefix(table): value for name, value in settings.items()}
    )


def is_xtuner(entries: Entries) -> bool:
    """Whether settings with a model's path are XTuner's, which state the class of the model too."""
    return _WHOLE not in entries or "model.type" in entries


XTUNER: Final = LaunchFormat(
    name="xtuner",
    syntax="python",
    frameworks=("xtuner",),
    framework=torch_framework,
    marks=("model.llm.*", _WHOLE),
    table=(
        WORLD_RULE,
        Rule(keys=(_WHOLE,), read=_tower_within, fields=("model",)),
        Rule(keys=("model.type", *_PREFERENCES), read=_objective),
        Rule(
            keys=_NAMES,
            read=lambda settings: {"model": TEXT.read(_first_of(settings, _NAMES))},
            fields=("model",),
        ),
        Rule(keys=_BATCHES, read=_batches, fields=("micro_batch",)),
        # Configurations assign their numbers to names at the top and use these
        # in nested dictionaries below: either place says them.
        read_only("max_length", "seq_len"),
        Rule(
            keys=("pack_to_max_length", "max_length"),
            read=lambda settings: padding_note(
                "max_length", is_on(settings.get("pack_to_max_length"))
            ),
        ),
        Rule(
            keys=_TYPES,
            read=lambda settings: {"dtype": _TORCH_TYPES.read(_first_of(settings, _TYPES))},
            fields=("dtype",),
            defaults={"dtype": "fp16"},
        ),
        Rule(
            keys=_OPTIMIZERS,
            read=lambda settings: optimizer_fields(_first_of(settings, _OPTIMIZERS)),
        ),
        Rule(keys=(*_LORA_KEYS, *_QUANTIZED), read=_adapters, fields=("adapter_rank",)),
        Rule(keys=(_VISION,), read=_vision, optional=(_VISION,)),
        Rule(keys=("model.freeze_llm", "model.llm_lora.type"), read=_frozen),
        Rule(
            keys=("model.use_activation_checkpointing",),
            fields=("recompute",),
            defaults={"recompute": "full"},
            read=lambda settings: {
                "recompute": "full" if is_on(next(iter(settings.values()))) else "none"
            },
        ),
        Rule(
            keys=("sequence_parallel_size",),
            fields=("cp",),
            read=lambda settings: sharded_sequences(settings["sequence_parallel_size"], "ulysses"),
        ),
    ),
    harmless=patterns(
        "*path* *dataset* *dataloader* *prompt* *hook* *evaluation* *scheduler* train_cfg.* env_cfg.*",
        "loss_type penalty_type model.penalty_type model.label_smoothing *packed_length",
        "visualizer* log_* load_from resume randomness.* tokenizer.* *epochs* lr betas weight_decay max_norm",
        "warmup_ratio save_* SYSTEM sampler* model.type *type model.llm.* model.lora.* model.llm_lora.*",
        "optim_wrapper.*",
        "use_varlen_attn model.use_varlen_attn *_train* *data* *alpaca* *map_fn* default_* max_iters val_cfg*",
        "test_cfg* work_dir launcher alpaca_* deepspeed config <script> *.tokenizer.* *.max_length *_en*",
        "*_zh* *image_folder* image_processor.* *pretrained_pth* model.freeze_* model.visual_encoder.*",
    ),
)
