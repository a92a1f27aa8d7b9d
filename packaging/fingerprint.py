"""One number for the page's sources, kept beside the built page: it says whether the page is up to date.

python packaging/fingerprint.py            print it
python packaging/fingerprint.py --write    note it beside the page that was just built
python packaging/fingerprint.py --check    exit 1 if the built page is of other sources
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
NOTE = ROOT / "src/torchtap/viewer/static/sources.sha256"


def fingerprint() -> str:
    """The sha256 over names and bytes of everything that the page is built from."""
    folder = ROOT / "frontend"
    kept = ("index.html", "package.json", "package-lock.json", "tsconfig.json", "vite.config.js")
    sources = [folder / name for name in kept] + [
        path for path in (folder / "src").rglob("*") if path.is_file()
    ]
    digest = hashlib.sha256()
    for path in sorted(sources):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder).as_posix()} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def main() -> int:
    """What the command line asks for."""
    now = fingerprint()
    if "--write" in sys.argv:
        NOTE.write_text(now + "\n")
    elif "--check" in sys.argv:
        return 0 if NOTE.is_file() and NOTE.read_text().strip() == now else 1
    else:
        print(now)
    return 0


if __name__ == "__main__":
    sys.exit(main())
