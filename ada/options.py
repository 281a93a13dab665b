"""Options: a dataclass, filled from a YAML file and the command line on top of it."""

from dataclasses import fields
from pathlib import Path

import yaml
from transformers import HfArgumentParser

from ada import UserError, one_line


class OptionError(UserError):
    """An option that does not exist or cannot be."""


def parse_options(kind: type, argv: list[str]):
    """An object of the dataclass `kind`: its defaults, then --config FILE, then the rest of `argv`; then its check().

    Raises:
        OptionError: in one line, naming the option, and the file and line if it stands in one.
    """
    parser = HfArgumentParser(kind, allow_abbrev=False)
    parser.error = _refuse  # instead of printing the whole usage
    file = parser.parse_known_args(argv)[0].config
    arguments = (_read_yaml(file, parser) if file else []) + argv
    options, unknown = parser.parse_args_into_dataclasses(
        arguments, look_for_args_file=False, return_remaining_strings=True
    )
    if unknown:
        _refuse(f"unknown option {unknown[0]}")
    options.check()
    return options


def _refuse(message: str):
    raise OptionError(message)


def _read_yaml(path: str, parser: HfArgumentParser) -> list[str]:
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
        if key.value not in names:
            raise OptionError(f"{where}: unknown option {key.value}")
        if not isinstance(value, yaml.ScalarNode):
            raise OptionError(f"{where}: {key.value}: must be a single value")
        argument = f"--{key.value}={value.value}"
        try:
            parser.parse_known_args([argument])
        except OptionError as error:
            raise OptionError(f"{where}: {error}") from error
        arguments.append(argument)
    return arguments
