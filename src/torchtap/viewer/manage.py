"""What a page may change, where the viewer was started with ``--manage``: rename, tag, put away, delete.

Guarantees, each held by a test:
- only runs inside a folder of runs that was given; a run that was named itself is never touched;
- nothing outside that folder, whatever a name says and wherever a link leads: no link is written through;
- never a run that is being written;
- tags and the archived mark go into a file of their own: what was recorded stays as it is.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torchtap.sanitize import replace_file
from torchtap.viewer.open_run import Refused
from torchtap.viewer.run_index import NOTES, Catalog, read_notes, short_text

__all__ = ["manage"]

_NAME = re.compile(r"[\w][\w .+=@,~-]{0,120}")


def manage(catalog: Catalog, asked: Any) -> dict[str, Any]:
    """Do what ``asked`` says (``run``, ``action``, ``value``); says the run's name afterwards."""
    if not isinstance(asked, Mapping) or not isinstance(asked.get("run"), str):
        raise Refused("which run? ask with 'run' and 'action'")
    action = _ACTIONS.get(str(asked.get("action")))
    if action is None:
        raise Refused(f"unknown action {short_text(asked.get('action'), 40)!r}; known: {', '.join(_ACTIONS)}")
    name = asked["run"]
    path = _own_folder(catalog, name)
    fresh = action(path, asked.get("value"))
    catalog.forget(name)
    return {"run": name if fresh is None else fresh}


def _own_folder(catalog: Catalog, name: str) -> Path:
    found = catalog.place(name)
    if found.root is None:
        raise Refused("only runs inside a folder of runs can be changed: torchtap view FOLDER --manage", 403)
    path = Path(found.path)
    resolved = path.resolve()
    if path.is_symlink() or resolved == found.root or not resolved.is_relative_to(found.root):
        raise Refused(f"the run {name[:200]!r} lies outside of the folder that was opened", 403)
    return resolved


def _refuse_while_written(path: Path) -> None:
    from torchtap import open as open_run

    if open_run(path).status == "recording":
        raise Refused("the run is still being written; wait until it has ended", 409)


def _rename(path: Path, value: object) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value) or value in (".", ".."):
        raise Refused(
            f"{short_text(value, 60)!r} is no name for a folder; use letters, digits, spaces and . + = @ , ~ -"
        )
    _refuse_while_written(path)
    target = path.parent / value
    if target.exists() or target.is_symlink():
        raise Refused(f"there is already something called {value!r}", 409)
    os.rename(path, target)
    return value


def _tag(path: Path, value: object) -> None:
    if not isinstance(value, list) or not all(isinstance(tag, str) for tag in value):
        raise Refused("tags are a list of words")
    tags = list(dict.fromkeys(tag.strip()[:60] for tag in value if tag.strip()))[:40]
    _note(path, tags, read_notes(str(path))[1])


def _archive(path: Path, value: object) -> None:
    if not isinstance(value, bool):
        raise Refused("archive: yes or no")
    _note(path, read_notes(str(path))[0], value)


def _note(path: Path, tags: list[str], archived: bool) -> None:
    replace_file(path / NOTES, json.dumps({"tags": tags, "archived": archived}).encode("utf-8"))


def _delete(path: Path, value: object) -> None:
    if value != path.name:
        raise Refused("to delete a run, repeat the name of its folder")
    _refuse_while_written(path)
    shutil.rmtree(path)


_ACTIONS: dict[str, Callable[[Path, object], str | None]] = {
    "rename": _rename,
    "tag": _tag,
    "archive": _archive,
    "delete": _delete,
}
