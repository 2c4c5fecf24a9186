"""Decodes requests with z-lab's own client and prints what it did. Runs in that client's environment.

usage: python -I scripts/peers/zlab.py TARGET DRAFTER REQUEST.json LOGITS.safetensors  (see tests/scripts/test_peers.py)

REQUEST.json holds `prompts` (token ids), `max_new_tokens` and `stop_token_ids`. Prints JSON: for each prompt the
tokens, how many each step committed and what each step drafted; the first block's logits go to LOGITS.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import dflash.model
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM


class RecordingDrafter(dflash.model.DFlashDraftModel):
    """The client's own model, keeping the logits and the tokens of every block it drafts."""

    def compute_logits(self, hidden: torch.Tensor, output_head: torch.nn.Module) -> torch.Tensor:
        self.blocks.append(super().compute_logits(hidden, output_head)[0])
        self.drafted.append(self.blocks[-1].argmax(-1).tolist())
        return self.blocks[-1][None]


class RecordingDrafter2(dflash.model.DFlash2DraftModel, RecordingDrafter):
    """DFlash 2: the selector chooses the tokens."""

    def propose(self, *arguments: Any) -> Any:
        found = super().propose(*arguments)
        self.drafted[-1] = found[0][0].tolist()
        return found


def main() -> None:
    """Greedy, fp32, CPU."""
    target_path, drafter_path, request_path, logits_path = sys.argv[1:]
    torch.set_num_threads(1)  # as our tests do: on a shared machine more threads were ten times slower
    dflash.model._cuda_time = time.perf_counter  # the client times with CUDA even on a CPU
    target = AutoModelForCausalLM.from_pretrained(target_path, dtype=torch.float32).eval()
    if getattr(target.config.get_text_config(), "attn_logit_softcapping", None):
        target.set_attn_implementation("eager")  # before 5.21 transformers used SDPA, which ignores the cap
    names = json.loads(Path(drafter_path, "config.json").read_text())["architectures"]
    kind = RecordingDrafter2 if "DFlash2DraftModel" in names else RecordingDrafter
    drafter = kind.from_pretrained(drafter_path, dtype=torch.float32).eval()
    request = json.loads(Path(request_path).read_text())
    answers, first_blocks = [], {}
    for i, prompt in enumerate(request["prompts"]):
        drafter.blocks, drafter.drafted = [], []
        out = dflash.model.dflash_generate(
            drafter,
            target,
            torch.tensor([prompt]),
            request["max_new_tokens"],
            request["stop_token_ids"],
            return_stats=True,
        )
        first_blocks[str(i)] = drafter.blocks[0].contiguous()
        answers.append(
            {
                "tokens": out.output_ids[0, len(prompt) :].tolist(),
                "committed": out.acceptance_lengths,
                "drafted": drafter.drafted,
            }
        )
    save_file(first_blocks, logits_path)
    print(json.dumps({"answers": answers}))


if __name__ == "__main__":
    main()
