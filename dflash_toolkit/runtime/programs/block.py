"""Steps over blocks: draft a block for every row, read it with the target, choose tokens, and commit them.

A batch of greedy requests is one graph. Other batches run in parts, see `buffers.py`.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...grammar import Matcher, masks_of
from ..graphs import download, upload
from ..prompt_logprobs import packed
from ..proposer import Draft
from ..request import Committed, Request
from ..sampler import Mode
from ..stack import Rows
from ..verifier import Verdict
from .buffers import ReadBlock
from .context import Part, StepContext
from .results import PendingResult

Size = tuple[int, int]  # rows and block of a step


class BlockProgram:
    """Decoding steps over blocks, for the first rows of the batch.

    Args:
        sample_drafts: sample drafts at the temperatures of their requests; otherwise take the most probable tokens.
    """

    def __init__(self, context: StepContext, sample_drafts: bool) -> None:
        self._context, self._sample_drafts = context, sample_drafts

    # ---- launch and read -------------------------------------------------------------------------------

    def launch(self, requests: Sequence[Request], batch: int, block: int) -> PendingResult:
        """Launches one step of rows 0..len(requests) - 1, for which `batch` rows are computed."""
        context, rows = self._context, len(requests)
        tokens, logprobs, full = self._launch_parts([request.matcher for request in requests], batch, block)
        tops = ((index, row, requests[row].params.logprobs) for index, row in enumerate(full))
        wanted = {row: (index, top) for index, row, top in tops if top is not None}
        logprobs = logprobs[: len(full)] if wanted and logprobs is not None else None
        return context.results.send(tokens[:rows], logprobs, wanted)

    def _launch_parts(
        self, matchers: Sequence[Matcher | None], batch: int, block: int
    ) -> tuple[Tensor, Tensor | None, list[int]]:
        """Returns the tokens of a step, log-probabilities, and the rows that these belong to."""
        context, buffers, run = self._context, self._context.buffers, self._context.graphs.run
        of_mode: dict[Mode, list[int]] = {mode: [] for mode in Mode}
        for row, mode in enumerate(context.modes[: len(matchers)]):
            of_mode[mode].append(row)
        if len(of_mode[Mode.GREEDY]) == len(matchers):
            tokens = run(Part("step", batch, block), self.run)
            assert tokens is not None
            return tokens, None, []
        if block > 1:
            run(Part("propose", batch, block), self.run)
        drafts = self._send_drafts(batch, block) if any(of_mode[mode] for mode in Mode if mode.masked) else None
        run(Part("read", batch, block), self.run)
        full: list[tuple[Tensor, list[int]]] = []
        for mode, rows in of_mode.items():  # masked modes, which wait for the host, come last
            if not rows:
                continue
            count = context.computed_rows(len(rows))
            buffers.select(mode, rows, count)
            if mode.masked:
                assert drafts is not None
                drafted = drafts()
                masks, at = masks_of([matchers[row] for row in rows], [drafted[row] for row in rows], context.words)
                at = torch.cat([at, at[:block].repeat(count - len(rows))])
                for buffer, values in zip(buffers.masks(count, block, context.words), (masks, at), strict=True):
                    buffer[: len(values)].copy_(upload(values, context.device))
            logprobs = run(Part("choose", count, block, mode), self.run)
            if logprobs is not None:
                full.append((logprobs[: len(rows)], rows))
        tokens = run(Part("end", batch, block), self.run)
        assert tokens is not None
        all_logprobs = torch.cat([logprobs for logprobs, _ in full]) if full else None
        return tokens, all_logprobs, [row for _, rows in full for row in rows]

    def _send_drafts(self, batch: int, block: int) -> Callable[[], list[list[int]]]:
        """Starts the copy of the drafts to the host; the returned function waits for this copy only."""
        drafts = self._context.buffers.draft(batch, block)
        if self._context.device.type != "cuda":
            return drafts.tolist
        host = download(drafts)
        sent = torch.cuda.Event()
        sent.record()

        def wait() -> list[list[int]]:
            sent.synchronize()
            return host.tolist()

        return wait

    def read(self, pending: PendingResult) -> list[Committed]:
        """Reads the result of a step or of a first token, which has arrived on the host."""
        found = []
        prompt = None if pending.scored is None else packed(pending.scored)
        for row, (count, *tokens) in enumerate(pending.tokens.tolist()):
            logprobs = pending.logprobs_of(row, count)
            poisons = -1 in tokens
            found.append(Committed(tokens[:count], logprobs, prompt, not poisons or -1 not in tokens[:count], poisons))
        self._context.results.give_back(pending)
        return found

    # ---- captured parts --------------------------------------------------------------------------------

    @staticmethod
    def parts(sizes: Sequence[Size]) -> list[Part]:
        """Returns the parts of steps that are not all greedy, without the choices."""
        found = [Part("propose", *size) for size in sizes if size[1] > 1]
        return found + [Part("read", *size) for size in sizes] + [Part("end", *size) for size in sizes]

    @staticmethod
    def choices(sizes: Sequence[Size], masked: bool) -> list[Part]:
        """Returns the parts that choose tokens; `masked`: also those under a grammar."""
        modes = [mode for mode in Mode if masked or not mode.masked]
        return [Part("choose", *size, mode) for mode in modes for size in sizes]

    @torch.inference_mode()
    def run(self, part: Part) -> Tensor | None:
        """Runs a part of a step, or a whole greedy step, without a graph."""
        if part.kind == "choose":
            return self._choose(part.rows, part.block, part.mode)
        run = {"step": self._step, "propose": self._propose, "read": self._read, "end": self._end}[part.kind]
        return run(part.rows, part.block)

    def _step(self, batch: int, block: int) -> Tensor:
        """Runs one greedy step of the first `batch` rows: int64 [batch, 1 + S], see `PendingResult`."""
        context = self._context
        rows = context.state.rows(batch, block)
        read = self._read_block(self._draft(rows, block), rows)
        choice = context.state.sampler.greedy(read.hidden.flatten(0, 1), context.target.head).view(batch, block)
        return self._commit(read, choice)[0]

    def _propose(self, batch: int, block: int) -> None:
        rows, sampled = self._context.state.rows(batch, block), self._sample_drafts and block > 1
        self._context.buffers.put_draft(self._sampled_draft(rows, block) if sampled else self._draft(rows, block))

    def _read(self, batch: int, block: int) -> None:
        draft = Draft(self._context.buffers.draft(batch, block))
        self._context.buffers.put_block(self._read_block(draft, self._context.state.rows(batch, block)))

    def _choose(self, count: int, block: int, mode: Mode) -> Tensor | None:
        """Chooses for `count` rows of that mode, and returns their log-probabilities."""
        context, buffers = self._context, self._context.buffers
        rows, hidden, draft, lengths = buffers.of_mode(mode, count, block)
        masks = buffers.masks(count, block, context.words) if mode.masked else None
        sampler, head = context.state.sampler, context.target.head
        choice, logprobs = sampler.choose(hidden, head, rows, draft, lengths, mode, masks)
        buffers.put_choice(rows, choice)
        return None if logprobs is None else buffers.put_logprobs(mode, logprobs)

    def _end(self, batch: int, block: int) -> Tensor:
        state = self._context.state
        read, choice = self._context.buffers.block(state.page_table[:batch], state.page_size, block)
        tokens, verdict = self._commit(read, choice)
        state.sampler.count(slice(0, batch), verdict.path, verdict.counts)
        return tokens

    def _draft(self, rows: Rows, block: int) -> Draft:
        context = self._context
        last = context.state.last_token[: len(rows.lengths)]
        if context.proposer and block > 1:
            draft = context.proposer.propose(last, rows, block)
            if context.random_tokens is None:
                return draft
            return Draft(context.random_tokens[: draft.tokens.numel()].view_as(draft.tokens))
        return Draft(last.new_empty(len(last), 0))

    def _sampled_draft(self, rows: Rows, block: int) -> Draft:
        context, batch = self._context, len(rows.lengths)
        assert context.proposer is not None
        sampler = context.state.sampler
        uniform = sampler.draft_uniform(rows.lengths, block - 1)
        return context.proposer.sample(context.state.last_token[:batch], rows, sampler.temperature[:batch], uniform)

    def _read_block(self, draft: Draft, rows: Rows) -> ReadBlock:
        last = self._context.state.last_token[: len(rows.lengths)]
        hidden, features = self._context.verifier.read(draft, last, rows)
        return ReadBlock(rows, draft.tokens, hidden, features)

    def _commit(self, read: ReadBlock, choice: Tensor) -> tuple[Tensor, Verdict]:
        context = self._context
        verdict = context.verifier.commit(read.draft, choice, context.state)
        if context.proposer and read.features is not None:
            context.proposer.write_context(read.features, read.rows, verdict.counts)
        tokens = context.mark_finite(verdict.path, read.hidden)
        return torch.cat([verdict.counts[:, None].long(), tokens], dim=1), verdict
