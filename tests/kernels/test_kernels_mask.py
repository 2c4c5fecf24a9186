"""The kernel that masks logits against its definition, bit for bit, on the GPU or in Triton's interpreter."""

from collections.abc import Iterator

import pytest
import torch

from dflash_toolkit.kernels import gpu, reference
from dflash_toolkit.kernels.triton import mask as kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True, scope="module")
def _several_blocks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE == "cpu":
            patch.setattr(kernel, "BLOCK", 128)
        yield


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize(("vocabulary", "words"), [(300, 10), (256, 8), (31, 1), (1, 1), (129, 12)])
def test_only_tokens_allowed_by_the_mask_keep_their_logits(vocabulary: int, words: int, dtype: torch.dtype) -> None:
    logits = torch.randn(7, vocabulary, device=DEVICE).to(dtype)
    logits[2, ::3] = torch.nan
    masks = torch.randint(-(2**31), 2**31, (4, words), dtype=torch.int32, device=DEVICE)
    masks[1], masks[3] = 0, -1
    at = torch.tensor([2, -1, 0, 1, -1, 3, 2], dtype=torch.int32, device=DEVICE)
    found, expected = logits.clone(), logits.clone()
    gpu.mask_logits_(found, masks, at)
    reference.mask_logits_(expected, masks, at)
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
    for row, index in enumerate(at.tolist()):
        for token in range(vocabulary):
            allowed = index < 0 or int(masks[index, token // 32]) >> (token % 32) & 1
            one = expected[row, token]
            assert (
                (one == -torch.inf) if not allowed else torch.equal(one.nan_to_num(7), logits[row, token].nan_to_num(7))
            )
