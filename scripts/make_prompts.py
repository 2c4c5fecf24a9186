"""Write the demo's prompts: counting, which a 135 M model answers predictably. Held-out ranges are never trained on.

usage: python scripts/make_prompts.py      (the result is committed; run it only to change the set)
"""

import json
import random
from pathlib import Path

FORMS = (
    "Write the numbers from {a} to {b}, separated by commas.",
    "List the numbers from {a} to {b}, separated by commas.",
    "Please write all the numbers from {a} to {b}, with commas between them.",
)
TRAIN, HELD_OUT = 150, 12


def main() -> None:
    """Draw starting points without replacement, so no held-out range starts where a trained one does."""
    rng = random.Random(7)
    starts = rng.sample(range(1, 300), TRAIN + HELD_OUT)
    rows = []
    for i, a in enumerate(starts):
        text = rng.choice(FORMS).format(a=a, b=a + rng.randint(8, 14))
        rows.append({"id": f"count/{i}", "messages": [{"role": "user", "content": text}]})
    folder = Path(__file__).parent / "prompts"
    folder.mkdir(exist_ok=True)
    for name, part in (("count_train", rows[:TRAIN]), ("count_held_out", rows[TRAIN:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))


if __name__ == "__main__":
    main()
