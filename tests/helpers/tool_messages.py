"""A tool call of an assistant, and the result of the tool."""

from programs import assistant

CALL = assistant("") | {"tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]}
RESULT = {"role": "tool", "content": "1"}
