"""Count phrases that make prose hard to read, and fail when there are more of one than before.

    python packaging/phrases.py            check against the ceilings
    python packaging/phrases.py --lower    lower the ceilings to the present counts

packaging/phrases.json has a ceiling for each phrase, for the code and for the docs. A ceiling only falls: a change may
remove such phrases and lower it, and none may exceed it. Ceilings are multiples of ten, so that two changes which each
rewrite a page do not collide. CONTRIBUTING.md has the rules of the language.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
CEILINGS = ROOT / "packaging" / "phrases.json"

PHRASES = {
    "opens with What, Whether, Where, Whoever": (
        r'(?m)("""|^\s*#\s*|^[-*|]?\s*)(What|Whether|Where|Whoever) (?!is wrong|goes wrong)'
    ),
    "as it is, as they were": r"\bas (it|they) (is|was|are|were)\b",
    "told, tells, says": r"\b(told|tells|tell of|says)\b",
    "somebody, nobody, whoever": r"\b(somebody|nobody|whoever|anybody)\b",
    "asked for, asks of": r"\b(asked|asks|ask) (for|of)\b",
    "hears, listens": r"\b(hears?|heard|listens?|overheard)\b",
    "came, comes, goes on": r"\b(came|comes|goes on|goes over|went)\b",
}


def texts(area: str) -> dict[Path, str]:
    """Return the files of an area: the package's code, or the pages in English."""
    if area == "code":
        paths = sorted((ROOT / "src" / "torchtap").rglob("*.py"))
    else:
        paths = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return {path: path.read_text(encoding="utf-8") for path in paths if "zh" not in path.parts}


def count() -> dict[str, dict[str, int]]:
    """Count every phrase in both areas."""
    return {
        area: {
            name: sum(len(re.findall(pattern, text)) for text in texts(area).values())
            for name, pattern in PHRASES.items()
        }
        for area in ("code", "docs")
    }


def per_thousand_words(area: str, counts: dict[str, int]) -> float:
    """Return how often any of the phrases occurs in 1,000 words."""
    words = sum(len(text.split()) for text in texts(area).values())
    return 1000 * sum(counts.values()) / max(words, 1)


def lower(number: int, ceiling: int | None) -> int:
    """Return the ceiling for a count: the next multiple of ten, never above the present one."""
    rounded = -(-number // 10) * 10
    return rounded if ceiling is None else min(rounded, ceiling)


def main() -> int:
    """Check the counts, or lower the ceilings."""
    found = count()
    ceilings = json.loads(CEILINGS.read_text(encoding="utf-8")) if CEILINGS.exists() else {}
    if "--lower" in sys.argv[1:]:
        lowered = {
            area: {name: lower(number, ceilings.get(area, {}).get(name)) for name, number in each.items()}
            for area, each in found.items()
        }
        CEILINGS.write_text(json.dumps(lowered, indent=2) + "\n", encoding="utf-8")
        return 0
    over = [
        f"{area}: {number} of “{name}”, at most {ceilings[area][name]}"
        for area, each in found.items()
        for name, number in each.items()
        if number > ceilings[area][name]
    ]
    for area, each in found.items():
        print(f"phrases to avoid in the {area}: {per_thousand_words(area, each):.1f} in 1,000 words")
    if over:
        print(
            "more than before (rewrite the sentence; CONTRIBUTING.md, Language):",
            *over,
            sep="\n  ",
            file=sys.stderr,
        )
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
