"""lm-eval measures a tiny target through the server as transformers does in this process: `make test-peers`.

DFLASH_LM_EVAL is a Python that has lm_eval 0.4.13, in its own environment. The tasks are local files, so no hub is
needed.
"""

import copy
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from live_server import make_engine, serving

from dflash_toolkit import Drafter, SamplingParams, Target, generate
from dflash_toolkit.data.prompts import encode_chat

pytestmark = [pytest.mark.peers, pytest.mark.timeout(600)]
# continuations of one token and of many; characters of several tokens
CHOICES = [
    {"question": "Why is the sky", "choices": [" blue", " green", "→", " é😀"], "label": 0},
    {"question": "é", "choices": ["a", "bc"], "label": 1},
    {"question": "Two and two" + " are" * 40, "choices": [" 4", " 5, of course, as everybody knows"], "label": 0},
]
QUESTIONS = [{"question": "Why?", "answer": "x"}, {"question": "Say é → 😀.", "answer": "y"}]
TEXTS = [{"text": "The sky is blue because of air. " * 40}, {"text": "é"}]  # the first is longer than the context
COMMON = {"dataset_path": "json", "test_split": "test", "metadata": {"version": 1}}
TASKS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "tiny_choice": (CHOICES, {
        "output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_target": "{{label}}",
        "doc_to_choice": "{{choices}}", "target_delimiter": "", "metric_list": [{"metric": "acc"}],
    }),
    "tiny_text": (TEXTS, {
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    }),
    "tiny_answer": (QUESTIONS, {
        "output_type": "generate_until", "doc_to_text": "{{question}}", "doc_to_target": "{{answer}}",
        "generation_kwargs": {
            "until": ["é", "\nclass", "\ndef", "\n#", "\nif", "\nprint"], "max_gen_toks": 24, "temperature": 0,
        },
        "metric_list": [{"metric": "exact_match"}],
    }),
}  # fmt: skip


@pytest.fixture(scope="module")
def url(target: Target, drafter: Drafter) -> Iterator[str]:
    with serving(make_engine(target, drafter, max_num_batched_tokens=64)) as url:
        yield url


@pytest.fixture(scope="module")
def exact(target: Target) -> Any:
    """Returns Hugging Face's model of the target in float64."""
    return copy.deepcopy(target.model).double()


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    for name, (rows, task) in TASKS.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        task = {"task": name, "dataset_kwargs": {"data_files": {"test": str(data)}}, **COMMON, **task}
        (folder / f"{name}.yaml").write_text(json.dumps(task))  # JSON is YAML
    return folder


def measured(tasks: Path, tmp_path: Path, model: str, names: str, *more: str, **arguments: Any) -> dict[str, Any]:
    """Returns the samples of every task that lm-eval writes, in the order of its file."""
    python = os.environ.get("DFLASH_LM_EVAL")
    if not python:
        pytest.skip("DFLASH_LM_EVAL is not set: run `make test-peers`")
    more = (*more, "--batch_size", str(arguments.pop("batch_size", 1)))
    given = ",".join(f"{name}={value}" for name, value in ({"model": "org/tiny"} | arguments).items())
    line = [python, "-m", "lm_eval", "--model", model, "--model_args", given, "--tasks", names, *more]
    line += ["--include_path", str(tasks), "--log_samples", "--output_path", str(tmp_path / "out")]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(line, env={**environment, **offline}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = {}
    for name in names.split(","):
        (path,) = (tmp_path / "out").rglob(f"samples_{name}_*.jsonl")
        found[name] = sorted(map(json.loads, path.read_text().splitlines()), key=lambda sample: sample["doc_id"])
    return found


def loglikelihood(exact: Any, before: list[int], ids: list[int]) -> tuple[float, bool]:
    """Returns the log-likelihood of `ids` after `before`, and whether they are the most probable ones."""
    with torch.inference_mode():
        rows = exact(torch.tensor([before + ids])).logits[0, len(before) - 1 : -1].log_softmax(-1)
    return float(rows.gather(1, torch.tensor(ids)[:, None]).sum()), rows.argmax(-1).tolist() == ids


@pytest.mark.parametrize(
    "options",
    [
        {"num_concurrent": 4, "batch_size": 3},
        {"num_concurrent": 1, "tokenized_requests": False},
        {"num_concurrent": 2, "tokenizer_backend": "auto"},
    ],
)
def test_loglikelihoods_are_those_of_transformers(
    url: str, tasks: Path, target: Target, target_dir: Path, exact: Any, tmp_path: Path, options: dict[str, Any]
) -> None:
    options = {"tokenizer_backend": "huggingface", "tokenizer": target_dir, "max_length": 512} | options
    names = "tiny_choice,tiny_text,tiny_answer"
    found = measured(tasks, tmp_path, "local-completions", names, base_url=f"{url}/v1/completions", **options)
    encode = target.tokenizer.encode
    for sample, row in zip(found["tiny_choice"], CHOICES, strict=True):
        expected = [loglikelihood(exact, encode(row["question"]), encode(choice)) for choice in row["choices"]]
        got = [(float(value), greedy == "True") for ((value, greedy),) in sample["resps"]]
        assert [value for value, _ in got] == pytest.approx([value for value, _ in expected], abs=1e-3)
        assert [greedy for _, greedy in got] == [greedy for _, greedy in expected]
    short = found["tiny_text"][1]["resps"][0][0]
    end = target.tokenizer.eos_token_id
    assert float(short) == pytest.approx(loglikelihood(exact, [end], encode("é"))[0], abs=1e-3)
    check_answers(found["tiny_answer"], [encode(row["question"]) for row in QUESTIONS], target)


def test_chats_equal_transformers(url: str, tasks: Path, target: Target, target_dir: Path, tmp_path: Path) -> None:
    more = {"base_url": f"{url}/v1/chat/completions", "num_concurrent": 2}
    found = measured(tasks, tmp_path, "local-chat-completions", "tiny_answer", "--apply_chat_template", **more)
    chats = [[{"role": "user", "content": row["question"]}] for row in QUESTIONS]
    check_answers(found["tiny_answer"], [encode_chat(target.tokenizer, chat) for chat in chats], target)


def check_answers(samples: list[dict[str, Any]], prompts: list[list[int]], target: Target) -> None:
    for sample, ids in zip(samples, prompts, strict=True):
        answer = generate(target, None, ids, SamplingParams(max_tokens=24))
        text = target.tokenizer.decode(answer.tokens, skip_special_tokens=True).split("é")[0]
        assert sample["resps"] == [[text]]
