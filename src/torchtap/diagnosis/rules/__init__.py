"""All rules by name: the built-in ones and those of installed packages, entry-point group ``torchtap.rules``."""

from __future__ import annotations

from torchtap.diagnosis.rule_type import Rule
from torchtap.diagnosis.rules import every_step, loop, model, numbers, ranks, values
from torchtap.errors import DiagnosisError
from torchtap.registry import Registry

__all__ = ["RULES", "all_rules"]

_FILES = (numbers, loop, every_step, model, values, ranks)

RULES = Registry(
    what="rule",
    group="torchtap.rules",
    built_in={
        each.name: f"{file.__name__}:{attribute}"
        for file in _FILES
        for attribute, each in vars(file).items()
        if isinstance(each, Rule)
    },
    error=DiagnosisError,
)


def all_rules() -> tuple[list[Rule], dict[str, str]]:
    """Return a rule of each name, and the reasons for those that cannot be loaded."""
    rules: list[Rule] = []
    failed: dict[str, str] = {}
    for name in (*RULES.built_in, *(each for each in RULES.names() if each not in RULES.built_in)):
        try:
            found = RULES.load(name)
            if not isinstance(found, Rule):
                raise DiagnosisError(
                    f"{found!r} is not a rule: decorate a function with `torchtap.diagnosis.rule`"
                )
            rules.append(found)
        except Exception as error:
            failed[name] = str(error)
    return rules, failed
