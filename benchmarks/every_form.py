"""Every architecture in every form: ``python -m benchmarks.every_form`` prints the table of docs/forms.md.

An architecture runs in a process of its own, so that a crash or an endless compilation costs one pair. It guarantees:
- a pair is written to the results file as soon as it is counted; a run that was interrupted goes on behind it;
- pairs that were counted with other sources are counted again, unless ``--keep`` says otherwise;
- a pair that takes longer than the limit is written down as one that did.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import multiprocessing
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, final

from tests.corpus.zoo import ARCHITECTURES

from benchmarks.architectures import FEW, FORMS, OTHER, SLOW, count

__all__ = ["main", "table"]

_ROOT = Path(__file__).parent.parent
_PROCESSES = multiprocessing.get_context("forkserver")  # starts from a process that has torch loaded


def _count_all(name: str, forms: list[str], answers: Any) -> None:
    """In a process of its own: count one architecture and send each form's rows as they come."""
    import torch

    warnings.simplefilter("ignore")
    for form in forms:
        began = time.process_time()
        try:
            rows = [{"form": label, **dataclasses.asdict(each)} for label, each in count(name, form).items()]
        except (
            Exception
        ) as error:  # the form cannot be made of this architecture: torch's own message says why
            rows = [{"form": form, "problem": f"{type(error).__name__}: {error}"[:300]}]
        torch._dynamo.reset()
        answers.send((form, rows, time.process_time() - began))


@final
class _Results:
    """The rows so far, and the file that they are in, one line of JSON for each pair."""

    def __init__(self, file: Path, keep: bool) -> None:
        self._file = file
        self._source = _digest_of_sources()
        self._lock = threading.Lock()
        self.pairs: dict[tuple[str, str], dict[str, Any]] = {}
        for line in file.read_text().splitlines() if file.exists() else ():
            pair = json.loads(line)
            if keep or pair["source"] == self._source:
                self.pairs[pair["name"], pair["asked"]] = pair

    def add(self, name: str, form: str, rows: list[dict[str, Any]], seconds: float) -> None:
        pair = {
            "name": name,
            "asked": form,
            "source": self._source,
            "seconds": round(seconds, 1),
            "rows": rows,
        }
        with self._lock:
            self.pairs[name, form] = pair
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("a") as opened:
                opened.write(json.dumps(pair) + "\n")

    def rows(self) -> Iterator[dict[str, Any]]:
        for (name, _), pair in self.pairs.items():
            yield from ({**row, "name": name} for row in pair["rows"])


def _digest_of_sources() -> str:
    digest = hashlib.blake2b(digest_size=8)
    files = [*(_ROOT / "src/torchtap").rglob("*.py"), *Path(__file__).parent.glob("zoo*.py")]
    counting = [Path(__file__).parent / f"{name}.py" for name in ("architectures", "explained", "leaves")]
    for file in (*sorted(files), *counting):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _run(name: str, forms: list[str], results: _Results, limit: float) -> None:
    """Count one architecture; a process that dies or hangs is replaced for the forms that are left."""
    waiting = list(forms)
    while waiting:
        answers, sending = _PROCESSES.Pipe(duplex=False)
        process = _PROCESSES.Process(target=_count_all, args=(name, waiting, sending), daemon=False)
        process.start()
        sending.close()
        while waiting:
            try:
                if not answers.poll(limit):
                    problem = f"took longer than {limit:.0f} s"
                    break
                form, rows, seconds = answers.recv()
            except EOFError:
                process.join()
                problem = f"the process ended with {process.exitcode}"
                break
            waiting.remove(form)
            _write(results, name, form, rows, seconds)
        else:
            process.join()
            return
        process.kill()
        form = waiting.pop(0)
        _write(results, name, form, [{"form": form, "problem": problem}], limit)


def _write(results: _Results, name: str, form: str, rows: list[dict[str, Any]], seconds: float) -> None:
    results.add(name, form, rows, seconds)
    for row in rows:
        told = {key: value for key, value in row.items() if key not in ("form", "details") and value != 0}
        print(f"{row['form']:32} {name:26} {told} {seconds:.1f} s", flush=True)


def table(rows: list[dict[str, Any]]) -> str:
    """The counts of every form, as docs/forms.md has them."""
    lines = [
        "| form | architectures | sites | clean | plain name | wrong | renamed | missing | not explained | compared |",
        "| --- " * 10 + "|",
    ]
    forms: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        forms.setdefault(row["form"], []).append(row)
    order = [label for form in FORMS for label in (form, f"{form}, like the model")]
    for form in sorted(forms, key=order.index):
        held = [row for row in forms[form] if "problem" not in row and row["verdict"] != OTHER]
        sums = {
            key: sum(row[key] for row in held)
            for key in ("sites", "clean", "plain", "wrong", "renamed", "missing", "unexplained")
        }
        share = 100 * (sums["clean"] + sums["plain"]) / max(1, sums["sites"])
        compared = [row for row in held if row["verdict"]]
        same = sum(row["verdict"] == "same" for row in compared)
        lines.append(
            f"| {form} | {len(held)} | {sums['sites']} | {sums['clean']} | {sums['plain']} ({share:.1f} %) | "
            f"{sums['wrong']} | {sums['renamed']} | {sums['missing']} | {sums['unexplained']} | "
            f"{f'{same} of {len(compared)}' if compared else '–'} |"
        )
    return "\n".join(lines)


def _not_made(rows: list[dict[str, Any]]) -> str:
    """What torch could not bring into a form, and what it brought there unfaithfully."""
    found = [
        f"{row['form']:32} {row['name']:26} {row.get('problem', OTHER)}"
        for row in rows
        if "problem" in row or row["verdict"] == OTHER
    ]
    return "\n".join(sorted(found))


def main(arguments: list[str] | None = None) -> None:
    """Count what is not counted yet, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--names", nargs="*", default=list(ARCHITECTURES))
    parser.add_argument("--forms", nargs="*", default=list(FORMS))
    parser.add_argument("--limit", type=float, default=300, help="seconds for one architecture in one form")
    parser.add_argument("--jobs", type=int, default=2, help="architectures at the same time")
    parser.add_argument("--keep", action="store_true", help="also keep what was counted with other sources")
    parser.add_argument("--out", type=Path, default=_ROOT / "build/every_form.jsonl")
    options = parser.parse_args(arguments)
    results = _Results(options.out, options.keep)
    _PROCESSES.set_forkserver_preload(["benchmarks.architectures", "torch._dynamo", "torch._inductor"])
    with ThreadPoolExecutor(options.jobs) as pool:
        for name in options.names:
            asked = [form for form in options.forms if form not in SLOW or name in FEW]
            pool.submit(
                _run,
                name,
                [form for form in asked if (name, form) not in results.pairs],
                results,
                options.limit,
            )
    rows = list(results.rows())
    print(table(rows))
    print(f"\nNot made by torch, or not faithfully:\n{_not_made(rows)}")


if __name__ == "__main__":
    main(sys.argv[1:])
