"""Which site is which: names, rules, wrappers, prefixes, structure; and what is left over, with the reason."""

from __future__ import annotations

import numpy as np
import pytest

from torchtap import CompareError
from torchtap.comparison.align import Alignment, KnownSite, align
from torchtap.comparison.rules import parse_rule


def sites(*names: str, shape: tuple[int, ...] | None = None) -> list[KnownSite]:
    return [KnownSite(name, shape) for name in names]


def paired(alignment: Alignment) -> dict[str, tuple[str, str]]:
    return {pair.reference: (pair.target, pair.how) for pair in alignment.pairs}


def test_equal_names_pair_in_the_order_of_the_reference() -> None:
    found = align(sites("b:output", "a:output"), sites("a:output", "b:output"))
    assert [pair.reference for pair in found.pairs] == ["b:output", "a:output"]
    assert not found.unaligned


@pytest.mark.parametrize("wrapped", ["_orig_mod.", "module.", "_fsdp_wrapped_module.", "module._orig_mod."])
def test_wrappers_leave_no_trace(wrapped: str) -> None:
    found = align(sites("a.b:output"), sites(f"{wrapped}a.b:output"))
    assert paired(found) == {"a.b:output": (f"{wrapped}a.b:output", "wrapper")}


def test_a_wrapper_inside_the_path_is_seen_through() -> None:
    found = align(sites("a.b:output"), sites("a._checkpoint_wrapped_module.b:output"))
    assert found.pairs[0].how == "wrapper"


@pytest.mark.parametrize("on_reference", [True, False])
def test_a_prefix_that_one_side_has_is_found(on_reference: bool) -> None:
    long = sites("model.layers.0:output", "model.layers.1:output")
    short = sites("layers.0:output", "layers.1:output")
    found = align(long, short) if on_reference else align(short, long)
    assert [pair.how for pair in found.pairs] == ["prefix", "prefix"]
    assert not found.unaligned


def test_a_rule_comes_before_everything_else() -> None:
    found = align(sites("a:output", "b:output"), sites("a:output", "b:output"), ["a:output=b:output"])
    assert paired(found)["a:output"] == ("b:output", "rule")
    assert "b:output" not in paired(found)


def test_a_rule_with_stars_renames() -> None:
    found = align(
        sites("model.h.3.attn:output"), sites("h.3.attention:output"), ["model.*.attn:*=*.attention:*"]
    )
    assert paired(found) == {"model.h.3.attn:output": ("h.3.attention:output", "rule")}


def test_a_rule_that_pairs_nothing_is_reported() -> None:
    found = align(sites("a:output"), sites("a:output"), ["x.*=*"])
    assert [(u.side, "paired nothing" in u.why) for u in found.unaligned] == [("rule", True)]


def test_structure_pairs_renamed_models_of_like_shape() -> None:
    left = [
        KnownSite("embed:output", (2, 8)),
        KnownSite("h.0:output", (2, 8)),
        KnownSite("head:output", (2, 50)),
    ]
    right = [
        KnownSite("wte:output", (2, 8)),
        KnownSite("layer_0:output", (2, 8)),
        KnownSite("lm:output", (2, 50)),
    ]
    found = align(left, right)
    assert [pair.target for pair in found.pairs] == ["wte:output", "layer_0:output", "lm:output"]
    assert {pair.how for pair in found.pairs} == {"structure"}


def test_structure_never_guesses() -> None:
    left = [KnownSite("x:output", (2, 8)), KnownSite("y:output", (2, 8))]
    right = [KnownSite("p:output", (2, 8)), KnownSite("q:output", (2, 8)), KnownSite("r:output", (2, 8))]
    found = align(left, right)
    assert not found.pairs
    assert len(found.unaligned) == 5
    assert all(u.why for u in found.unaligned)


def test_further_calls_pair_with_the_same_call_and_extra_calls_are_named() -> None:
    found = align(sites("a:output", "a:output#1", "a:output#2"), sites("a:output", "a:output#1"))
    assert len(found.pairs) == 2
    assert "call 3" in found.unaligned[0].why
    assert "has 2" in found.unaligned[0].why


def test_what_has_no_partner_names_the_nearest() -> None:
    found = align(sites("a:output", "blocks.0.mlp:output"), sites("a:output", "blocks.0.mpl:output"), ())
    assert "blocks.0.mpl:output" in found.unaligned[0].why


@pytest.mark.parametrize(
    ("text", "shape", "expected"),
    [
        ("*=*; target.permute=0,2,1,3", (2, 4, 3, 5), (2, 3, 4, 5)),
        ("*=*; target.slice=:,:100", (2, 128), (2, 100)),
        ("*=*; target.slice=:4", (8, 3), (4, 3)),
        ("*=*; target.reshape=2,-1", (2, 3, 4), (2, 12)),
        ("*=*; target.squeeze=0; target.unsqueeze=-1", (1, 3), (3, 1)),
    ],
)
def test_rules_bring_layouts_together(text: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    rule = parse_rule(text)
    assert rule.apply("target", np.zeros(shape)).shape == expected
    assert rule.apply("reference", np.zeros(shape)).shape == shape


@pytest.mark.parametrize("text", ["nonsense", "=x", "a.*=b", "*=*; target.twist=1", "*=*; permute=0,1"])
def test_a_rule_that_cannot_be_read_says_how_to_write_one(text: str) -> None:
    with pytest.raises(CompareError, match=r"for example|each star|with one of"):
        parse_rule(text)


def test_a_change_that_does_not_fit_names_the_shape() -> None:
    with pytest.raises(CompareError, match=r"\(2, 3\)"):
        parse_rule("*=*; target.permute=0,1,2").apply("target", np.zeros((2, 3)))
