"""Options: a dataclass, filled from a YAML file and the command line on top of it."""

import math
import os
import pkgutil
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import yaml
from transformers import HfArgumentParser

from ada import UserError, one_line


class OptionError(UserError):
    """An option that does not exist or cannot be."""


class _Parser(HfArgumentParser):
    def add_argument(self, *names, at_least=None, above=None, below=None, **kwargs):
        return super().add_argument(*names, **kwargs)  # the limits are checked below, whether from a file or not

    def error(self, message: str):  # instead of printing the whole usage
        raise OptionError(message)


def parse_options(kind: type, argv: list[str]):
    """An object of the dataclass `kind`: its defaults, then --config FILE, then the rest of `argv`; checked.

    Raises:
        OptionError: in one line, naming the option, and the file and line if it stands in one.
    """
    parser = _Parser(kind, allow_abbrev=False)
    file = parser.parse_known_args(argv)[0].config
    arguments = (_read_yaml(file, parser) if file else []) + argv
    options, unknown = parser.parse_args_into_dataclasses(
        arguments, look_for_args_file=False, return_remaining_strings=True
    )
    if unknown:
        raise OptionError(f"unknown option {unknown[0]}")
    _check_limits(options)
    options.check()
    return options


def _check_limits(options) -> None:
    for option in fields(options):
        value, limits = getattr(options, option.name), defaultdict(lambda: None, option.metadata)
        name = f"--{option.name} {value}"
        if isinstance(value, float) and not math.isfinite(value):
            raise OptionError(f"{name}: must be a finite number")
        if limits["at_least"] is not None and value < limits["at_least"]:
            raise OptionError(f"{name}: must be at least {limits['at_least']}")
        if limits["above"] is not None and value <= limits["above"]:
            raise OptionError(f"{name}: must be above {limits['above']}")
        if limits["below"] is not None and value >= limits["below"]:
            raise OptionError(f"{name}: must be below {limits['below']}")


def _read_yaml(path: str, parser: _Parser) -> list[str]:
    """A flat YAML file as command-line arguments, so that both are checked alike (and 1e-6 is a number)."""
    try:
        document = yaml.compose(Path(path).read_text())
    except OSError as error:
        raise OptionError(f"--config {path}: {error.strerror}") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise OptionError(f"--config {path}: {one_line(error)}") from error
    if document is None:
        return []
    if not isinstance(document, yaml.MappingNode):
        raise OptionError(f"--config {path}: must be lines of the form OPTION: VALUE")
    names = {field.name for field in fields(parser.dataclass_types[0])}
    arguments = []
    for key, value in document.value:
        where = f"{path}:{key.start_mark.line + 1}"
        if not isinstance(key, yaml.ScalarNode) or key.value not in names:
            raise OptionError(f"{where}: unknown option {one_line(key.value)}")
        if not isinstance(value, yaml.ScalarNode):
            raise OptionError(f"{where}: {key.value}: must be a single value")
        argument = f"--{key.value}={value.value}"
        try:
            _check_limits(parser.parse_args_into_dataclasses([argument], return_remaining_strings=True)[0])
        except OptionError as error:
            raise OptionError(f"{where}: {error}") from error
        arguments.append(argument)
    return arguments


def find_function(option: str, name: str, known: dict[str, Callable]) -> Callable:
    """A function of one's own, MODULE:FUNCTION, looked up from the current folder first; or one of `known` by name.

    Raises:
        OptionError: there is no such function.
    """
    if name in known:
        return known[name]
    if ":" not in name:
        raise OptionError(f"{option} {name}: must be one of {', '.join(known)}, or MODULE:FUNCTION")
    sys.path.insert(0, os.getcwd())
    try:
        function = pkgutil.resolve_name(name)
    except Exception as error:  # whatever the user's module does when it is imported
        raise OptionError(f"{option} {name}: {type(error).__name__}: {one_line(error)}") from error
    if not callable(function):
        raise OptionError(f"{option} {name}: not a function")
    return function
