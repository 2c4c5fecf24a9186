"""vLLM in this process as a decoder, for targets that the engine does not compute, on one or several GPUs."""

import gc
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from dflash_toolkit.config import UserError
from dflash_toolkit.evaluation.measure.decoders import Chat, Response
from dflash_toolkit.generation import FinishReason, Generation
from dflash_toolkit.models.restrictions import server_bias
from dflash_toolkit.sampling import SamplingParams, int64_seed


def import_vllm() -> Any:
    """Imports vllm. Raises UserError if it is not installed."""
    try:
        import vllm
    except ImportError as error:
        raise UserError(
            "runtime vllm needs vllm: pip install 'dflash-toolkit[vllm]' in an environment of its own (it pins its "
            "torch), or start 'vllm serve' and give --endpoint"
        ) from error
    return vllm


class VllmBackend:
    """Continuous batching on vLLM's own loop; see `evaluation.measure.decoders.Decoder`.

    Args:
        stops: token ids that end a response.
        batch: concurrent responses.
        context: prompt and response together, in tokens.
        gpus: GPUs that share the target (tensor parallelism).

    Raises:
        UserError: no vllm, or vllm refuses the model or the machine.
    """

    def __init__(self, target: str, stops: Sequence[int], *, dtype: str, batch: int, context: int, gpus: int) -> None:
        self._vllm = import_vllm()
        self._stops = list(stops)
        self._finished: deque[Response] = deque()
        self.width = 2 * batch  # the next requests wait in vLLM
        try:
            self._llm: Any = self._vllm.LLM(
                model=target, dtype=dtype, max_num_seqs=batch, max_model_len=context, tensor_parallel_size=gpus,
                skip_tokenizer_init=True, generation_config="vllm",  # ids in, ids out; our sampling parameters
            )  # fmt: skip
        except (ValueError, RuntimeError, OSError) as error:
            raise UserError(f"vllm cannot load {target}: {' '.join(str(error).split())}") from error

    def submit(self, key: int, prompt: list[int], params: SamplingParams, chat: Chat | None = None) -> None:
        wanted = self._vllm.SamplingParams(
            temperature=params.temperature, top_p=params.top_p, top_k=params.top_k, min_p=params.min_p,
            seed=int64_seed(params.seed) if params.temperature > 0 else None, max_tokens=params.max_tokens,
            stop_token_ids=[*self._stops, *params.stop_token_ids], detokenize=False,
            logit_bias=server_bias(params) or None,
            output_kind=self._vllm.sampling_params.RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        try:
            self._llm.llm_engine.add_request(str(key), {"prompt_token_ids": prompt}, wanted)
        except ValueError as error:
            raise UserError(f"vllm refuses a prompt: {error}") from error

    def wait(self) -> Response:
        while not self._finished:
            if not self._llm.llm_engine.has_unfinished_requests():
                raise RuntimeError("no request is running")
            for output in self._llm.llm_engine.step():
                if output.finished:
                    answer = output.outputs[0]
                    reason: FinishReason = "length" if answer.finish_reason == "length" else "stop"
                    generation = Generation(list(answer.token_ids), finish_reason=reason)
                    self._finished.append(Response(int(output.request_id), generation))
        return self._finished.popleft()

    def close(self) -> None:
        self._llm = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
