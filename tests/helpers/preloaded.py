"""Modules that forked processes inherit from their server, in addition to the programs: each would make it anew."""

import importlib

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

for name in (
    "hypothesis.strategies",
    "transformers.models.llama.modeling_llama",
    "dflash_toolkit.models.dflash2.convolution",
):
    importlib.import_module(name)
get_checkpoint_conversion_mapping("llama")  # the table of all models
