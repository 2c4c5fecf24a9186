"""The forms in which models write tool calls, with the names of vLLM's `--tool-call-parser`."""

import secrets
import string

from . import harmony, json_forms, python_form, xml_forms
from .calls import Form
from .json_forms import (
    ARGS,
    CALL_BEGIN,
    CALL_END,
    CALL_ID,
    CALL_SEP,
    CALLS_BEGIN,
    CALLS_END,
    PYTHON_TAG,
    TOOL_CALL,
    TOOL_CALL_END,
    TOOL_CALLS,
)
from .python_form import PYTHON_END, PYTHON_START
from .xml_forms import ARG_KEY, ARG_KEY_END, ARG_VALUE, ARG_VALUE_END, DSML, DSML_CALLS, FUNCTION, INVOKE

TAGS = (TOOL_CALL, TOOL_CALL_END)
DEEPSEEK = Form(
    (CALLS_BEGIN, CALL_BEGIN),
    json_forms.deepseek,
    (CALLS_BEGIN, CALL_BEGIN, CALL_SEP, CALL_END, CALLS_END),
    (CALL_END, CALLS_END),
)
FORMS = {
    "hermes": Form((TOOL_CALL,), json_forms.hermes, TAGS, (TOOL_CALL_END,), {TOOL_CALL: "{"}),
    "qwen3_coder": Form((TOOL_CALL, FUNCTION), xml_forms.qwen3_coder, TAGS, opening={TOOL_CALL: "<"}),
    "glm45": Form((TOOL_CALL,), xml_forms.glm45, (*TAGS, ARG_KEY, ARG_KEY_END, ARG_VALUE, ARG_VALUE_END)),
    "deepseek_v3": DEEPSEEK,
    "deepseek_v31": DEEPSEEK,
    "deepseek_v32": Form((*DSML_CALLS, INVOKE), xml_forms.deepseek_v32, (DSML,)),
    "llama3_json": Form((PYTHON_TAG, "{"), json_forms.llama3_json, (PYTHON_TAG,), line_start=("{",)),
    "llama4_pythonic": Form(
        (PYTHON_START, PYTHON_END, PYTHON_TAG, "[", "{"),
        python_form.pythonic,
        (PYTHON_START, PYTHON_END, PYTHON_TAG),
        line_start=("[", "{"),
    ),
    "openai": Form((), None, harmony.SPECIAL),
    "mistral": Form(
        (TOOL_CALLS,),
        json_forms.mistral,
        (TOOL_CALLS, CALL_ID, ARGS),
        (TOOL_CALLS,),
        # Mistral's templates refuse other ids
        new_id=lambda: "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9)),
    ),
}
OTHER_NAMES = {  # vLLM's aliases
    "qwen3_xml": "qwen3_coder",
    "qwen3_json": "hermes",
    "llama4_json": "llama3_json",
    "pythonic": "llama4_pythonic",
    "glm47": "glm45",
    "deepseek_v4": "deepseek_v32",
    "gpt-oss": "openai",  # SGLang's
}
