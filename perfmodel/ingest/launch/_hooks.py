"""Lines of Python to paste into a training script; they write the framework's parsed arguments to
JSON.

They run beside the framework, so that no shell is followed and nothing is guessed; `_hook_file`
reads what they write.
"""

from typing import Final

from perfmodel.errors import UnknownNameError

_HEAD: Final = '''\
# perfmodel hook {name}
# {place}
# The run writes args.json; then: perfmodel predict --from args.json --cluster NAME
import dataclasses, json, os, sys


def perfmodel_plain(value):
    """Convert a value for JSON: a configuration becomes its fields, a function or enumeration its name."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {{field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}}
        return {{"_target_": type(value).__qualname__, **perfmodel_plain(fields)}}
    if isinstance(value, dict):
        return {{str(key): perfmodel_plain(item) for key, item in value.items()}}
    if isinstance(value, (list, tuple, set)):
        return [perfmodel_plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    name = getattr(value, "name", getattr(value, "__name__", None))
    return name if isinstance(name, str) else str(value)


def perfmodel_defaults(config):
    """Return the default of every field of a configuration."""
    defaults = {{}}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name, None)
        if dataclasses.is_dataclass(value):
            defaults[field.name] = perfmodel_defaults(value)
        elif field.default is not dataclasses.MISSING:
            defaults[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            defaults[field.name] = field.default_factory()
    return defaults


def perfmodel_dump(settings, defaults, **further):
    """Write args.json, from rank 0 alone."""
    if os.environ.get("RANK", "0") == "0":
        content = {{
            "perfmodel_hook": "{name}",
            "program": os.path.basename(sys.argv[0]),
            "devices": int(os.environ.get("WORLD_SIZE", "1")),
            "settings": settings, "defaults": defaults, **further,
        }}
        with open("args.json", "w") as file:
            json.dump(perfmodel_plain(content), file, indent=1)


'''
"""First lines of all hooks; names begin with `perfmodel_` to avoid collisions in the user's
script."""

_FIDDLE: Final = '''\
import fiddle


def perfmodel_built(config, chosen):
    """Return the arguments that a recipe sets (chosen), or those that it leaves at their defaults."""
    if not isinstance(config, fiddle.Buildable):
        return config
    stated = fiddle.ordered_arguments(config)
    every = fiddle.ordered_arguments(config, include_defaults=True)
    nested = {name: value for name, value in every.items() if isinstance(value, fiddle.Buildable)}
    names = every if chosen else [name for name in every if name not in stated]
    return {name: perfmodel_built(every[name], chosen) for name in (*names, *nested)}


'''
HOOKS: Final[dict[str, tuple[str, str]]] = {
    # A parser without arguments gives the defaults, which distinguishes them from what the user
    # set.
    "megatron": (
        "Megatron-LM or Megatron-Core: after initialize_megatron(), as in pretrain() of megatron/training/training.py",
        """\
import argparse
from megatron.training import get_args
from megatron.training.arguments import add_megatron_arguments

perfmodel_parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
perfmodel_dump(vars(get_args()), vars(perfmodel_parser.parse_args([])))
""",
    ),
    # A configuration is a tree of dataclasses, which hold their defaults themselves.
    "megatron-bridge": (
        "Megatron-Bridge: before pretrain(config=cfg, ...), where cfg is the ConfigContainer",
        "perfmodel_dump(cfg, perfmodel_defaults(cfg))\n",
    ),
    # Fiddle's recipes are not built yet, so their settings can be told apart from the defaults of
    # their classes.
    "nemo": (
        "NeMo 2: after recipe = ...pretrain_recipe(...) and the lines that change it, before it is run",
        _FIDDLE + "perfmodel_dump(perfmodel_built(recipe, True), perfmodel_built(recipe, False))\n",
    ),
    "torchtitan": (
        "torchtitan: in train.py after config = config_manager.parse_args()",
        "perfmodel_dump(config, perfmodel_defaults(config))\n",
    ),
    # DeepSpeed's file as it was read, without defaults: every key in it is the user's. The model is
    # that of the script.
    "deepspeed": (
        "DeepSpeed: after model_engine, ... = deepspeed.initialize(...)",
        """\
perfmodel_config = getattr(model_engine.module, "config", None)
perfmodel_dump(
    model_engine._config._param_dict, {},
    model_config=perfmodel_config.to_dict() if hasattr(perfmodel_config, "to_dict") else {},
)
""",
    ),
    # Settings of DeepSpeed and adapters of peft are not arguments of the Trainer and are taken from
    # their own objects.
    "hf-trainer": (
        "Hugging Face's Trainer (and trl's): after trainer = Trainer(...), before trainer.train()",
        """\
perfmodel_settings = trainer.args.to_dict()
if getattr(trainer.args, "hf_deepspeed_config", None) is not None:
    perfmodel_settings["deepspeed"] = trainer.args.hf_deepspeed_config.config
perfmodel_peft = getattr(trainer.model, "peft_config", {}).get("default")
if perfmodel_peft is not None:
    perfmodel_settings["lora_r"] = perfmodel_peft.r
    perfmodel_settings["lora_dropout"] = perfmodel_peft.lora_dropout
    perfmodel_settings["lora_target_modules"] = sorted(perfmodel_peft.target_modules)
perfmodel_dump(
    perfmodel_settings, perfmodel_defaults(trainer.args), model_config=trainer.model.config.to_dict(),
)
""",
    ),
    # Defaults stand in base.yml, whose folder depends on the version.
    "maxtext": (
        "MaxText: in train.py after config = pyconfig.initialize(sys.argv)",
        """\
import pathlib
import yaml

perfmodel_folder = pathlib.Path(sys.modules[type(config).__module__].__file__).parent
perfmodel_files = (perfmodel_folder / "configs" / "base.yml", perfmodel_folder / "base.yml")
perfmodel_base = next((path for path in perfmodel_files if path.exists()), None)
perfmodel_dump(config.get_keys(), yaml.safe_load(perfmodel_base.read_text()) if perfmodel_base else {})
""",
    ),
    "nanotron": (
        "nanotron: after trainer = DistributedTrainer(config_file), before trainer.train(...)",
        "perfmodel_dump(trainer.config.as_dict(), perfmodel_defaults(trainer.config))\n",
    ),
}
"""Hooks by framework: the place for the lines, and the framework's own lines."""


def hook_lines(name: str) -> str:
    """The lines to paste into a framework's training script; `--from args.json` reads the file that
    they write.

    Raises:
        UnknownNameError: no lines for this framework are known.
    """
    if name not in HOOKS:
        raise UnknownNameError("hook", name, HOOKS)
    place, lines = HOOKS[name]
    return _HEAD.format(name=name, place=place) + lines
