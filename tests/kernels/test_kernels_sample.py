"""The sampling kernel against float64 and against its definition, on the GPU or in Triton's interpreter."""

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_vocabulary import chi_square
from torch import Tensor

from dflash_toolkit.kernels import gpu, reference
from dflash_toolkit.kernels.triton import sample as kernel
from dflash_toolkit.runtime.proposer import Draft
from dflash_toolkit.runtime.sampler import Mode, Sampler
from dflash_toolkit.sampling import SamplingParams

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.bfloat16, torch.float32, torch.float16]
LAST = 1.0 - 2.0**-53  # the greatest uniform; times a sum it may be rounded up to the sum
TOLERANCE = 2e-6  # share of the mass: fp32 exponentials and, in the definition, fp32 sums


@pytest.fixture(autouse=True, scope="module")
def _fast_interpreter() -> Iterator[None]:
    """Few rounds of the search, and several tiles of every kind in a row of a thousand."""
    with pytest.MonkeyPatch.context() as patch:
        for name, size in (("BLOCK", 256), ("TILE", 128), ("GROUPS", 64), ("PIVOTS", 256)) if DEVICE == "cpu" else ():
            patch.setattr(kernel, name, size)
        yield


Arguments = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def arguments(logits: Tensor, rows: list[tuple[float, float, int, float, float]]) -> Arguments:
    """Returns the arguments for rows (temperature, top-p, top-k, min-p, uniform)."""
    dtypes = (torch.float32, torch.float32, torch.int64, torch.float32, torch.float64)
    columns = zip(zip(*rows, strict=True), dtypes, strict=True)
    return logits.to(DEVICE), *(torch.tensor(values, dtype=dtype, device=DEVICE) for values, dtype in columns)


def kept(given: Arguments, p_off: float = 0.0, min_off: float = 0.0) -> Tensor:
    """Probabilities [M, V] in float64, not normalised, of the tokens that stay when top-p and min-p are a bit off."""
    logits, temperature, top_p, top_k, min_p, _ = given
    # the quotient is rounded to fp32 on purpose: it decides which values are tied
    scores = (logits.float() / torch.where(temperature == 0, 1, temperature)[:, None]).double()
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    ordered = ordered.masked_fill(ordered < ordered.gather(1, top_k[:, None] - 1), -torch.inf)
    mass = ordered.softmax(-1)
    before = mass.cumsum(-1).roll(1, -1)
    before[:, 0] = 0.0
    bound = torch.where(top_p < 1.0, (1 + p_off) * top_p.double(), torch.inf)
    ordered = ordered.masked_fill(before >= bound[:, None], -torch.inf)
    p = torch.zeros_like(scores).scatter_(1, order, (ordered - ordered[:, :1]).exp())
    return p.masked_fill(p < ((1 + min_off) * min_p.double()).clamp(max=1.0)[:, None], 0.0)


def assert_drawn(found: Tensor, given: Arguments, tolerance: float = TOLERANCE) -> None:
    """Every token is the one of the float64 inverse CDF; another only where a boundary is within the tolerance."""
    logits, temperature, uniform = given[0], given[1], given[5]
    assert found.dtype == torch.int64 and found.shape == uniform.shape
    assert ((found >= 0) & (found < logits.shape[1])).all()
    fits = (temperature == 0) & (found == logits.argmax(-1))
    for p_off, min_off in itertools.product((-tolerance, tolerance), repeat=2):
        p = kept(given, p_off, min_off)
        cdf = p.cumsum(-1)
        total = cdf[:, -1]
        end, width = (x.gather(1, found[:, None])[:, 0] for x in (cdf, p))
        drawn = uniform * total
        near = (drawn >= end - width - tolerance * total) & (drawn <= end + tolerance * total) & (width > 0)
        fits |= (temperature != 0) & near
    assert fits.all(), [(i, int(found[i]), *(float(x[i]) for x in given[1:])) for i in (~fits).nonzero()[:, 0].tolist()]


def check(given: Arguments) -> Tensor:
    """Returns the kernel's tokens after it has checked them and those of the definition."""
    assert_drawn(reference.sample(*given), given, 5 * TOLERANCE)
    found = kernel.sample(*given)
    assert_drawn(found, given)
    return found


FILTERS = [  # temperature, top-p, top-k (0: all), min-p
    (0.0, 0.9, 5, 0.1),
    (1.0, 1.0, 0, 0.0),
    (0.7, 1.0, 1, 0.0),
    (1.3, 1.0, 50, 0.0),
    (1.0, 0.9, 0, 0.0),
    (2.5, 0.98, 0, 0.0),  # flat: thousands of candidates
    (0.6, 1e-6, 0, 0.0),
    (1.0, 1.0, 0, 0.2),
    (0.9, 0.8, 20, 0.05),
    (3.0, 0.9, 700, 0.001),
]


def mixed(logits: Tensor, first: int = 0) -> Arguments:
    """Row i under filter first + i, with the least, the greatest and other draws."""
    vocab = logits.shape[1]
    uniforms = [0.31, 0.0, LAST, 0.77, 0.5, 0.9, 0.1]
    order = range(first, first + len(logits))
    rows = [(*FILTERS[i % len(FILTERS)], uniforms[i % len(uniforms)]) for i in order]
    return arguments(logits, [(t, p, min(k, vocab) or vocab, m, u) for t, p, k, m, u in rows])


@pytest.fixture(params=[None, 32], ids=["packed", "whole"])
def room(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidates that are packed, and so little room that most rows are searched whole."""
    if request.param:
        monkeypatch.setattr(kernel, "CANDIDATES", request.param)


@pytest.mark.parametrize(("vocab", "dtype"), [(1, 0), (2, 1), (37, 2), (256, 0), (1000, 1), (5003, 0)])
@pytest.mark.sampled
def test_tokens_are_those_of_the_filtered_distribution(vocab: int, dtype: int, room: None) -> None:
    check(mixed(3 * torch.randn(10 if vocab > 100 else 20, vocab).to(DTYPES[dtype])))


@pytest.mark.parametrize("levels", [2, 30])
def test_sampler_is_exact_for_tied_logits(levels: int, room: None) -> None:
    logits = (torch.randint(levels, (20, 700)) - levels // 2).bfloat16() / 4
    logits[::2, -300:] = -torch.inf  # as a bias makes them
    logits[1, ::3] = -0.0
    check(mixed(logits))


def test_ties_keep_lower_ids_in_top_p_and_all_in_top_k(room: None) -> None:
    logits = torch.zeros(6, 1024)
    logits[0], logits[2, ::2] = -0.0, -0.0  # equal to zero, though not as integers
    logits[3:, :1000] = -1.0  # 24 tokens above them
    rows = [(1.0, 0.25, 1024, 0.0), (1.0, 0.25, 512, 0.0), (1.0, 1.0, 3, 0.0)]
    rows += [(1.0, 1.0, 25, 0.0), (1.0, 1.0, 24, 0.0), (1.0, 1e-6, 1024, 0.0)]
    first, last = (check(arguments(logits, [(*row, u) for row in rows])).tolist() for u in (0.0, LAST))
    assert first == [0, 0, 0, 0, 1000, 1000]
    assert last == [255, 255, 1023, 1023, 1023, 1000]


def test_quotients_that_division_rounds_together_are_tied() -> None:
    logits = 1.9 + torch.arange(63, -1, -1)[None].repeat(12, 1) * 2.0**-23
    assert len((logits[0] / 1.9).unique()) < 40
    found = check(arguments(logits, [(1.9, 1.0, k, 0.0, LAST) for k in range(1, 13)]))
    kth = [quotients[k - 1] for k, quotients in enumerate(logits / 1.9, 1)]
    assert found.tolist() == [int((logits[0] / 1.9 >= least).sum()) - 1 for least in kth]


VALUES = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, 1.0, 2.0, -math.inf]),
    st.floats(-60, 60, width=32),
    st.integers(-8, 8).map(lambda n: n / 2),
)


@given(
    logits=st.lists(VALUES, min_size=1, max_size=40).filter(lambda values: max(values) > -math.inf),
    dtype=st.sampled_from(DTYPES),
    rows=st.lists(
        st.tuples(
            st.one_of(st.just(0.0), st.just(1.0), st.floats(2.0**-4, 5.0, width=32)),
            st.one_of(st.just(1.0), st.floats(2.0**-20, 1.0, width=32)),
            st.one_of(st.just(40), st.integers(1, 40)),
            st.one_of(st.just(0.0), st.just(1.0), st.floats(0.0, 1.0, width=32)),
            st.one_of(st.sampled_from([0.0, LAST]), st.floats(0.0, LAST)),
        ),
        min_size=1, max_size=4,
    ),
)  # fmt: skip
@settings(max_examples=40, deadline=None, derandomize=True)
def test_sampler_is_exact_for_any_logits_and_parameters(
    logits: list[float], dtype: torch.dtype, rows: list[tuple[float, float, int, float, float]]
) -> None:
    given = torch.tensor([logits] * len(rows)).to(dtype)
    check(arguments(given, [(t, p, min(k, len(logits)), m, u) for t, p, k, m, u in rows]))


@pytest.mark.parametrize("filters", [(0.8, 1.0, 12, 0.0), (0.8, 0.9, 8, 0.02)], ids=["temperature", "all"])
def test_draws_follow_the_filtered_distribution_and_no_other(filters: tuple[float, float, int, float]) -> None:
    draws = 20000 if DEVICE == "cuda" else 60
    given = arguments(torch.randn(1, 12).repeat(draws, 1), [(*filters, u) for u in torch.rand(draws).tolist()])
    counts = kernel.sample(*given).bincount(minlength=12)
    p = kept(tuple(x[:1] for x in given))[0]  # type: ignore[arg-type]
    for distribution, same in ((p / p.sum(), True), ((given[0][0].double() / 3).softmax(-1), False)):
        statistic, limit = chi_square(counts, distribution)
        assert (statistic < limit) == same


@pytest.mark.parametrize("uniform", [LAST, 1.0])
def test_the_greatest_draw_takes_the_last_token_that_stays(uniform: float) -> None:
    vocab = 300
    logits = torch.randn(3, vocab) / 8
    logits[:, 200:] = -torch.inf
    logits[:, 150:200] = -24.0  # they stay: their mass is too small for a sum in fp32
    rows = [(1.0, 1.0, vocab, 0.0, uniform), (1.0, 1.0, 150, 0.0, uniform), (1.0, 0.9999, 150, 0.0, uniform)]
    found = kernel.sample(*arguments(logits, rows)).tolist()
    assert found[0] == 199
    assert found[1:] == [149, kept(arguments(logits, rows))[2].nonzero().max().item()]


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
@pytest.mark.parametrize("filters", FILTERS)
def test_invalid_rows_give_a_token_and_do_not_change_others(filters: tuple[float, float, int, float]) -> None:
    vocab = 100
    logits = torch.randn(7, vocab)
    good = torch.tensor([0, 3])
    logits[1] = math.nan
    logits[2, 3::2] = math.nan
    logits[4] = -math.inf
    logits[5, 7] = math.inf
    logits[6] = 3e38
    t, p, k, m = filters
    given = arguments(logits, [(t, p, k or vocab, m, 0.6)] * 7)
    found = kernel.sample(*given).cpu()
    assert ((found >= 0) & (found < vocab)).all()
    alone = tuple(x[good.to(DEVICE)] for x in given)
    assert torch.equal(found[good], kernel.sample(*alone).cpu())  # type: ignore[arg-type]


def test_sampling_is_batch_invariant() -> None:
    given = mixed((torch.randint(-40, 40, (10, 600)) / 8).bfloat16())
    together = kernel.sample(*given)
    for i in range(10):
        assert kernel.sample(*(x[i : i + 1] for x in given)) == together[i]  # type: ignore[arg-type]


def drafted(given: Arguments, count: int, likely: bool) -> Arguments:
    """A draft of every row but each seventh, what it was sampled from, and the numbers that accept."""
    m, vocab = given[0].shape
    among = given[0].topk(count).indices if likely else torch.rand(m, vocab, device=DEVICE).argsort(-1)[:, :count]
    q = torch.randn(m, count, device=DEVICE).mul(2).softmax(-1)
    draft = among.gather(1, q.multinomial(1))[:, 0]
    draft[::7] = -1
    return draft, among, q, torch.rand(m, dtype=torch.float64, device=DEVICE)  # type: ignore[return-value]


@pytest.mark.parametrize(("vocab", "count"), [(20, 16), (700, 5)])
@pytest.mark.parametrize("likely", [True, False])
@pytest.mark.sampled
def test_drafts_are_judged_and_replaced_as_by_the_definition(vocab: int, count: int, likely: bool, room: None) -> None:
    given = mixed(2 * torch.randn(20, vocab))
    judged = drafted(given, count, likely)
    found = kernel.rejection_sample(*given, *judged)
    assert found.tolist() == reference.rejection_sample(*given, *judged).tolist()
    assert torch.equal(found[::7], kernel.sample(*given)[::7]), "where nothing was drafted"
    one = [part[9:10] for part in (*given, *judged)]
    assert torch.equal(kernel.rejection_sample(*one), found[9:10])


@pytest.mark.parametrize("filters", [(0.8, 1.0, 12, 0.0), (0.8, 0.9, 8, 0.02)], ids=["temperature", "all"])
def test_resampled_tokens_follow_the_filtered_distribution(
    filters: tuple[float, float, int, float],
) -> None:
    draws = 20000 if DEVICE == "cuda" else 80
    given = arguments(torch.randn(1, 12).repeat(draws, 1), [(*filters, u) for u in torch.rand(draws).tolist()])
    among = given[0].topk(4).indices
    q = torch.tensor([[0.1, 0.2, 0.3, 0.4]], device=DEVICE).expand(draws, -1)  # the other way round than p
    draft = among.gather(1, q.multinomial(1))[:, 0]
    found = kernel.rejection_sample(*given, draft, among, q, torch.rand(draws, dtype=torch.float64, device=DEVICE))
    p = kept(tuple(x[:1] for x in given))[0]  # type: ignore[arg-type]
    p = p / p.sum()
    for distribution, same in ((p, True), ((given[0][0].double() / 3).softmax(-1), False)):
        statistic, limit = chi_square(found.bincount(minlength=12).cpu(), distribution.cpu())
        assert (statistic < limit) == same
    overlap = float(torch.minimum(p[among[0]], q[0].double()).sum())
    assert abs(float((found == draft).double().mean()) - overlap) < 4 * (overlap * (1 - overlap) / draws) ** 0.5


@pytest.mark.parametrize("mode", [Mode.SAMPLED, Mode.FULL])
def test_the_sampler_of_the_runtime_chooses_the_same_with_both(mode: Mode) -> None:
    batch, block, vocab, width = 4, 3, 70, 32
    hidden, head = torch.randn(batch * block, width, device=DEVICE), torch.randn(vocab, width, device=DEVICE)
    draft = torch.randint(vocab, (batch, block - 1), device=DEVICE)
    lengths = torch.arange(batch, dtype=torch.int32, device=DEVICE) + 5
    rows, chosen = torch.arange(1, batch + 1, device=DEVICE), []
    for ops in (reference, gpu):
        sampler = Sampler(batch + 1, vocab, torch.device(DEVICE), ops)
        for row, (t, p, k, m) in enumerate([FILTERS[0], FILTERS[1], FILTERS[4], FILTERS[8]], start=1):
            params = SamplingParams(temperature=t, top_p=p, top_k=k, min_p=m, seed=row, presence_penalty=float(mode))
            sampler.set(row, params, [1, 2], [3])
        chosen.append(sampler.choose(hidden, head, rows, Draft(draft), lengths, mode)[0])
    assert torch.equal(*chosen) and len(chosen[0].unique()) > batch


def test_a_row_s_counts_are_those_of_its_request() -> None:
    sampler = Sampler(2, 70, torch.device(DEVICE), reference)
    sampler.set(0, SamplingParams(temperature=0.5), [1, 2], [3])
    own = SamplingParams(presence_penalty=0.5, logit_bias=((5, 1.5),), min_tokens=4, begin_suppress_tokens=(9, 8, 77))
    sampler.set(1, own, [1, 2], [3, 3], {9, 99})
    assert sampler.prompt.nonzero().tolist() == [[1, 1], [1, 2]]
    assert sampler.counts.nonzero().tolist() == [[1, 3]] and sampler.counts[1, 3] == 2 and sampler.bias[1, 5] == 1.5
    assert sampler.late[1, [8, 9]].tolist() == [1, 3] and sampler.late.count_nonzero() == 2
    assert sampler.starts_at.tolist() == [2, 2] and sampler.stops_from.tolist() == [2, 6]
    sampler.move(1, 0)
    sampler.set(1, SamplingParams(), [7], [])
    for table in (sampler.prompt, sampler.counts, sampler.bias, sampler.late):
        assert table[0].any() and not table[1].any()


def test_a_vocabulary_too_large_for_the_mass_is_refused() -> None:
    given = mixed(torch.zeros(1, 4))
    with pytest.raises(ValueError, match="2097152 tokens"):
        kernel.sample(torch.zeros(1, 1 << 21, device=DEVICE), *given[1:])


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 128])
def test_sampler_is_exact_on_a_real_vocabulary_on_a_gpu(rows: int) -> None:
    vocab = 151_936
    spread = torch.linspace(0.5, 4.0, rows, device="cuda")[:, None]  # from flat to peaked
    logits = (spread * torch.randn(rows, vocab, device="cuda")).bfloat16()
    for first in range(len(FILTERS)):
        given = mixed(logits, first)
        assert torch.equal(check(given), kernel.sample(*given))
