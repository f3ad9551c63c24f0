"""Write real English prose that every Python installation has: its own language reference.

    python scripts/make_english_text.py english

`pydoc_data.topics` holds the reference manual's sections as plain text (Python Software Foundation
License 2.0), one document each. They are split by a hash of their names into `calibration.jsonl`,
`choice.jsonl` (for whoever chooses settings) and `heldout.jsonl` (for the final judgement alone).
"""

import argparse
import hashlib
import json
from pathlib import Path
from pydoc_data.topics import topics

SHARES = {"calibration": 70, "choice": 15, "heldout": 15}


def part_of(name: str) -> str:
    """Which file a topic belongs to; the same on every machine."""
    place = int(hashlib.md5(name.encode(), usedforsecurity=False).hexdigest(), 16) % 100
    for part, share in SHARES.items():
        if place < share:
            return part
        place -= share
    raise AssertionError(place)


def write_parts(folder: Path) -> dict[str, Path]:
    """Write the three files and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    rows: dict[str, list[str]] = {part: [] for part in SHARES}
    for name, text in sorted(topics.items()):
        rows[part_of(name)].append(json.dumps({"source": f"pydoc {name}", "text": text}))
    paths = {part: folder / f"{part}.jsonl" for part in SHARES}
    for part, path in paths.items():
        path.write_text("".join(f"{row}\n" for row in rows[part]), encoding="utf-8")
    return paths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    for part, path in write_parts(parser.parse_args().folder).items():
        print(f"{part}: {path}, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
