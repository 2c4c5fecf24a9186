"""Write the demo's prompts: counting, which a 135 M model answers predictably.

Three parts that start at different numbers: what is trained on, what the training looks at meanwhile (its settings were
chosen there too), and what the report measures, which nothing was chosen by.

    python scripts/demo/make_prompts.py      (the result is committed; run it only to change the set)
"""

import argparse
import json
import random
from pathlib import Path

FORMS = (
    "Write the numbers from {a} to {b}, separated by commas.",
    "List the numbers from {a} to {b}, separated by commas.",
    "Please write all the numbers from {a} to {b}, with commas between them.",
)
TRAIN, HELD_OUT, REPORT = 150, 12, 8


def prompts(rng: random.Random, starts: list[int], first: int) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for i, a in enumerate(starts, first):
        text = rng.choice(FORMS).format(a=a, b=a + rng.randint(8, 14))
        rows.append({"id": f"count/{i}", "messages": [{"role": "user", "content": text}]})
    return rows


def main() -> None:
    """Draw starting points without replacement, so no range starts where one of another part does."""
    rng = random.Random(7)
    starts = rng.sample(range(1, 300), TRAIN + HELD_OUT)
    rows = prompts(rng, starts, 0)
    rng = random.Random(8)
    rows += prompts(rng, rng.sample(sorted(set(range(1, 300)) - set(starts)), REPORT), len(rows))
    folder = Path(__file__).parent / "prompts"
    folder.mkdir(exist_ok=True)
    at = 0
    for name, size in (("train", TRAIN), ("held_out", HELD_OUT), ("report", REPORT)):
        part, at = rows[at : at + size], at + size
        (folder / f"count_{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
