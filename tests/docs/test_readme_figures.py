"""Figures in the tables of README.md and docs/engine.md are those of the files in scripts/results."""

import json
from typing import Any

import pytest
from paths import ROOT

ACCEPT = 0.865  # of every drafted position, in the table of the step
SETS = ("gsm8k", "mbpp", "humaneval", "mt_bench")


def result(name: str) -> Any:
    return json.loads((ROOT / "scripts" / "results" / f"{name}_h200.json").read_text())


def table(file: str, header: str) -> list[list[str]]:
    """The cells of the table whose first line begins so, a list a row."""
    lines = (ROOT / file).read_text().splitlines()
    found = []
    for line in lines[next(i for i, line in enumerate(lines) if line.startswith(f"| {header} |")) + 2 :]:
        if not line.startswith("|"):
            break
        found.append([cell.strip() for cell in line.strip("|").split("|")])
    return found


def text(file: str) -> str:
    """All of it on one line."""
    return " ".join((ROOT / file).read_text().split())


def by_batch(rows: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    return {row["batch"]: row for row in rows}


def scaled(tokens_per_second: float, tokens_per_step: float, block: int) -> float:
    """Tokens a second if a request's steps gave as many tokens as the probability promises."""
    return tokens_per_second / tokens_per_step * (1 - ACCEPT**block) / (1 - ACCEPT)


def test_the_step_beside_vllm() -> None:
    ours, theirs = result("step_qwen3_8b"), result("peer_vllm_qwen3_8b")
    chosen, plain = by_batch(ours["chosen"]["rows"]), by_batch(ours["plain"]["rows"])
    floor = ours["block16"]["rows"][0]["floor_ms"]  # every weight once, whatever the batch
    engines = {name: by_batch(engine["rows"]) for name, engine in theirs["same_job"]["engines"].items()}
    found = []
    for batch, row in chosen.items():
        block = round(row["median_block"])
        tokens = scaled(row["tokens_per_second"], row["tokens_per_step"], block)
        rivals = []
        for k in (15, 7):
            rival = engines[f"k{k}"][batch]
            rivals.append((scaled(rival["tokens_per_second"], rival["tokens_per_step"], k + 1), k))
        best, k = max(rivals)
        alone = engines["plain"][batch]["tokens_per_second"]
        full = row["ms_of_a_full_step"]
        found.append([
            str(batch), f"{plain[batch]['tokens_per_second']:.0f}", f"{alone:.0f}",
            f"{plain[batch]['tokens_per_second'] / alone:.2f}x",
            f"{tokens:.0f} ({block})", f"{best:.0f} ({k})", f"{tokens / best:.2f}x", f"{full:.1f} ms",
            f"{100 * floor / full:.0f} %",
        ])  # fmt: skip
    assert table("README.md", "batch | plain tok/s") == found


def test_useless_requests_among_good_ones() -> None:
    file = result("step_qwen3_8b")
    plain = by_batch(file["plain_before_early_start"]["rows"])  # in the same job
    expected = []
    for name in ("1 of 8", "4 of 8", "1 of 32", "16 of 32"):
        (row,) = file["mixed"][name]["rows"]
        alone = plain[row["batch"]]["ms_of_a_full_step"]
        shown = [row["ms_of_a_full_step"], alone, row["ms_per_token_useless"], row["ms_per_token_others"]]
        longer = f"{100 * (row['ms_per_token_useless'] / alone - 1):.0f} %"
        expected.append([name, *(f"{ms:.2f}" for ms in shown), longer])
    assert table("docs/engine.md", "useless") == expected


def test_parts_of_the_step() -> None:
    file = result("step_qwen3_8b")
    found, graphs = [], []
    for name, block in (("block16", 16), ("block8", 8), ("block4", 4)):
        for row in file[name]["rows"]:
            parts = {part: f"{us / 1e3:.2f}" for part, us in row["parts_us"].items()}
            shown = [parts[part] for part in ("products", "draft", "head", "attention", "context", "rest")]
            step = sum(row["parts_us"].values()) / 1e3
            assert step == pytest.approx(row["graph_ms"], rel=0.05), "a power limit may weigh differently, no more"
            of_floor = f"{100 * row['floor_ms'] / step:.0f} %"
            found.append([f"{row['batch']}, {block}", f"{step:.2f} ms", *shown, of_floor])
            graphs.append(f"{row['graph_ms']:.2f}")
    assert table("docs/engine.md", "batch, block | a step") == found
    assert f"graphs took {', '.join(graphs[:-1])} and {graphs[-1]} ms" in text("docs/engine.md")


def test_attention_that_starts_early() -> None:
    rows = result("step_early")["rows"]
    expected = [
        [f"{row['shape']}, {row['batch']}, {row['block']}", *(f"{ms:.3f}" for ms in row["graph_ms"].values())]
        for row in rows
    ]
    assert table("docs/engine.md", "shape, batch, block | before") == expected
    others = json.loads((ROOT / "scripts/results/step_early_h100.json").read_text())["rows"]
    gains = [100 * (1 - ms["early start too"] / ms["before"]) for ms in (row["graph_ms"] for row in others)]
    said = f"an H100 the graphs of batch 1 and 8 gain {min(gains):.1f} to {max(gains):.1f} % by both"
    assert {row["batch"] for row in others} == {1, 8} and said in text("docs/engine.md")
    pairs = [
        row
        for row in result("attention_qwen3_8b")["pairs"]["rows"]
        if (row["batch"], row["block"]) == (8, 16) and row["context"] != 640
    ]
    two, one = ([f"{row[f'{way}_us']:.1f}" for row in pairs] for way in ("pairs", "split"))
    contexts = "512, 800 and 4096 tokens take {}, {} and {} us instead of {}, {} and {}"
    assert [row["context"] for row in pairs] == [512, 800, 4096]
    assert contexts.format(*two, *one) in text("docs/engine.md")


def test_a_small_model() -> None:
    found = []
    for row in result("step_qwen05")["now"]["rows"]:
        parts = {part: f"{us:.0f}" for part, us in row["parts_us"].items()}
        shown = [parts.get(part, "") for part in ("products", "draft", "head", "attention", "context", "rest")]
        found.append(
            [str(row["block"]), f"{1e3 * row['graph_ms']:.0f}", *shown, f"{100 * row['of_floor_graph']:.0f} %"]
        )
    assert table("docs/engine.md", "block | graph of a step") == found


def test_acceptance_of_drafts_in_fp8() -> None:
    variants = result("fp8_acceptance")["eight_at_a_time"]["variants"]
    steps = {name: sum(found["verify_steps"] for found in sets.values()) for name, sets in variants.items()}
    answers = {name: [(x["requests"], x["tokens"]) for x in sets.values()] for name, sets in variants.items()}
    assert answers["full"] == answers["head"] == answers["head and layers"]
    requests = sum(count for count, _ in answers["full"])
    said = "{:,} steps for {} answers, {:,} with the head alone and {:,} in full precision"
    assert said.format(steps["head and layers"], requests, steps["head"], steps["full"]) in text("docs/engine.md")


def test_acceptance_after_minutes_of_training() -> None:
    training, vllm = result("train_qwen05"), result("peer_vllm_qwen05")

    def cells(sets: dict[str, Any], pooled: float) -> list[str]:
        lengths = [sets[name]["tau_pooled"] for name in SETS]
        return [f"{tau:.2f}" for tau in (*lengths, pooled, sets["math500"]["tau_pooled"])]

    rows = {row[0]: row[1:] for row in table("README.md", "acceptance length (greedy, 512 tokens)")}
    runs = {
        "after 8 minutes, two answers a prompt": "pipeline",
        "after 4 minutes, two answers a prompt": "regenerated_four_minutes",
        "after 2 minutes, two answers a prompt": "regenerated_two_minutes",
        "after 4 minutes on those": "four_minutes",
        "on those, four times as many blocks of each a step: after 8 minutes": "eight_minutes",
    }
    runs_shown = {label: training[name]["runs"][-1] for label, name in runs.items()}
    two, eight = training["given_two_and_eight_minutes"]["runs"]
    runs_shown |= {"after 2 minutes on those": two, "after 8 minutes on 9160 given answers": eight}
    for label, run in runs_shown.items():
        speed = f"{run['steps']} steps, {run['sequences_per_second']:.0f} sequences/s"
        shown = next(row for row in rows if row in (label, f"{label}: {speed}", f"{label}, {speed}"))
        assert rows.pop(shown) == cells(run["sets"], run["pooled"]["tau"]), label
    peer = cells(vllm["sets"], vllm["pooled"]["these four"]["tau_pooled"])
    assert rows.pop("this one in vLLM 0.26, same prompts") == peer
    assert [row.split(" ")[0] for row in rows] == ["ModelOpt"]


def test_real_weights() -> None:
    training, vllm = result("train_qwen05"), result("peer_vllm_qwen05")
    run, four = (training[name]["runs"][0]["sets"] for name in ("pipeline", "regenerated_four_minutes"))
    names = (*SETS, "math500")
    ours = [run["gsm8k"]["plain_tokens_per_second"], *(run[name]["tokens_per_second"] for name in names)]
    theirs = [vllm["plain"]["tokens_per_second"], *(vllm["sets"][name]["decode_tokens_per_second"] for name in names)]
    others = [four["gsm8k"]["plain_tokens_per_second"], *(four[name]["tokens_per_second"] for name in names)]
    shown = table("README.md", "Qwen2.5-Coder-0.5B-Instruct | plain")
    assert [row[1:] for row in shown] == [[f"{tokens:.0f}" for tokens in row] for row in (ours, others, theirs)]
    speedups = [f"{four[name]['speedup']:.2f}" for name in names]
    assert f"{', '.join(speedups[:-1])} and {speedups[-1]} times" in text("README.md")
    assert all(four[name]["identical_to_plain"] == 1.0 for name in names)
    gsm8k = run["gsm8k"]
    first = [gsm8k["tau_pooled"], gsm8k["plain_tokens_per_second"], gsm8k["tokens_per_second"], gsm8k["speedup"]]
    written = [f"{first[0]:.2f}", f"{first[1]:.0f}", f"{first[2]:.0f}", f"{first[3]:.2f}x"]
    assert gsm8k["identical_to_plain"] == 1.0
    assert table("README.md", "target")[0][2:] == [*written, f"{gsm8k['requests']} of {gsm8k['requests']}"]


def test_minutes_of_training_with_todays_defaults() -> None:
    training = result("train_qwen05")
    runs = [training[name]["runs"][0]["sets"] for name in ("regenerated_two_minutes", "regenerated_four_minutes")]
    runs.append(training["pipeline"]["runs"][0]["sets"])
    expected = []
    names = (*SETS, "math500")
    for minutes, sets in zip(("2", "4", "8"), runs, strict=True):
        expected.append([minutes, "acceptance length", *(f"{sets[name]['tau_pooled']:.2f}" for name in names)])
        expected.append(["", "tokens/s", *(f"{sets[name]['tokens_per_second']:.0f}" for name in names)])
    plain = [f"{runs[1][name]['plain_tokens_per_second']:.0f}" for name in names]
    assert table("docs/training.md", "minutes") == [*expected, ["none", "tokens/s", *plain]]


def test_which_settings() -> None:
    jobs = result("train_qwen05")["ablation"]
    runs = {
        run["name"]: run
        for job in ("base", "optimizers_and_layers", "weights_taps_and_kl")
        for run in jobs[job]["runs"]
    }
    expected = []
    for run in sorted(runs.values(), key=lambda run: -run["pooled"]["tau"]):
        speed, tau = run["pooled"]["tokens_per_second"], run["pooled"]["tau"]
        expected.append(
            [str(run["steps"]), f"{run['epochs']:.1f}", f"{run['held_out_tau']:.2f}", f"{tau:.2f}", f"{speed:.0f}"]
        )
    shown = table("docs/training.md", "two minutes of")
    assert [row[1:] for row in shown] == expected
    settings = [", ".join(run["settings"]) for run in runs.values()]
    assert {row[0].replace("`", "") for row in shown[1:]} == set(filter(None, settings))


def test_what_useless_drafts_cost() -> None:
    runs = {
        name: by_batch(run["rows"]) for name, run in result("step_qwen3_8b")["useless_drafts"].items() if "rows" in run
    }

    def longer(which: str, tokens: int, batch: int) -> str:
        plain, drafted = (runs[f"{kind} {tokens}"][batch]["tokens_per_second"] for kind in ("plain", which))
        return f"{100 * (plain / drafted - 1):.1f}"

    expected = [
        [str(batch), *(longer(which, tokens, batch) for tokens in (256, 64) for which in ("first", "later"))]
        for batch in (1, 8, 32)
    ]
    assert table("docs/engine.md", "batch | 256 tokens, first") == expected
    later, first = ([f"{float(row[column]):.1f}" for row in expected] for column in (2, 1))
    said = "{}, {} and {} % longer than without a drafter at batch 1, 8 and 32, an engine's first ones {}, {} and {} %"
    assert said.format(*later, *first) in text("README.md")


def test_the_loss_beside_one_that_writes_no_logits() -> None:
    rows = {row["head_rows"]: row for row in result("loss_qwen3_8b")["found"]}
    row, every = rows[1024], [row["loss_ms"] for row in rows.values()]
    said_there = text("docs/training.md")
    for said in (
        f"cross-entropy takes {row['loss_ms']:.1f} ms, of which the kernel has {row['kernel_ms']:.1f}, while three "
        f"products alone take {row['unwritten_ms_at_least']:.1f}, "
        f"{100 * (row['unwritten_ms_at_least'] / row['loss_ms'] - 1):.0f} % more",
        f"with {min(rows)} to {max(rows)} rows at a time the loss takes {min(every):.1f} to {max(every):.1f} ms",
    ):
        assert said in said_there
