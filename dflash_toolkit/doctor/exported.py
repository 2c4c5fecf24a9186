"""Compares the drafter and the target with the record of the export, which gives certain results."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from ..fingerprint import tensor_digest
from ..models.dflash.architecture import all_sizes
from ..models.dflash.checkpoint import SCALES
from ..models.rope import RopeScaling
from ..models.target import Target
from ..record import RECORD_KEY, configuration, distance, drafter_signature, target_signature
from .conversions import conversions
from .edits import Edit, Tensors, edits, is_norm, plus_one, renamed
from .files import Case, rope_words, scale_words, some
from .finding import Finding
from .probe import Setting
from .remedies import causality_remedy, layer_ids_remedy, mask_remedy, rope_remedy, scale_remedy

SAME = 1e-3  # the drafter's numbers: fp32 on a CPU, there and here
SAME_ROUNDED = 0.02  # after an edit that bf16 rounds, as 1 + (w - 1)
ROUNDED = 0.15  # the target's numbers, if either side computed in 16 bits: twice the deviation in tests
EXACT = 0.02  # if both computed in fp32, on any device
OTHER = 0.35  # above: other weights, not another quantization of the same
RECURRENT = 3.0  # factor on tolerances with recurrent layers: a head's read of its state is normed, however small it is
GROUP = 32  # adjacent weights that share a scale in the finest usual quantization
LIKE_JSON = {"num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads"}
NESTED = (*SCALES, *all_sizes())  # in dflash_config
AFTER_HEAD = ("output_multiplier", "final_logit_softcapping")
PLAIN_KEYS = ("num_heads", "num_kv_heads", "head_dim", "intermediate_size", "rms_norm_eps", "attention_bias", *NESTED)


@dataclass(slots=True)
class Exported:
    """The result of the comparison with the record."""

    known: bool = False  # there is a record
    findings: list[Finding] = field(default_factory=list)
    edits: list[Edit] = field(default_factory=list)  # these restore the recorded weights
    config: dict[str, Any] = field(default_factory=dict)  # the recorded values that config.json no longer has
    restorable: bool = False  # these edits and values give the exported drafter

    @property
    def as_exported(self) -> bool:
        """Whether the weights and the configuration on the disk are those of the export."""
        return self.restorable and not self.edits and not self.config

    def setting(self, now: Setting) -> Setting:
        """Returns the setting of the export, as far as it is known."""
        ids = self.config.get("target_layer_ids", now.layer_ids)
        scaling = self.config.get("rope_scaling", now.rope_scaling)
        return replace(
            now,
            layer_ids=tuple(ids),
            rope_theta=self.config.get("rope_theta", now.rope_theta),
            rope_scaling=scaling,
            mask_token_id=self.config.get("mask_token_id", now.mask_token_id),
            is_causal=self.config.get("is_causal", now.is_causal),
            output_multiplier=self.config.get("output_multiplier", now.output_multiplier),
            final_logit_softcapping=self.config.get("final_logit_softcapping", now.final_logit_softcapping),
            edits=(*now.edits, *self.edits),
        )


def compare(case: Case) -> Exported:
    """Compares the weights and the configuration with those recorded."""
    record = case.record
    if record is None or case.config is None:
        return Exported(findings=[_unknown(case)])
    found = Exported(known=True)
    settled = _layers(case, record, found)
    settled &= _configuration(case, record, found)
    settled &= _weights(case, record, found)
    found.restorable = settled and _computes(case, record, found)
    if found.as_exported:
        words = f"weights, configuration and outputs are those of the export ({str(record['sha256'])[:12]})"
        found.findings.append(Finding("record", "ok", words, figures={"sha256": record["sha256"]}))
    return found


def _unknown(case: Case) -> Finding:
    if case.record is not None:
        return Finding("record", "ok", "not compared: config.json cannot be read")
    if case.provenance.get(RECORD_KEY) is None:
        layers = "" if case.config is None else f", such as whether it had more than {case.config.num_layers} layers"
        words = f"the export left no record: later changes can only be found by trying, or not at all{layers}"
        return Finding("record", "ok", words)
    remedy = "take config.json from the export again, and change only keys outside of the record"
    return Finding("record", "warning", "the record in config.json was edited, or is of another version", remedy)


def _layers(case: Case, record: dict[str, Any], found: Exported) -> bool:
    assert case.config is not None
    recorded, present = record["configuration"]["num_layers"], case.config.num_layers
    if recorded == present:
        return True
    gone = [name for name in record["tensors"] if name not in case.tensors]
    words = f"it was exported with {recorded} layers, config.json says {present}"
    if gone:
        lost = sorted({".".join(name.split(".")[:2]) for name in gone})
        words += f" and the weights lack {some(lost)}"
        remedy = f"copy the export again, with all {recorded} layers: without {some(lost)} it drafts badly"
    else:
        remedy = f"set num_hidden_layers to {recorded} in config.json (and layer_types to as many)"
    figures = {"recorded": recorded, "present": present, "missing": gone}
    found.findings.append(Finding("layers", "fault", words, remedy, figures))
    return False


def _configuration(case: Case, record: dict[str, Any], found: Exported) -> bool:
    """Compares the keys that decide how it runs; the block's size may be chosen freely."""
    assert case.config is not None
    none = SCALES | dict.fromkeys(all_sizes(), 0)  # younger than some records
    then, now = none | record["configuration"], none | configuration(case.config)
    settled = True

    def fault(check: str, key: str, words: str, remedy: str, value: Any = None) -> None:
        figures = {"recorded": then[key], "present": now[key]}
        found.findings.append(Finding(check, "fault", words, remedy, figures))
        if value is not None:
            found.config[key] = value

    if then["target_layer_ids"] != now["target_layer_ids"]:
        ids, present = tuple(then["target_layer_ids"]), now["target_layer_ids"]
        check = "tap order" if sorted(ids) == sorted(present) else "layer ids"
        words = f"taps {present}, exported with {list(ids)}"
        fault(check, "target_layer_ids", words, layer_ids_remedy(case, ids), ids)
        settled &= len(ids) == len(present)
    if (then["rope_theta"], then["rope_scaling"]) != (now["rope_theta"], now["rope_scaling"]):
        theta, scaling = (
            float(then["rope_theta"]),
            RopeScaling(**then["rope_scaling"]) if then["rope_scaling"] else None,
        )
        present = rope_words(case.config.rope_theta, case.config.rope_scaling)
        words = f"{present}, exported with {rope_words(theta, scaling)}"
        fault("rope", "rope_theta", words, rope_remedy(case, theta, scaling, case.config.rope_scaling), theta)
        found.config["rope_scaling"] = scaling
    if then["mask_token_id"] != now["mask_token_id"]:
        token = then["mask_token_id"]
        words = f"mask_token_id {now['mask_token_id']}, exported with {token}"
        fault("mask row", "mask_token_id", words, mask_remedy(case, token), token)
    if len(then["layer_types"]) == len(now["layer_types"]):
        if _causal(then) != _causal(now):
            causal = then["is_causal"]
            words = f"causal inside the block: {_causal(now)}, exported with {_causal(then)} (by layer)"
            fault("causality", "is_causal", words, causality_remedy(case, bool(causal)), bool(causal))
            settled &= causal is not None
        if _windows(then) != _windows(now):
            words = f"layers see {_windows(now)}, exported with {_windows(then)}"
            kinds, window = then["layer_types"], then["sliding_window"]
            remedy = f"set layer_types to {kinds} and sliding_window to {window} in config.json"
            fault("configuration", "layer_types", words, remedy)
            settled = False
    scales = [tuple(values[key] for key in AFTER_HEAD) for values in (then, now)]
    if case.config.has_selector and scales[0] != scales[1]:  # without a selector it does not change the best token
        words = f"{scale_words(*scales[1])}, exported with {scale_words(*scales[0])}"
        fault("logit scale", AFTER_HEAD[0], words, scale_remedy(*scales[0]))
        found.config |= dict(zip(AFTER_HEAD, scales[0], strict=True))
    for key in PLAIN_KEYS:
        if then[key] != now[key] and key not in found.config:
            name = LIKE_JSON.get(key, key)
            where = "dflash_config of config.json" if key in NESTED else "config.json"
            remedy = f"set {name} to {json.dumps(then[key])} in {where}"
            fault("configuration", key, f"{name} is {now[key]}, exported with {then[key]}", remedy)
            settled = False
    return settled


def _causal(values: dict[str, Any]) -> list[bool]:
    causal = values["is_causal"]
    return [kind == "sliding_attention" if causal is None else causal for kind in values["layer_types"]]


def _windows(values: dict[str, Any]) -> list[Any]:
    return [values["sliding_window"] if "sliding" in kind else "all" for kind in values["layer_types"]]


class _Hashes:
    """Hashes of tensor objects, each computed once."""

    def __init__(self, record: dict[str, Any]) -> None:
        self._recorded: dict[str, str] = record["tensors"]
        self._kept: dict[int, tuple[Tensor, str]] = {}

    def of(self, tensor: Tensor) -> str:
        if id(tensor) not in self._kept:
            self._kept[id(tensor)] = (tensor, tensor_digest(tensor))
        return self._kept[id(tensor)][1]

    def same(self, name: str, tensor: Tensor) -> bool:
        return self.of(tensor).startswith(self._recorded.get(name, "-"))

    def differing(self, tensors: Mapping[str, Tensor]) -> list[str]:
        return [name for name in self._recorded if name in tensors and not self.same(name, tensors[name])]


def _weights(case: Case, record: dict[str, Any], found: Exported) -> bool:
    """Finds the edits of the weights that restore the recorded hashes."""
    assert case.config is not None
    hashes, tensors = _Hashes(record), dict(case.tensors)
    complete = all(name in tensors for name in record["tensors"])
    # zeros and NaN have their own check
    ruined = [n for n in record["tensors"] if n in tensors and not (tensors[n].any() and tensors[n].isfinite().all())]
    ruined = [name for name in ruined if not hashes.same(name, tensors[name])]
    wrong = [n for n in hashes.differing(tensors) if n not in ruined]
    tried = [*edits(case.config), *conversions(case.config)]
    while wrong:
        best = max(((_resolved(edit, tensors, wrong, hashes), i) for i, edit in enumerate(tried)), default=(0, 0))
        if not best[0]:
            break
        edit = tried.pop(best[1])
        tensors = edit.apply(tensors)
        found.edits.append(edit)
        wrong = [n for n in hashes.differing(tensors) if n not in ruined]
    if wrong and (moved := _moved(tensors, wrong, record, hashes)):
        tensors = renamed(moved).apply(tensors)
        found.edits.append(renamed(moved))
        wrong = [n for n in hashes.differing(tensors) if n not in ruined]
    rounded = _rounded(case, record, tensors, wrong, found) if wrong and complete and not ruined else False
    for edit in found.edits:
        words = f"not as exported; restored with {edit.words}"
        figures = {"differing": hashes.differing(case.tensors)}
        found.findings.append(Finding(edit.check, "fault", words, edit.remedy, figures))
    if wrong and not rounded:
        words = f"changed since the export: {some(wrong)} ({len(wrong)} of {len(record['tensors'])} tensors)"
        if complete and (place := _departure(_signature(case, record, tensors), record["drafter"], SAME)):
            words += f"; its outputs differ first at {place[0]}"
        remedy = (
            "copy the export again; if the change was meant, add a new record (dflash_toolkit.record.export_record)"
        )
        found.findings.append(Finding("weights", "fault", words, remedy, {"differing": wrong}))
    return complete and not ruined and (not wrong or rounded)


def _resolved(edit: Edit, tensors: Tensors, wrong: list[str], hashes: _Hashes) -> int:
    """Returns how many wrong tensors an edit corrects; 0 if it breaks one that was right."""
    after = edit.apply(tensors)
    touched = [name for name in after if after[name] is not tensors[name]]
    if not set(touched) & set(wrong):
        return 0
    if len(touched) > 2 * len(wrong) + 2 and edit.check != "norm weights":
        return 0  # most of its tensors were right: skip the hashing
    right = [name for name in touched if hashes.same(name, after[name])]
    broken = [name for name in touched if name not in wrong and name not in right]
    return 0 if broken else len(right)


def _moved(tensors: Tensors, wrong: list[str], record: dict[str, Any], hashes: _Hashes) -> dict[str, str]:
    """Returns name -> stored name of its recorded tensor, for tensors with exchanged names."""
    stored = {hashes.of(tensors[name])[: len(record["tensors"][name])]: name for name in wrong}
    return {name: stored[record["tensors"][name]] for name in wrong if record["tensors"][name] in stored}


def _signature(case: Case, record: dict[str, Any], tensors: Tensors) -> dict[str, list[float]]:
    """Returns the drafter's outputs with the recorded configuration and these tensors; empty if they do not fit."""
    assert case.config is not None
    values = dict(record["configuration"])
    values["rope_scaling"] = RopeScaling(**scaling) if (scaling := values["rope_scaling"]) else None
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    try:
        config = case.config.architecture.config()(**values)
        return drafter_signature(config, {name: tensors[name] for name in record["tensors"]})
    except (LookupError, RuntimeError, TypeError, ValueError):  # misshapen, or of another version
        return {}


def _rounded(case: Case, record: dict[str, Any], tensors: Tensors, wrong: list[str], found: Exported) -> bool:
    """Whether tensors with different hashes give the same outputs except for rounding, as stored or with norms + 1."""
    if not _departure(_signature(case, record, tensors), record["drafter"], SAME_ROUNDED):
        if not any(edit.check == "norm weights" for edit in found.edits):
            words = f"{len(wrong)} tensors are rounded differently than at export; the outputs are the same"
            remedy = "no harm is known; copy the export again to be sure"
            found.findings.append(Finding("weights", "warning", words, remedy, {"differing": wrong}))
        return True
    if all(map(is_norm, wrong)) and not found.edits:
        edit = plus_one()
        if not _departure(_signature(case, record, edit.apply(tensors)), record["drafter"], SAME_ROUNDED):
            found.edits.append(edit)
            return True
    return False


def _departure(now: Mapping[str, Any], then: Mapping[str, Any], tolerance: float) -> tuple[str, float] | None:
    """Returns the first place, in the order of computation, with different numbers, and their distance."""
    return next(_departures(now, then, tolerance), None)


def _departures(now: Mapping[str, Any], then: Mapping[str, Any], tolerance: float) -> Iterator[tuple[str, float]]:
    for place, numbers in then.items():
        away = distance(now.get(place, ()), numbers)
        if not away <= tolerance:
            yield place, away


def _computes(case: Case, record: dict[str, Any], found: Exported) -> bool:
    """Whether the code computes the same from these weights as at export."""
    tensors: Tensors = case.tensors
    for edit in found.edits:
        tensors = edit.apply(tensors)
    signature = _signature(case, record, tensors)
    if (place := _departure(signature, record["drafter"], SAME_ROUNDED)) is None:
        return True
    version = case.provenance.get("version")
    words = f"the same weights give other outputs than at export, first at {place[0]} ({place[1]:.2g} apart)"
    remedy = f"use the version of this project that exported it ({version}), and report this"
    found.findings.append(Finding("record", "fault", words, remedy, {"now": signature, "then": record["drafter"]}))
    return False


# ---- the target ------------------------------------------------------------------------------------------------


def compare_target(case: Case, target: Target, digest: str | None = None) -> tuple[list[Finding], bool]:
    """Compares the target's outputs for the fixed tokens with the export's; also returns whether they surely agree.

    Args:
        digest: of all of its weights (`fingerprint.model_digest`), if known.
    """
    record = case.record
    if record is None:
        return [], False
    then = record["target"]
    ids = record["configuration"]["target_layer_ids"]
    if max(ids) >= len(target.layers):
        return [], False
    now = target_signature(target, ids)
    sixteen = {now["dtype"], then["dtype"]} != {"float32"}
    further = RECURRENT if sixteen and target.new_cache().recurrent else 1.0
    tolerance = further * ROUNDED if sixteen else EXACT
    places = {place: round(distance(now["places"].get(place, ()), there), 5) for place, there in then["places"].items()}
    figures = {"distance": places, "tolerance": tolerance, "dtype": then["dtype"], "device": then["device"]}
    recorded = case.provenance.get("target_digest")
    figures |= {"digest": digest, "recorded_digest": recorded}
    departed = _departure(now["places"], then["places"], tolerance)
    if departed is None and None not in (digest, recorded) and digest != recorded:
        words = "its weights are not those of training (another digest), though its outputs are nearly the same"
        remedy = "a light fine-tune or another quantization, perhaps: use the weights of training to be sure"
        return [Finding("target", "warning", words, remedy, figures)], False
    if departed is None:
        words = f"its outputs are those of the export, within {max(places.values()):.2g} of {tolerance:.2g}"
        return [Finding("target", "ok", words, figures=figures)], True
    place, away = departed
    worst = max(places.values())
    made_for = case.provenance.get("target")
    words = (
        f"its hidden states are not those of training: they differ first at {place}, by {away:.2g}; at most {worst:.2g}"
    )
    named = f" ({made_for})" if made_for else ""
    if digest is not None and digest == recorded:
        remedy = (
            f"weights and configuration are those of training: compute as there, in {then['dtype']} on "
            f"{then['device']}, with the same versions of transformers and of its kernels"
        )
        return [Finding("target", "warning", words, remedy, figures)], False
    if how := quantization(target):
        remedy = (
            f"the target is {how}: use the weights of training{named}, or train a drafter for the quantized target "
            f"(dflash-train --init-from {case.name})"
        )
        return [Finding("target", "warning" if worst <= further * OTHER else "fault", words, remedy, figures)], False
    if worst <= further * OTHER:
        remedy = (
            f"its weights are others than at training{named}, or quantized otherwise: use those that it was trained for"
        )
        return [Finding("target", "warning", words, remedy, figures)], False
    remedy = f"its weights are others than at training{named}: use those, or train a drafter for these"
    return [Finding("target", "fault", words, remedy, figures)], False


def quantization(target: Target) -> str:
    """Returns how a target is quantized, by its configuration or by its first matrix; empty if it is not."""
    declared = getattr(target.config, "quantization_config", None)
    if declared is not None:
        values = declared if isinstance(declared, dict) else vars(declared)
        return f"quantized ({values.get('quant_method', 'by an unknown method')})"
    weight = next((p for p in target.layers[0].parameters() if p.dim() == 2 and p.shape[1] % GROUP == 0), None)
    if weight is None:
        return ""
    ordered = weight.detach()[:64].unflatten(1, (-1, GROUP)).sort(-1).values
    values_each = 1 + (ordered.diff(dim=-1) != 0).sum(-1)
    return (
        f"quantized to 4 bits (at most 16 values among {GROUP} adjacent weights)"
        if int(values_each.max()) <= 16
        else ""
    )
