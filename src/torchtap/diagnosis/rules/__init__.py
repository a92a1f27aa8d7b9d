"""All rules by name: the built-in ones and those of installed packages, entry-point group ``torchtap.rules``.

A rule is a row of ``table.toml``. Most have a function in one of these files; a row with a message has none.
"""

from __future__ import annotations

from torchtap.diagnosis.rule_type import Rule, table_rules
from torchtap.diagnosis.rules import every_step, loop, model, numbers, ranks, values
from torchtap.errors import DiagnosisError
from torchtap.registry import Registry

__all__ = ["RULES", "all_rules"]

_FUNCTIONS = {
    each.name: each
    for file in (numbers, loop, every_step, model, values, ranks)
    for each in vars(file).values()
    if isinstance(each, Rule)
}
_BUILT_IN = {name.replace("-", "_"): each for name, each in table_rules(_FUNCTIONS).items()}

RULES = Registry(
    what="rule",
    group="torchtap.rules",
    built_in={each.name: f"{__name__}:{attribute}" for attribute, each in _BUILT_IN.items()},
    error=DiagnosisError,
)


def __getattr__(name: str) -> Rule:
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


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
