"""Checks without a forward pass: of the checkpoint, the target's configuration and the tokenizer."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ..checkpoint.reader import locate
from ..config import UserError
from ..fingerprint import template_digest, tensor_digest
from ..models.dflash.architecture import DraftArchitecture
from ..models.dflash.checkpoint import (
    PROVENANCE_KEY,
    check_fits,
    read_config,
    read_json,
    read_tensors,
    tensor_shapes,
)
from ..models.dflash.config import DrafterConfig
from ..models.dflash.network import Drafter
from ..models.rope import RopeScaling, full_rope
from ..record import RECORD_KEY, SCHEMA, seal
from ..stop_tokens import stop_tokens
from ..templates import is_text
from .finding import Finding

INITIAL_STD = 0.02  # every matrix before training (Qwen3's, and this project's)
SHOWN = 3  # names in a sentence; the figures hold all


@dataclass(frozen=True, slots=True)
class Case:
    """The files of a drafter that may be broken, and the target that it is to serve."""

    name: str
    raw: dict[str, Any]  # config.json as it is
    config: DrafterConfig | None  # None: see `problem`
    problem: str
    tensors: dict[str, Tensor]
    target: PreTrainedConfig
    tokenizer: Any  # the target's
    thinking: bool | None  # how prompts are rendered

    @classmethod
    def read(cls, name: str, target: PreTrainedConfig, tokenizer: Any, thinking: bool | None) -> "Case":
        """Reads a drafter without refusing a wrong one. Raises UserError if there is nothing to examine."""
        path: Path = locate("drafter", name)
        raw = read_json(path / "config.json")
        config, problem = None, ""
        try:
            config = read_config(path)
        except UserError as error:
            problem = str(error).removeprefix(f"drafter {path}: ")
        tensors = read_tensors(path, tensor_shapes(config) if config else ())
        return cls(name, raw, config, problem, tensors, target, tokenizer, thinking)

    @property
    def speculators(self) -> bool:
        """Whether it is in that library's format, which has other keys."""
        return "speculators_model_type" in self.raw

    @property
    def provenance(self) -> dict[str, Any]:
        """The record of `dflash-train`; empty for drafters from elsewhere."""
        noted = self.raw.get(PROVENANCE_KEY)
        return noted if isinstance(noted, dict) else {}

    @property
    def record(self) -> dict[str, Any] | None:
        """The record of the export (`record.export_record`); None: there is none, or it was edited."""
        noted = self.provenance.get(RECORD_KEY)
        if not isinstance(noted, dict) or noted.get("schema") != SCHEMA or noted.get("seal") != seal(noted):
            return None
        return noted

    @property
    def recorded_tau(self) -> float | None:
        """Tokens per step that were measured at export, limited to blocks of this size."""
        noted = self.provenance.get("acceptance_length")
        if not isinstance(noted, int | float) or isinstance(noted, bool) or not math.isfinite(noted):
            return None
        return float(min(noted, self.config.block_size)) if self.config else float(noted)

    @property
    def expected(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of tensors by the configuration."""
        return tensor_shapes(self.config) if self.config else {}

    @property
    def answered_by(self) -> list[dict[str, Any]]:
        """How the responses of its training were generated, as far as the checkpoint records it."""
        noted = self.provenance.get("answers")
        return [answers for answers in (noted if isinstance(noted, list) else [noted]) if isinstance(answers, dict)]

    @property
    def measurable(self) -> bool:
        """Whether the drafter can run on this target at all."""
        if self.config is None or fitting_problem(self):
            return False
        return all(n in self.tensors and tuple(self.tensors[n].shape) == s for n, s in self.expected.items())

    def drafter(self) -> Drafter:
        """The module of a measurable case; without tensors that it does not know."""
        assert self.config is not None
        tensors = {name: self.tensors[name] for name in self.expected}
        return Drafter.of_tensors(self.config, tensors).to(torch.bfloat16).eval().requires_grad_(False)


def fitting_problem(case: Case) -> str:
    """Returns why this drafter cannot run on this target; empty if it can."""
    if case.config is None:
        return ""
    try:
        check_fits(case.config, case.target)
    except UserError as error:
        return str(error)
    return ""


def check_configuration(case: Case) -> list[Finding]:
    """Checks that config.json can be read, and that all loaders read the same from it."""
    if case.config is None:
        remedy = "fix that key of the drafter's config.json; nothing can be measured before"
        return [Finding("configuration", "fault", case.problem.removeprefix("config.json: "), remedy)]
    raw, found = case.raw, []
    for key, group in (
        ("rope_theta", "rope_parameters"),
        ("block_size", "dflash_config"),
        ("target_layer_ids", "dflash_config"),
        ("mask_token_id", "dflash_config"),
    ):
        nested = raw.get(group)
        two = (raw.get(key), nested.get(key) if isinstance(nested, dict) else None)
        if None not in two and two[0] != two[1]:
            remedy = f"give {key} and {group}.{key} of config.json the same value"
            found.append(Finding("configuration", "fault", f"{key} is {two[0]}, {group}.{key} {two[1]}", remedy))
    if "num_target_layers" not in raw and not case.speculators:
        remedy = f"add num_target_layers: {case.target.num_hidden_layers} to config.json: SGLang and z-lab need it"
        found.append(Finding("configuration", "warning", "num_target_layers is missing", remedy))
    return found or [Finding("configuration", "ok", "config.json is readable and agrees with itself")]


def check_fit(case: Case) -> list[Finding]:
    """Checks hidden size, depth, vocabulary and ids against the target's."""
    if case.config is None:
        return []
    if problem := fitting_problem(case):
        if changed := _changed_sizes(case):
            values = " and ".join(f"set {key} to {json.dumps(value)}" for key, value in changed.items())
            remedy = f"{values} in config.json, as it was exported"
            return [Finding("fit", "fault", problem, remedy, {"recorded": changed})]
        made_for = case.provenance.get("target")
        hint = f"; config.json says that it was made for {made_for}" if made_for else ""
        return [Finding("fit", "fault", problem, f"use the target that this drafter was made for{hint}")]
    sizes = f"hidden size {case.config.hidden_size}, {case.target.num_hidden_layers} layers, {case.config.vocab_size}"
    return [Finding("fit", "ok", f"{sizes} tokens: those of the target")]


def _changed_sizes(case: Case) -> dict[str, Any]:
    """Returns the recorded values of the keys that keep a drafter from fitting; empty if others do."""
    if case.record is None or case.config is None:
        return {}
    then = case.record["configuration"]
    keys = ("hidden_size", "vocab_size", "num_target_layers", "target_layer_ids", "mask_token_id")
    recorded: dict[str, Any] = {key: tuple(then[key]) if key == "target_layer_ids" else then[key] for key in keys}
    changed = {key: value for key, value in recorded.items() if value != getattr(case.config, key)}
    try:
        check_fits(replace(case.config, **changed), case.target)
    except (UserError, ValueError):
        return {}
    return changed


def check_tensors(case: Case) -> list[Finding]:
    """Checks that every tensor exists, has its shape, and no other exists."""
    if case.config is None:
        return []
    expected, found = case.expected, []
    missing = [n for n in expected if n not in case.tensors]
    unused = [n for n in case.tensors if n not in expected]
    wrong = [n for n, s in expected.items() if n in case.tensors and tuple(case.tensors[n].shape) != s]
    if missing:
        remedy = "export the drafter again; a server that fills them with random numbers drafts noise"
        found.append(Finding("tensors", "fault", f"missing: {some(missing)}", remedy, {"missing": missing}))
    if wrong:
        shapes = f"{wrong[0]} has shape {list(case.tensors[wrong[0]].shape)}, not {list(expected[wrong[0]])}"
        remedy = "config.json and the weights are of two drafters, or the sizes in config.json are wrong"
        found.append(Finding("tensors", "fault", f"misshapen: {shapes} ({len(wrong)} in all)", remedy))
    if unused:
        remedy = "a variant of DFlash, or a wrong num_hidden_layers: decoding does not use these tensors"
        found.append(Finding("tensors", "fault", f"not used: {some(unused)}", remedy, {"unused": unused}))
    return found or [Finding("tensors", "ok", f"all {len(expected)} exist, in their shapes")]


def check_weights(case: Case) -> list[Finding]:
    """Checks for NaN, infinite, all-zero and never-trained tensors, and norms far from those of training."""
    if case.config is None:
        return []
    tensors = {name: case.tensors[name].float() for name in case.expected if name in case.tensors}
    broken = [name for name, t in tensors.items() if not t.isfinite().all()]
    architecture = case.config.architecture
    initial = {name: _is_initial(architecture, name, t) for name, t in tensors.items()}
    zero = [name for name, t in tensors.items() if not t.any() and not name.endswith(".bias")]
    idle = [name for name in zero if _is_idle(name, initial) and not _was_trained(case, name)]
    zero = [name for name in zero if name not in idle]
    found = []
    if broken:
        remedy = "train again from a resume point before it diverged, with a lower learning rate"
        found.append(Finding("weights", "fault", f"NaN or infinite: {some(broken)}", remedy, {"not_finite": broken}))
    if zero:
        remedy = "the export lost these tensors; export again from the trained module"
        found.append(Finding("weights", "fault", f"all zero: {some(zero)}", remedy, {"zero": zero}))
    if tensors and all(initial.values()):
        remedy = "this is an initialisation, not a trained drafter: look for the export of the finished run"
        found.append(Finding("weights", "fault", "never trained: every tensor is as it was initialised", remedy))
    else:
        for part in architecture.parts:
            for which in part.idle:
                if untrained := [name for name in idle if which.name in name]:
                    measured = f"never trained: {some(untrained)} as initialised, all zero: {which.words}"
                    found.append(Finding(part.name, "fault", measured, which.remedy, {"zero": untrained}))
        for i in range(case.config.num_layers):
            own = [flag for name, flag in initial.items() if name.startswith(f"layers.{i}.")]
            if own and all(own):
                remedy = f"train again with gradients for layers.{i}, or remove it"
                found.append(Finding("weights", "warning", f"layers.{i} is as it was initialised", remedy))
    norms = {n: t for n, t in tensors.items() if t.dim() == 1 and not n.endswith(".bias") and n not in broken + zero}
    odd = [name for name, t in norms.items() if t.abs().max() > 1e3 or t.abs().median() < 1e-3]
    if odd:
        name = odd[0]
        spread = f"{name} has median {norms[name].median():.3g}, largest {norms[name].abs().max():.3g}"
        remedy = "a norm this far from 1 points to a diverged run or to weights stored minus 1"
        found.append(Finding("weights", "warning", spread, remedy, {"norms": odd}))
    dtypes = sorted({str(t.dtype).removeprefix("torch.") for t in case.tensors.values() if t.dtype != torch.bool})
    if set(dtypes) - {"bfloat16", "float16", "float32"}:
        remedy = "export in bfloat16: quantized drafters are not read"
        found.append(Finding("weights", "warning", f"stored as {', '.join(dtypes)}", remedy))
    return found or [Finding("weights", "ok", f"{', '.join(dtypes)}, finite, none zero, all trained")]


def _is_idle(name: str, initial: Mapping[str, bool]) -> bool:
    """Whether a tensor was never trained, nor the others of its module: else the export lost it."""
    module = name.removesuffix(".weight").rpartition(".")[0]
    return all(flag for other, flag in initial.items() if other.startswith(f"{module}."))


def _was_trained(case: Case, name: str) -> bool:
    """Whether a tensor that is all zero was not so at export; only a record shows it."""
    recorded = case.record["tensors"].get(name) if case.record else None
    return recorded is not None and not tensor_digest(case.tensors[name]).startswith(recorded)


def _is_initial(architecture: DraftArchitecture, name: str, tensor: Tensor) -> bool:
    """Whether norms are exactly one and matrices normal with the initial deviation, as never after real training.

    The additions of an architecture have no effect before training.
    """
    if (initial := architecture.is_initial(name, tensor)) is not None:
        return initial
    if tensor.dim() == 1:
        return bool((tensor == 1).all() or (tensor == 0).all())
    root = tensor.numel() ** 0.5
    spread = abs(float(tensor.std()) / INITIAL_STD - 1) < 4 / (2**0.5 * root) + 2**-9  # four standard errors, and bf16
    return spread and abs(float(tensor.mean())) < 5 * INITIAL_STD / root


def check_rope(case: Case) -> list[Finding]:
    """Shows theta and scaling next to the target's, as a drafter may have its own, and vLLM's reading of them.

    The best value is found by a sweep.
    """
    if case.config is None:
        return []
    theta, scaling = rope_of(case.target)
    words = f"{rope_words(case.config.rope_theta, case.config.rope_scaling)}; the target's {rope_words(theta, scaling)}"
    own = full_rope(case.target)
    if scaling is None and own.get("rope_type", "default") != "default":
        words += f", scaled as no drafter is ({own['rope_type']})"
    found = [Finding("rope", "ok", words, figures={"target": dict(own)})]
    if case.config.rope_scaling and (note := case.config.rope_scaling.vllm_note()):
        remedy = "serve it with dflash-serve, or train it without those keys in its rope for vLLM"
        found.append(Finding("rope", "warning", note, remedy))
    layer = case.raw.get("transformer_layer_config") or case.raw
    name = "rope_scaling" if layer.get("rope_scaling") else "rope_parameters"
    group = layer.get(name) or {}
    if nulls := [key for key in ("rope_type", "type", "partial_rotary_factor") if group.get(key, "") is None]:
        remedy = f"remove the null keys from {name} of config.json: vLLM 0.26 fails on them"
        found.append(Finding("rope", "warning", f"{name} has null for {' and '.join(nulls)}", remedy))
    return found


def rope_of(target: PreTrainedConfig) -> tuple[float | None, RopeScaling | None]:
    """Returns a target's theta, None if not given, and its scaling, None if plain or of a type without support."""
    group = full_rope(target)
    try:
        scaling = RopeScaling.read(group, {"max_position_embeddings": target.max_position_embeddings})
    except ValueError:
        scaling = None
    return group.get("rope_theta"), scaling


def rope_words(theta: float | None, scaling: RopeScaling | None) -> str:
    """Returns `theta 10000`, and the scaling."""
    return f"theta {'unknown' if theta is None else f'{theta:g}'}" + (f", {scaling}" if scaling else "")


def scale_words(multiplier: float, cap: float | None) -> str:
    """Returns `logits x 0.2, capped at 20`."""
    return f"logits x {multiplier:g}" + (f", capped at {cap:g}" if cap else "")


def check_mask_token(case: Case) -> list[Finding]:
    """Checks that no text uses the mask's row. (A sweep checks whether another row works better.)"""
    if case.config is None:
        return []
    mask, tokenizer = case.config.mask_token_id, case.tokenizer
    roles = {"pad": tokenizer.pad_token_id, "bos": tokenizer.bos_token_id, "unk": tokenizer.unk_token_id}
    used = [f"the {role} token" for role, token in roles.items() if token == mask]
    if mask in stop_tokens(case.target, None, tokenizer):
        used.append("an end-of-sequence token")
    elif not used and mask < len(tokenizer) and mask not in set(tokenizer.get_added_vocab().values()):
        used.append(f"the token {tokenizer.decode([mask])!r}")
    if used:
        remedy = "train with an unused row of the embedding as mask: dflash-train chooses one by itself"
        return [Finding("mask row", "warning", f"mask_token_id {mask} is {' and '.join(used)}", remedy)]
    kind = "an unused row" if mask >= len(tokenizer) else "a special token"
    return [Finding("mask row", "ok", f"mask_token_id {mask} is {kind} of the embedding")]


def check_template(case: Case) -> list[Finding]:
    """Checks that the drafter was trained with the present chat template, and on the target's own responses."""
    recorded = case.provenance.get("template_hash")
    present = template_digest(case.tokenizer)
    found = []
    if recorded is not None and recorded != present:
        remedy = "serve with the tokenizer and chat template of training, or train again with the present ones"
        if (case.provenance.get("prompt_format") == "text") != is_text(case.tokenizer):
            remedy = "it was trained with another --prompt-format: examine it with that, and serve such prompts"
        measured = f"trained on template {str(recorded)[:12]}, the tokenizer now has {present[:12]}"
        found.append(Finding("template", "fault", measured, remedy, {"recorded": recorded, "present": present}))
    if any(answers.get("regenerate") is False for answers in case.answered_by):
        remedy = "train on responses that this target wrote (responses.regenerate=true)"
        found.append(Finding("template", "warning", "trained on responses of the data, not of the target", remedy))
    words = "no record of the template that it was trained on" if recorded is None else "the one it was trained on"
    return found or [Finding("template", "ok", words)]


def some(names: list[str]) -> str:
    """Returns the first names of a list, and the number of the others."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


FILE_CHECKS: tuple[Callable[[Case], list[Finding]], ...] = (
    check_configuration,
    check_fit,
    check_tensors,
    check_weights,
    check_rope,
    check_mask_token,
    check_template,
)
