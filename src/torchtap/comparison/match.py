"""Which module of a live target is which of the reference: nodes and signatures for the alignment, and fused parts.

A projection that one model has in one piece and the other in two or three (query, key and value; gate and up) is
compared piece by piece: the trace of the reference is cut or joined to the target's layout.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor, nn

from torchtap.comparison.align import Alignment, Node, Pair, Paired, Unaligned, match_nodes, part_of
from torchtap.comparison.floors import weight_of
from torchtap.comparison.passes import Trace, TracedValue
from torchtap.comparison.rules import PairingRule, rule_from
from torchtap.comparison.values import signature
from torchtap.plan.names import (
    join_path,
    last_part,
    parent_path,
    path_of,
    path_parts,
    paths_around,
    read_name,
)
from torchtap.plan.sites import places

__all__ = ["Matched", "match_models"]


@final
@dataclass(frozen=True, slots=True)
class Matched:
    """The target's module names by the reference's, and the reference's trace in the target's layout."""

    names: dict[str, str]
    alignment: Alignment
    trace: Trace  # its ``layouts`` say how outputs are ordered in the target


def match_models(
    reference: nn.Module, trace: Trace, target: nn.Module, listed: Trace, rules: tuple[str | PairingRule, ...]
) -> Matched:
    """Pair the modules of two models that ran once each."""
    left, right = _nodes(reference, trace), _nodes(target, listed)
    chosen, unused = _by_rules([rule_from(rule) for rule in rules], left, right)
    pairs = match_nodes(left, right, _by_names(left, right) | chosen)
    trace, fused = _regroup(trace, listed, left, right, pairs)
    pairs += fused
    names = {pair.target: pair.reference for pair in pairs}
    bare = _without_parameters(reference), _without_parameters(target)
    trace = replace(
        trace,
        layouts=_layouts(reference, target, pairs),
        output_only=frozenset(
            pair.reference for pair in pairs if (pair.reference in bare[0]) != (pair.target in bare[1])
        ),
        raw=trace.raw or trace,
    )
    return Matched(names, _alignment(trace, listed, pairs, unused), trace)


def _nodes(model: nn.Module, trace: Trace) -> list[Node]:
    modules = {place.path: place.module for place in places(model)}
    first: dict[str, tuple[int, TracedValue]] = {}
    for at, event in enumerate(trace.events):
        if event.kind == "output":
            first.setdefault(event.module, (at, event))
    outer = {path for called in trace.calls for path in paths_around(called.module)}
    found = []
    for path, (at, event) in first.items():
        value = trace.values[event.site]
        module = modules.get(path)
        found.append(
            Node(
                path=path,
                order=at,
                shape=_rows_and_width(value),
                value=signature(value),
                weight=None if module is None else _weight(module),
                type_name=type(module).__name__,
                leaf=path not in outer,
            )
        )
    return found


def _without_parameters(model: nn.Module) -> set[str]:
    return {place.path for place in places(model) if next(place.module.parameters(), None) is None}


def _rows_and_width(value: Tensor) -> tuple[int, ...]:
    """Return a shape that does not change when a batch is packed into one axis."""
    return (
        (value.numel() // value.shape[-1], value.shape[-1])
        if value.dim() > 1 and value.numel()
        else tuple(value.shape)
    )


def _weight(module: nn.Module) -> tuple[float, ...] | None:
    """The largest parameter of a module itself, in numbers that a transpose does not change."""
    own = [p.detach() for p in module.parameters(recurse=False) if p.is_floating_point()]
    if not own:
        packed = weight_of(module)
        if packed is None:
            return None
        own = [packed]
    wide = max(own, key=lambda p: p.numel()).double()
    wide = torch.where(
        torch.isfinite(wide), wide, torch.zeros((), dtype=wide.dtype)
    )  # one NaN is not another weight
    return (
        float(wide.numel()),
        float(wide.norm()),
        float(wide.sum()),
        float(wide.abs().sum()) * wide.numel() ** -0.5,
    )


# Outputs whose elements a port keeps in another order.


def _layouts(reference: nn.Module, target: nn.Module, pairs: list[Paired]) -> dict[str, Tensor]:
    """Return, for each module whose output features are reordered in the target, the order they have there.

    It is read from the weights: the target's rows are the reference's in another order. An order counts only if most
    modules of the same names have it, so that one wrongly permuted weight stays a fault.
    """
    mine = {place.path: place.module for place in places(reference)}
    theirs = {place.path: place.module for place in places(target)}
    groups: dict[tuple[object, ...], list[tuple[str, Tensor | None]]] = {}
    for pair in pairs:
        weights = [weight_of(mine.get(path)) for path in part_of(pair.reference)]
        there = weight_of(theirs.get(pair.target))
        if (
            there is None
            or there.dim() != 2
            or not weights
            or any(w is None or w.dim() != 2 for w in weights)
        ):
            continue
        if len({w.shape[1] for w in weights if w is not None}) != 1:
            continue
        rows = torch.cat([w for w in weights if w is not None])
        if rows.shape != there.shape:
            continue
        key = (last_part(pair.reference), last_part(pair.target), tuple(there.shape))
        groups.setdefault(key, []).append((pair.reference, _row_order(rows, there)))
    found: dict[str, Tensor] = {}
    for members in groups.values():
        orders = [order for _, order in members if order is not None]
        for order in orders:
            same = sum(torch.equal(order, other) for other in orders)
            if 2 * same > len(members) and not torch.equal(order, torch.arange(len(order))):
                found.update({path: order for path, _ in members})
                break
    return found


def _row_order(reference: Tensor, target: Tensor) -> Tensor | None:
    """Return ``order`` with ``target == reference[order]``; None if the rows are not the same ones."""
    if torch.equal(reference, target.to(reference.dtype)):
        return torch.arange(len(target))
    probe = torch.randn(target.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mine, theirs = (each.detach().cpu().double() @ probe for each in (reference, target))
    order = torch.empty(len(target), dtype=torch.int64)
    order[theirs.argsort(stable=True)] = mine.argsort(stable=True)
    same = float((reference.detach().cpu()[order].double() - target.detach().cpu().double()).norm())
    return order if same <= 1e-3 * float(target.detach().double().norm()) else None


def _by_rules(
    rules: list[PairingRule], left: list[Node], right: list[Node]
) -> tuple[dict[str, str], list[PairingRule]]:
    """Which modules the user's rules pair, and the rules that pair none."""
    there = {node.path for node in right}
    chosen: dict[str, str] = {}
    used: set[int] = set()
    for node in left:
        for at, rule in enumerate(rules):
            name = rule.rename(f"{node.path}:output")
            path = None if name is None else path_of(name)
            if path is not None and path in there:
                chosen.setdefault(node.path, path)
                used.add(at)
                break
    return chosen, [rule for at, rule in enumerate(rules) if at not in used]


def _by_names(left: list[Node], right: list[Node]) -> dict[str, str]:
    """Modules of the same name, where so many have one that it is the same way of naming."""
    mine, theirs = {node.path for node in left}, {node.path for node in right}
    common = (mine & theirs) - {""}
    return {path: path for path in common} if 2 * len(common) >= min(len(mine), len(theirs)) else {}


def _alignment(trace: Trace, listed: Trace, pairs: list[Paired], unused: list[PairingRule]) -> Alignment:
    """The pairs of modules as pairs of sites, and every site that has no partner."""
    by_module = {pair.reference: pair for pair in pairs}
    theirs: dict[tuple[str, str], list[str]] = {}
    for event in listed.events:
        theirs.setdefault((event.module, event.kind), []).append(event.site)
    sites = []
    left = []
    for at, event in enumerate(trace.events):
        pair = by_module.get(event.module)
        if pair is not None and (pair.target, event.kind) in theirs:
            there = theirs[pair.target, event.kind]
            name = _moved(event.site, pair.target)
            # A single value has its own name there, whatever the reference calls the argument.
            sites.append(Pair(at, event.site, there[0] if len(there) == 1 else name, pair.why))
        else:
            why = "no module of the target was found to be this one"
            left.append(Unaligned(event.site, "reference", why))
    taken = {pair.target for pair in pairs}
    left += [
        Unaligned(event.site, "target", "no module of the reference was found to be this one")
        for event in listed.events
        if event.module not in taken
    ]
    left += [
        Unaligned(str(rule), "rule", "this rule paired nothing; it reads reference name=target name")
        for rule in unused
    ]
    return Alignment(tuple(sites), tuple(left))


# Projections that one side has in one piece.


def _regroup(
    trace: Trace, listed: Trace, left: list[Node], right: list[Node], pairs: list[Paired]
) -> tuple[Trace, list[Paired]]:
    """Pair what is in one piece on one side with its pieces on the other; the reference's trace with such pieces."""
    mine = _unpaired(left, {pair.reference for pair in pairs})
    theirs = _unpaired(right, {pair.target for pair in pairs})
    found: list[Paired] = []
    for whole in list(theirs):
        parts = _parts_of(whole, mine, listed, trace)
        if parts:
            mine, theirs = _without(mine, parts), _without(theirs, [whole])
            trace, joined = _joined(trace, [part.path for part in parts])
            found.append(Paired(joined, whole.path, "one piece in the target"))
    for whole in mine:
        parts = _parts_of(whole, theirs, trace, listed)
        if parts:
            theirs = _without(theirs, parts)
            trace = _cut(trace, whole.path, [_last_size(listed, part.path) for part in parts])
            found += [
                Paired(f"{whole.path}[{n}]", part.path, "a piece of one in the reference")
                for n, part in enumerate(parts)
            ]
    return trace, found


def _unpaired(nodes: list[Node], taken: set[str]) -> list[Node]:
    """Modules with weights of their own that have no partner."""
    return [node for node in nodes if node.leaf and node.weight is not None and node.path not in taken]


def _without(nodes: list[Node], used: list[Node]) -> list[Node]:
    paths = {node.path for node in used}
    return [node for node in nodes if node.path not in paths]


def _parts_of(whole: Node, candidates: list[Node], whole_trace: Trace, parts_trace: Trace) -> list[Node]:
    """Two or three neighbours whose weights and outputs together are as large as the whole's, in their order."""
    assert whole.weight is not None
    size = _last_size(whole_trace, whole.path)
    for count in (3, 2):
        for start in range(len(candidates) - count + 1):
            group = candidates[start : start + count]
            if len({parent_path(n.path) for n in group}) != 1:
                continue
            if _first_number(group[0].path) != _first_number(whole.path):
                continue  # of another layer
            elements = sum(n.weight[0] for n in group if n.weight is not None)
            sizes = sum(_last_size(parts_trace, n.path) for n in group)
            if elements == whole.weight[0] and sizes == size:
                return _in_order(whole, group, whole_trace, parts_trace)
    return []


def _first_number(path: str) -> str:
    return next((part for part in path_parts(path) if part.isdigit()), "")


def _in_order(whole: Node, group: list[Node], whole_trace: Trace, parts_trace: Trace) -> list[Node]:
    """Return the parts in the order in which they lie in the whole: as they ran, unless the values say otherwise."""
    value = _output(whole_trace, whole.path)
    best, order = -1, group
    for permutation in itertools.permutations(group):
        pieces = [_output(parts_trace, n.path) for n in permutation]
        cut = value.split([p.shape[-1] for p in pieces], -1)
        hits = sum(
            _near(a, b.reshape(a.shape)) for a, b in zip(cut, pieces, strict=True) if a.numel() == b.numel()
        )
        if hits > best:
            best, order = hits, list(permutation)
    return order


def _near(a: Tensor, b: Tensor) -> bool:
    return float((a.double() - b.double()).norm()) <= 1e-2 * float(a.double().norm())


def _output(trace: Trace, path: str) -> Tensor:
    return trace.values[next(e.site for e in trace.events if e.module == path and e.kind == "output")]


def _last_size(trace: Trace, path: str) -> int:
    value = _output(trace, path)
    return value.shape[-1] if value.dim() else 1


def _joined(trace: Trace, paths: list[str]) -> tuple[Trace, str]:
    """The trace with several modules' outputs side by side as one."""
    joined = join_path(parent_path(paths[0]), "+".join(last_part(path) for path in paths))
    values, derived = dict(trace.values), dict(trace.derived)
    events: list[TracedValue] = []
    waiting: dict[str, list[str]] = {}
    for event in trace.events:
        if event.module not in paths:
            events.append(event)
            continue
        site = _moved(event.site, joined)
        values_so_far = waiting.setdefault(site, [])
        values_so_far.append(event.site)
        if event.kind == "input":
            if len(values_so_far) == 1:
                events.append(TracedValue(site, joined, "input", event.author))
                values[site] = trace.values[event.site]
                derived[site] = (event.site,)
        elif len(values_so_far) == len(paths):
            by_module = {path_of(name): trace.values[name] for name in values_so_far}
            events.append(TracedValue(site, joined, "output", joined))
            values[site] = torch.cat([by_module[path] for path in paths], -1)
            derived[site] = tuple(values_so_far)
    return replace(trace, values=values, events=events, derived=derived, raw=trace.raw or trace), joined


def _cut(trace: Trace, path: str, sizes: list[int]) -> Trace:
    """The trace with one module's output in pieces, each under a name of its own."""
    values, derived = dict(trace.values), dict(trace.derived)
    events: list[TracedValue] = []
    for event in trace.events:
        if event.module != path:
            events.append(event)
            continue
        whole = trace.values[event.site]
        pieces = [whole] * len(sizes) if event.kind == "input" else whole.split(sizes, -1)
        for n, piece in enumerate(pieces):
            name = f"{path}[{n}]"
            site = _moved(event.site, name)
            events.append(
                TracedValue(site, name, event.kind, event.author if event.kind == "input" else name)
            )
            values[site] = piece.contiguous()
            derived[site] = (event.site,)
    return replace(trace, values=values, events=events, derived=derived, raw=trace.raw or trace)


def _moved(site: str, path: str) -> str:
    """The same site of another module."""
    return str(read_name(site)._replace(path=path))
