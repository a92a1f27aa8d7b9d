"""All rules by name: the built-in ones, and those of installed packages in the entry-point group ``torchtap.rules``."""

from __future__ import annotations

from torchtap.diagnosis.rules.base import Rule
from torchtap.errors import DiagnosisError
from torchtap.registry import Registry

__all__ = ["RULES", "all_rules"]

_HOME = "torchtap.diagnosis.rules"

RULES = Registry(
    what="rule",
    group="torchtap.rules",
    built_in={
        "nonfinite": f"{_HOME}.nonfinite:NonFinite",
        "stale-gradient": f"{_HOME}.loop:StaleGradient",
        "erased-gradient": f"{_HOME}.loop:ErasedGradient",
        "never-updated": f"{_HOME}.loop:NeverUpdated",
        "nothing-learns": f"{_HOME}.loop:NothingLearns",
        "optimizer-renewed": f"{_HOME}.loop:RenewedOptimizer",
        "foreign-optimizer": f"{_HOME}.loop:ForeignOptimizer",
        "not-in-optimizer": f"{_HOME}.loop:NotOptimized",
        "trains-in-eval": f"{_HOME}.modes:TrainsInEval",
        "evaluates-in-train": f"{_HOME}.modes:EvaluatesInTraining",
        "ignores-eval": f"{_HOME}.modes:IgnoresEval",
        "hidden-module": f"{_HOME}.architecture:HiddenModule",
        "untied": f"{_HOME}.architecture:Untied",
        "equal-rows": f"{_HOME}.architecture:EqualRows",
        "one-for-many": f"{_HOME}.architecture:OneForMany",
        "loss-maximised": f"{_HOME}.losses:LossMaximised",
        "loss-broadcasts": f"{_HOME}.losses:LossBroadcasts",
        "softmax-dimension": f"{_HOME}.losses:SoftmaxDimension",
        "one-class": f"{_HOME}.losses:OneClass",
        "sorted-classes": f"{_HOME}.losses:SortedClasses",
        "constant-input": f"{_HOME}.data:ConstantInput",
        "probabilities-as-logits": f"{_HOME}.architecture:Probabilities",
        "padding-learns": f"{_HOME}.architecture:PaddingLearns",
        "sees-the-future": f"{_HOME}.architecture:SeesTheFuture",
        "gradient-cut": f"{_HOME}.gradients:GradientCut",
        "no-gradient": f"{_HOME}.gradients:NoGradient",
        "never-called": f"{_HOME}.gradients:NeverCalled",
        "zero-gradient": f"{_HOME}.gradients:ZeroGradient",
        "only-norms-learn": f"{_HOME}.gradients:FrozenButNorms",
        "learning-rate-gone": f"{_HOME}.steps:RateGone",
        "step-too-large": f"{_HOME}.steps:StepTooLarge",
        "step-too-small": f"{_HOME}.steps:StepTooSmall",
        "lost-updates": f"{_HOME}.steps:LostUpdates",
        "dead-units": f"{_HOME}.activity:DeadUnits",
        "dead": f"{_HOME}.activity:DeadValues",
        "constant": f"{_HOME}.activity:ConstantOutput",
        "collapsed": f"{_HOME}.activity:OutputCollapsed",
        "saturated": f"{_HOME}.activity:Saturated",
        "exploding": f"{_HOME}.sizes:Exploding",
        "vanishing": f"{_HOME}.sizes:Vanishing",
        "fading": f"{_HOME}.sizes:Fading",
        "shrinking": f"{_HOME}.sizes:Shrinking",
        "init-too-large": f"{_HOME}.sizes:InitTooLarge",
        "unscaled-input": f"{_HOME}.sizes:UnscaledInput",
        "near-overflow": f"{_HOME}.numbers:NearOverflow",
        "underflow": f"{_HOME}.numbers:Underflow",
        "loss-scale": f"{_HOME}.numbers:LossScale",
        "same-batch": f"{_HOME}.data:SameBatch",
        "at-chance": f"{_HOME}.data:AtChance",
        "window-scale": f"{_HOME}.data:WindowScale",
        "sharp-attention": f"{_HOME}.attention:SharpAttention",
        "attention-collapse": f"{_HOME}.attention:AttentionCollapse",
        "growing-logits": f"{_HOME}.attention:GrowingLogits",
        "ranks-drift": f"{_HOME}.ranks:RanksDrift",
        "ranks-apart": f"{_HOME}.ranks:RanksApart",
        "ranks-fed-alike": f"{_HOME}.ranks:RanksFedAlike",
        "ranks-disagree": f"{_HOME}.ranks:RanksDisagree",
        "ranks-unreduced": f"{_HOME}.rank_gradients:RanksUnreduced",
        "ranks-scale": f"{_HOME}.rank_gradients:RanksScale",
        "ranks-buffers": f"{_HOME}.rank_state:RanksBuffers",
        "ranks-swapped": f"{_HOME}.rank_state:RanksSwapped",
        "ranks-uneven": f"{_HOME}.rank_progress:RanksUneven",
        "rank-slow": f"{_HOME}.rank_progress:RankSlow",
        "rank-lost": f"{_HOME}.rank_progress:RankLost",
    },
    error=DiagnosisError,
)


def all_rules() -> tuple[list[Rule], dict[str, str]]:
    """A rule of each name; of those that cannot be had, the reason."""
    rules: list[Rule] = []
    failed: dict[str, str] = {}
    for name in (*RULES.built_in, *(each for each in RULES.names() if each not in RULES.built_in)):
        try:
            made = RULES.load(name)()
            if not isinstance(made, Rule):
                raise DiagnosisError(f"{made!r} is no Rule")
            rules.append(made)
        except Exception as error:
            failed[name] = str(error)
    return rules, failed
