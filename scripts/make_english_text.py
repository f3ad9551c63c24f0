"""Write real English prose that every Python installation has: its own language reference.

    python scripts/make_english_text.py english.jsonl

`pydoc_data.topics` holds the reference manual's sections as plain text (Python Software Foundation
License 2.0). Each topic becomes one document.
"""

import argparse
import json
from pathlib import Path
from pydoc_data.topics import topics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    output = parser.parse_args().output
    with output.open("w", encoding="utf-8") as file:
        for name, text in sorted(topics.items()):
            file.write(json.dumps({"source": f"pydoc {name}", "text": text}) + "\n")
    print(f"{output}: {len(topics)} documents, {output.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
