"""Names and selectors."""

from __future__ import annotations

import pickle
import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.models import GPT, Structured, Thrice, make
from torch import Tensor, nn

import torchtap as tt
from torchtap.errors import PlanError, SelectionError
from torchtap.plan.sites import KINDS, Selector, Site, places


def picked(model: nn.Module, *selectors: object, **options: object) -> set[str]:
    return {port.site.name for port in tt.make_plan(model, [tt.tap(list(selectors), **options)]).ports}  # type: ignore[arg-type]


def paths(model: nn.Module, selector: str) -> set[str]:
    return {tt.Site.parse(name).path for name in picked(model, selector)}


@given(
    path=st.lists(st.from_regex(r"[a-z0-9_]{1,4}", fullmatch=True), max_size=4).map(".".join),
    kind=st.sampled_from(KINDS),
    leaf=st.sampled_from(["", "0", "logits", "past.0.1"]),
    call=st.integers(0, 30),
)
def test_a_name_parses_back_to_its_site(path: str, kind: str, leaf: str, call: int) -> None:
    site = Site(path, kind, leaf, call)  # type: ignore[arg-type]
    assert Site.parse(site.name) == site


@pytest.mark.parametrize("bad", ["blocks.0", "blocks.0:outptu", "x:output#two", ""])
def test_what_is_not_a_name_is_refused(bad: str) -> None:
    with pytest.raises(SelectionError, match="not a site's name"):
        Site.parse(bad)


def test_how_selectors_read() -> None:
    model = GPT(layers=2)
    everything = {path for path, _ in model.named_modules()}
    assert paths(model, "*:output") == everything
    assert paths(model, "**:output") == everything
    assert paths(model, ":output") == {""}
    assert paths(model, "attn:output") == {"blocks.0.attn", "blocks.1.attn"}
    assert paths(model, "ln?:output") == {f"blocks.{i}.ln{j}" for i in (0, 1) for j in (1, 2)}
    assert paths(model, "blocks.*:output") == {"blocks.0", "blocks.1"}
    assert paths(model, "blocks.**:output") == {p for p in everything if p.startswith("blocks.")}
    assert paths(model, "**.qkv") == {"blocks.0.attn.qkv", "blocks.1.attn.qkv"}
    assert paths(model, "blocks.**.proj") == {"blocks.0.attn.proj", "blocks.1.attn.proj"}
    assert paths(model, "blocks.[01].mlp.0") == {"blocks.0.mlp.0", "blocks.1.mlp.0"}
    assert paths(model, "blocks.0.*:output") == {f"blocks.0.{n}" for n in ("ln1", "attn", "ln2", "mlp")}
    assert paths(model, "re:blocks\\.\\d\\.mlp:output") == {"blocks.0.mlp", "blocks.1.mlp"}


def test_no_kind_means_output_and_a_star_means_every_kind() -> None:
    model = nn.Linear(2, 2)
    assert picked(model, "*") == {":output"}
    assert {Site.parse(name).kind for name in picked(nn.BatchNorm1d(2), "*:*")} == set(KINDS)


def test_types_and_predicates_pick_sites() -> None:
    model = GPT(layers=1)
    assert picked(model, nn.LayerNorm) == {"blocks.0.ln1:output", "blocks.0.ln2:output", "norm:output"}
    assert picked(model, nn.Embedding, kind="input") == {"embedding:input"}
    chosen = picked(model, lambda site: site.kind == "output" and site.path.endswith("proj"))
    assert chosen == {"blocks.0.attn.proj:output"}


def test_an_exclusion_takes_away() -> None:
    model = GPT(layers=1)
    kept = picked(model, "blocks.**:output", exclude=["mlp.*", "**.mlp.*", "attn"])
    assert kept == {f"blocks.0{p}:output" for p in ("", ".ln1", ".ln2", ".attn.qkv", ".attn.proj", ".mlp")}


def test_leaves_and_calls_can_be_picked() -> None:
    case = make("structured")
    with tt.capture(case.model, ":output.logits", "inner:input.mask", "inner:output.hidden") as seen:
        case.loss()
    assert list(seen) == [
        "inner:input.mask",
        "inner:output.hidden.0",
        "inner:output.hidden.1",
        ":output.logits",
    ]
    case = make("thrice")
    with tt.capture(case.model, "shared:output#1", "re:shared:input#[02]?") as seen:
        case.loss()
    assert set(seen) == {"shared:output#1", "shared:input#2"}
    with tt.capture(make("lstm").model, r"re:lstm:output\.1\..*") as seen:
        assert seen._receiver.ports


def test_an_input_is_found_by_name_and_by_position() -> None:
    case = make("structured")
    with tt.capture(case.model, "inner:input.1", "inner:input.scale") as seen:
        case.loss()
    assert list(seen) == ["inner:input.mask", "inner:input.scale"]
    assert torch.equal(seen["inner:input.1"], seen["inner:input.mask"])


def test_a_selector_that_matches_nothing_names_the_nearest_sites() -> None:
    with pytest.raises(SelectionError) as caught:
        tt.capture(GPT(), "blocks.0.mpl:output")
    assert "blocks.0.mlp:output" in str(caught.value)
    assert "blocks.0.mlp:output" in caught.value.nearest
    assert isinstance(caught.value, LookupError)


@pytest.mark.parametrize(
    ("selector", "message"),
    [
        ("blocks.*:outptu", "did you mean 'output'"),
        ("re:(", "not a regular expression"),
        (3, "a selector is text"),
    ],
)
def test_a_selector_that_cannot_be_read_says_why(selector: object, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Selector.of(selector)  # type: ignore[arg-type]


def test_tied_and_shared_things_have_one_site_found_by_all_their_names() -> None:
    model = GPT(layers=1)
    assert picked(model, "head:param.weight") == {"embedding:param.weight"}

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Sequential(nn.Linear(2, 2))
            self.second = self.first

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x))

    shared = Twice()
    assert picked(shared, "second.0:output") == {"first.0:output"}
    with tt.capture(shared, "second:output") as seen:
        shared(torch.ones(1, 2))
    assert list(seen) == ["first:output", "first:output#1"]
    assert torch.equal(seen["second:output#1"], seen["first:output#1"])


def test_wrappers_leave_no_trace_in_names() -> None:
    plain = [place.path for place in places(GPT(layers=1))]
    assert [place.path for place in places(nn.DataParallel(GPT(layers=1)))] == plain
    assert [place.path for place in places(torch.compile(GPT(layers=1)))] == plain  # type: ignore[arg-type]
    assert [place.path for place in places(torch.optim.swa_utils.AveragedModel(GPT(layers=1)))] == plain

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(2, 2)

    assert [place.path for place in places(Holder())] == ["", "module"]  # a user's own child stays


def test_an_alias_stands_for_its_site() -> None:
    case = make("lstm")
    taps = [tt.tap("lstm:output", tt.Full(), alias="memory"), tt.tap("fc", tt.Full(), alias="logits")]
    with tt.capture(case.model, *taps) as seen:
        case.loss()
    assert torch.equal(seen["logits"], seen["fc:output"])
    assert torch.equal(seen["memory.1.0"], seen["lstm:output.1.0"])
    with pytest.raises(PlanError, match="stands for one place"):
        tt.make_plan(case.model, [tt.tap("*", alias="all")])
    with pytest.raises(PlanError, match="more than one tap"):
        tt.make_plan(case.model, [tt.tap("fc", alias="a"), tt.tap("lstm", alias="a")])


def test_a_plan_can_be_read_before_anything_runs() -> None:
    import json

    plan = tt.make_plan(Structured(), [tt.tap("*:output", every=10), tt.tap("fc:param", tt.Full())])
    spec = json.loads(plan.to_json())
    assert spec["taps"][0]["schedule"] == {"every": 10, "offset": 0}
    assert {"site": "inner.fc:param.weight", "taps": [1]} in spec["ports"]
    assert "fc:param.weight" in str(plan)


def test_ten_thousand_modules_are_bound() -> None:
    model = nn.Sequential(*(nn.Identity() for _ in range(10_000)))
    assert len(tt.make_plan(model, ["*:output"]).ports) == 10_001


def test_modules_that_are_never_called_are_told() -> None:
    model = Thrice()
    with tt.capture(model, "*:output") as seen:
        model(torch.ones(1, 5))
    assert [(m.site, m.reason) for m in seen.coverage()] == [("never:output", "module not called")]
    with pytest.raises(SelectionError, match="module not called"):
        seen["never:output"]


def test_a_container_without_a_forward_is_told_apart_from_a_module_that_was_passed_over() -> None:
    class Held(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Identity()])

        def forward(self, x: Tensor) -> Tensor:
            return x

    with tt.capture(model := Held(), "blocks*:output", "0:output") as seen:
        model(torch.ones(1))
    container, block = (missing.reason for missing in seen.coverage())
    assert container == "a ModuleList has no forward: it holds modules and is not called itself"
    assert block == "module not called"


@pytest.mark.parametrize("asked", ["attn.qkv:output", "attn.qkv", "attn.*:param.weight"])
def test_a_path_that_would_match_deeper_down_says_how_to_write_it(asked: str) -> None:
    with pytest.raises(SelectionError, match=re.escape(f"'**.{asked}' picks it at any depth")) as caught:
        tt.make_plan(GPT(), [asked])
    assert "matches none of" in str(caught.value)
    assert tt.make_plan(GPT(), [f"**.{asked}"]).ports


@pytest.mark.parametrize("way", ["hook", "wrap", "forward"])
def test_a_module_that_was_replaced_under_the_taps_is_told(way: Any) -> None:
    inner = nn.DataParallel(nn.Sequential(nn.Linear(2, 2)))
    model = nn.Sequential(inner, nn.Sequential(nn.ReLU()), nn.Linear(2, 2))
    with tt.watch(model, None, "*:output", way=way) as watch:
        with watch.step():
            model(torch.ones(1, 2))
        assert not watch.coverage()
        model[1] = nn.Sequential()
        model[2].compile(backend="eager")
        with watch.step():
            model(torch.ones(1, 2))
    assert [missing.site for missing in watch.coverage()] == ["1:output", "1.0:output"]
    assert "was replaced after the taps were put on" in watch.coverage()[0].reason


def test_a_kind_that_a_model_does_not_have_is_named() -> None:
    with pytest.raises(SelectionError, match=r"'\*:buffer' matches nothing: this model has no buffer"):
        tt.make_plan(nn.Linear(2, 2), ["*:buffer"])


def test_a_module_whose_name_looks_like_a_pattern_is_picked_by_its_name() -> None:
    model = nn.Sequential()
    model.add_module("[0]", nn.Sequential())
    model[0].add_module("a?", nn.Identity())
    for name in ("[0]:output", "[0].a?:output"):
        assert [port.site.name for port in tt.make_plan(model, [name]).ports] == [name]


def test_a_module_picks_itself() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    assert [
        port.site.name for port in tt.make_plan(model, [model[1], tt.tap(model[0], kind="input")]).ports
    ] == [
        "1:output",
        "0:input",
    ]
    with tt.watch(model, None, model[1]) as watch:
        assert [port.site.name for port in watch.plan.ports] == ["1:output"]
    with pytest.raises(SelectionError, match="the Linear that was given is none of this model's 4 modules"):
        tt.make_plan(model, [nn.Linear(2, 2)])


def test_taps_travel_to_other_processes() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    taps = [tt.tap("0", kind="input"), tt.tap("re:.*:output"), tt.tap(nn.ReLU, tt.Full(), every=2)]
    arrived = pickle.loads(pickle.dumps(taps))
    assert arrived == taps
    assert tt.make_plan(model, arrived).ports == tt.make_plan(model, taps).ports
