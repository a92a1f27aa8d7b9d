"""The JSON files of a part: its manifest, its events, and what the writer said when it closed the run.

Each is bounded in size before it is read and parsed, and verified where it has a checksum (`seal`). A large manifest is
parsed when somebody asks for it. A damaged file, or one of another part, is noted in ``bad`` and left out.
"""

from __future__ import annotations

from typing import Any, final

from torchtap.errors import RunCorruptError, RunError, RunFormatError
from torchtap.store.files.folder import Folder
from torchtap.store.files.layout import CLOSED, FORMAT_NAME, FORMAT_VERSION, MANIFEST, PartOf, SegmentName
from torchtap.store.format.notes import check_part
from torchtap.store.format.seal import JSON_LIMIT, is_sealed, load_json

__all__ = ["Documents"]

_PARSED_AT_ONCE = 1 << 20
_NO_CHECKSUM = "it has no checksum, which its format asks for"


@final
class Documents:
    """``bad`` is shared with the part: damaged files and what is wrong with them."""

    def __init__(self, folder: Folder, part: PartOf, bad: dict[str, str]) -> None:
        self._folder = folder
        self._part = part
        self._label = f"rank {part[0]}, attempt {part[1]}"
        self._bad = bad
        self._stamp: object = None
        self._unread = False  # the manifest is there, and large
        self._manifest: dict[str, Any] = {}
        self._events: dict[SegmentName, list[dict[str, object]]] = {}
        self.version: int | None = None  # of the part's format, once the manifest has said so
        self.closing: dict[str, object] | None = None

    # --- the manifest -------------------------------------------------------------------------------------

    def look_at_manifest(self) -> None:
        """Read it if it is new and small; a large one takes long to parse and is read when it is asked for."""
        try:
            with self._folder.open(MANIFEST) as opened:
                stamp, size = opened.stamp, opened.size
        except OSError:
            stamp, size = None, 0
        if stamp is not None and stamp == self._stamp:
            return
        self._stamp = stamp
        self._unread = size > _PARSED_AT_ONCE
        if not self._unread:
            self._read_manifest()

    @property
    def manifest(self) -> dict[str, Any]:
        if self._unread:
            self._unread = False
            self._read_manifest()
        return self._manifest

    @property
    def has_manifest(self) -> bool:
        """Whether there is one, without reading it."""
        return self._unread or bool(self._manifest)

    def _read_manifest(self) -> None:
        manifest, sealed = self._object(MANIFEST)
        if manifest is None:
            self._stamp = None
            return
        form = manifest.get("format")
        if not isinstance(form, dict) or form.get("name") != FORMAT_NAME:
            raise RunFormatError(f"{self._label}: {MANIFEST} is not that of a {FORMAT_NAME}")
        version = form.get("version")
        if type(version) is not int or version > FORMAT_VERSION:
            raise RunFormatError(
                f"{self._label}: the run's format is version {str(version)[:20]!r}, this torchtap reads up to version "
                f"{FORMAT_VERSION}: a newer torchtap is needed"
            )
        if version > 1 and not sealed:
            self._bad[MANIFEST] = _NO_CHECKSUM
            return
        self.version = version
        manifest.pop("check", None)
        self._manifest = manifest

    # --- the rest -----------------------------------------------------------------------------------------

    def look_at_closing(self) -> None:
        """Read what the writer said at the end."""
        if self.closing is None:
            found, sealed = self._object(CLOSED)
            if found is not None and self._needs_checksum and not sealed:
                self._bad[CLOSED] = _NO_CHECKSUM
                found = None
            self.closing = found or {}

    @property
    def _needs_checksum(self) -> bool:
        return (self.version or 1) > 1

    def _object(self, file: str) -> tuple[dict[str, object] | None, bool]:
        """A JSON file, and whether it has a checksum; ``None`` and a problem when it is damaged."""
        try:
            content = self._content(file)
            sealed = is_sealed(content)
            found = load_json(content)
            if not isinstance(found, dict):
                raise RunCorruptError("it is not a JSON object")
            if sealed and "attempt" in found:
                check_part([found.get("rank"), found["attempt"]], self._part)
        except FileNotFoundError:
            return None, False
        except (RunError, OSError) as error:
            self._bad[file] = str(error)
            return None, False
        self._bad.pop(file, None)
        return found, sealed

    def _content(self, file: str) -> bytes:
        with self._folder.open(file) as opened:
            if opened.size > JSON_LIMIT:
                raise RunCorruptError(f"it has {opened.size} bytes; at most {JSON_LIMIT} are accepted")
            return opened.read(0, opened.size)

    def load_events(self, name: SegmentName) -> bool:
        """Whether a file of events could be read; what is wrong with it is noted."""
        if name in self._events:
            return True
        try:
            lines = self._content(name.file).splitlines()
            if len(lines) < name.last - name.first + 1:
                raise RunCorruptError(f"it has {len(lines)} events, its name says more")
            found = []
            for line in lines:
                if not is_sealed(line) and self._needs_checksum:
                    raise RunCorruptError(_NO_CHECKSUM)
                if isinstance(event := load_json(line), dict):
                    event.pop("check", None)
                    found.append(event)
        except FileNotFoundError:
            raise
        except (RunError, OSError) as error:
            self._bad[name.file] = str(error)
            return False
        self._events[name] = found
        return True

    def keep_events(self, names: list[SegmentName]) -> None:
        """Forget those that a wider file has replaced."""
        self._events = {name: self._events[name] for name in names}

    def events(self) -> list[dict[str, object]]:
        """Everything the writer noted, in order."""
        return [event for events in self._events.values() for event in events]
