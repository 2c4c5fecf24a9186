"""What forked processes have from the server that they come from, besides the programs: each would make it anew."""

import hypothesis.strategies  # noqa: F401
import transformers.models.llama.modeling_llama  # noqa: F401
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import dflash_toolkit.models.dflash2.convolution  # noqa: F401

get_checkpoint_conversion_mapping("llama")  # the table of all models
