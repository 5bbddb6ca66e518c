"""Matching of variables by rules: in files of rules, and in the rules of builders."""

import re
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

from grace.core import schema_words
from grace.core.compressor import Compressor
from grace.core.memory import Memory
from grace.core.registry import make
from grace.core.schema_words import SpecForm
from grace.core.variable import Variable
from grace.errors import ConfigError, missing_extra
from grace.strategy.rule import CompressorRules

try:
    from pydantic import (
        BaseModel,
        ConfigDict,
        Field,
        StrictBool,
        StrictInt,
        StrictStr,
        ValidationError,
        field_validator,
        model_validator,
    )
except ImportError as error:
    raise missing_extra(error.name or "pydantic", "strategy") from error

Natural = Annotated[StrictInt, Field(ge=0)]
Positive = Annotated[StrictInt, Field(ge=1)]
Dtype = Literal["float16", "bfloat16", "float32", "float64"]


Spec = Annotated[str | dict[str, Any], SpecForm()]


class Strict(BaseModel):
    """Object of a file, whose fields' docstrings are their descriptions in its JSON Schema."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, value: object) -> object:
        return schema_words.check_unknown_keys(cls, value)


class Match(Strict):
    """Condition on variables: all keys that are given must hold; an empty one matches all variables."""

    name: StrictStr | None = None
    """A glob, as in `encoder.*.weight`."""
    regex: StrictStr | None = None
    """A regular expression that the whole name matches."""
    min_bytes: Natural | None = None
    """The least size of the gradient, in bytes."""
    max_bytes: Natural | None = None
    """The largest size of the gradient, in bytes."""
    ndim: Natural | None = None
    """The number of dimensions."""
    dtype: Dtype | None = None
    """The gradient's dtype."""
    sparse: StrictBool | None = None
    """True if the gradient is rows, as for embeddings."""
    rule: Spec | None = None
    """A registered rule's spec, as in `rows(least=1000)`."""

    @field_validator("rule")
    @classmethod
    def _registered(cls, rule: Spec) -> Spec:
        try:
            make("rule", rule)
        except ConfigError as error:
            raise schema_words.fault_at("", str(error)) from None
        return rule

    def fits(self, variable: Variable) -> bool:
        """Return True if the condition holds for this variable."""
        return (
            (self.name is None or fnmatchcase(variable.name, self.name))
            and (self.regex is None or re.fullmatch(self.regex, variable.name) is not None)
            and (self.min_bytes is None or variable.nbytes >= self.min_bytes)
            and (self.max_bytes is None or variable.nbytes <= self.max_bytes)
            and (self.ndim is None or len(variable.shape) == self.ndim)
            and (self.dtype is None or variable.dtype == self.dtype)
            and (self.sparse is None or variable.sparse == self.sparse)
            and (self.rule is None or _fits(self.rule, variable))
        )


def _fits(rule: Spec, variable: Variable) -> bool:
    try:
        return bool(make("rule", rule).fits(variable))
    except Exception as error:  # a user's rule may raise anything
        raise ConfigError(f"rule {rule} cannot tell whether it is for {variable.name!r}: {error}") from error


class Choice(Strict):
    """Rule of a builder."""

    match: Match = Match()
    compressor: Any = "none"
    memory: Any = None


def chosen(rules: CompressorRules, variable: Variable) -> tuple[Spec | Compressor, Spec | Memory | None]:
    """Return compressor and memory of the first of a builder's rules, ``{"match": {...}, "compressor": ...}``, that
    matches.

    Raises:
        ConfigError: a rule cannot be read.

    >>> chosen([{"match": {"ndim": 1}}, {"compressor": "topk"}], Variable("w", (4, 2)))
    ('topk', None)
    """
    for i, rule in enumerate(rules):
        try:
            choice = Choice.model_validate(rule)
            if choice.match.fits(variable):
                return choice.compressor, choice.memory
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(map(str, schema_words.location(first))) or "as a whole"
            raise ConfigError(f"rule {i}, {field}: {schema_words.in_words(first)}") from None
        except re.error as error:
            raise ConfigError(f"rule {i}, match.regex: it cannot be read: {error}") from None
    return "none", None
