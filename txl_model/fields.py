"""What the configurations have in common: fields with a help text, checks, a way to and from JSON or YAML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, field, fields
from numbers import Integral, Real
from typing import Any, TypeVar

_Config = TypeVar("_Config", bound="Fields")


def option(default: Any, help: str, choices: tuple[str, ...] = ()) -> Any:
    """A field of a configuration, which is an option of the command line too."""
    return field(default=default, metadata={"help": help, "choices": choices})


def check_at_least(least: int, **values: int | None) -> None:
    """Raises ValueError, naming it, for a value below `least`. None is a setting that was not given."""
    for name, value in values.items():
        if value is not None and value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")


class Fields:
    """Base of the configurations, which are dataclasses. Values are checked against types and choices."""

    def __post_init__(self) -> None:
        for f in fields(self):  # type: ignore[arg-type]
            value = _as(str(f.type), f.name, getattr(self, f.name))
            choices = f.metadata["choices"]
            if choices and value not in choices:
                raise ValueError(f"{f.name} must be one of {', '.join(choices)}, got {value!r}")
            setattr(self, f.name, value)

    def to_dict(self) -> dict[str, Any]:
        """What `from_dict` makes this configuration of again; JSON can hold it."""
        values = asdict(self)  # type: ignore[call-overload]
        return {name: list(x) if isinstance(x, tuple) else x for name, x in values.items()}

    @classmethod
    def from_dict(cls: type[_Config], values: dict[str, Any]) -> _Config:
        """Raises ValueError for a field there is none of."""
        names = {f.name for f in fields(cls)}  # type: ignore[arg-type]
        unknown = sorted(str(name) for name in values if name not in names)  # YAML has keys of any type
        if unknown:
            raise ValueError(f"{cls.__name__} has no field {', '.join(unknown)}")
        return cls(**values)


def _as(kind: str, name: str, value: Any) -> Any:
    """`value`, as JSON, YAML or NumPy may have it, in the type of the field `name`."""
    if value is None and kind.endswith("| None"):
        return None
    if hasattr(value, "tolist"):
        value = value.tolist()
    kind = kind.removesuffix(" | None")
    if kind.startswith("tuple") and isinstance(value, Sequence) and not isinstance(value, str):
        if "bool" in kind:  # as numbers on the command line
            value = [bool(x) if isinstance(x, Integral) and x in (0, 1) else x for x in value]
        return tuple(_as("bool" if "bool" in kind else "int", name, x) for x in value)
    if kind == "int" and isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    if kind == "float" and isinstance(value, (Real, str)) and not isinstance(value, bool):
        try:
            return float(value)  # YAML has 1e-3, without a point, as a string
        except (ValueError, OverflowError):  # an int beyond all floats
            pass
    if (kind, type(value)) in (("bool", bool), ("str", str)):
        return value
    raise ValueError(f"{name} must be of type {kind}, got {value!r}")
