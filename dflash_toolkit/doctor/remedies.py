"""Remedies: the keys of config.json to set, in either format."""

import json
from collections.abc import Sequence

from ..calibration import Calibration
from ..models.rope import RopeScaling
from .files import Case


def layer_ids_remedy(case: Case, ids: Sequence[int]) -> str:
    """Returns how to tap layers `ids`."""
    if case.speculators:
        return f"set aux_hidden_state_layer_ids to {[i + 1 for i in ids]} in config.json: that form stores id + 1"
    return f"set dflash_config.target_layer_ids to {list(ids)} in config.json"


def rope_remedy(case: Case, theta: float, scaling: RopeScaling | None, present: RopeScaling | None) -> str:
    """Returns how to set this theta and scaling."""
    inside = " of transformer_layer_config" if case.speculators else ""
    base = json.dumps(theta)
    if scaling == present:
        return f"set rope_theta and rope_parameters.rope_theta{inside} to {base} in config.json"
    group = json.dumps((scaling.parameters if scaling else {"rope_type": "default"}) | {"rope_theta": theta})
    both = f"rope_parameters (and rope_scaling, if there){inside}"
    return f"set rope_theta to {base} and {both} to {group} in config.json"


def mask_remedy(case: Case, token: int) -> str:
    """Returns how to fill the slots with this row."""
    keys = "dflash_config.mask_token_id"
    if case.speculators:
        keys = f"mask_token_id (and {keys}, if there)"
    return f"set {keys} to {token} in config.json"


def scale_remedy(multiplier: float, cap: float | None) -> str:
    """Returns how to transform the logits that a selector adds to."""
    values = {"output_multiplier": multiplier, "final_logit_softcapping": cap}
    return f"set {' and '.join(f'{k} to {json.dumps(v)}' for k, v in values.items())} in dflash_config of config.json"


def calibration_remedy(case: Case, measured: Calibration | None) -> str:
    """Returns how to store the measured calibration of the drafter's probabilities."""
    nested = case.raw.get("dflash_config")
    inside = "dflash_config." if isinstance(nested, dict) and "acceptance_bias" in nested else ""
    keys = f"{inside}acceptance_slope", f"{inside}acceptance_bias"
    if measured is None:
        return f"remove {' and '.join(keys)} from config.json"
    values = json.dumps(round(measured.slope, 3)), json.dumps([round(each, 3) for each in measured.bias])
    return f"set {' and '.join(f'{k} to {v}' for k, v in zip(keys, values, strict=True))} in config.json"


def causality_remedy(case: Case, causal: bool) -> str:
    """Returns how to let a block's slots see those after them, or not."""
    if not case.speculators:
        return f"set is_causal to {str(causal).lower()} in config.json"
    if causal and case.config and "full_attention" in case.config.layer_types:
        return "that form has no causal layers of full attention: export it again in the other form, is_causal true"
    return f"set sliding_window_non_causal to {str(not causal).lower()} in config.json"
