"""Asks a server through Anthropic's client: a message, the same streamed, thinking, a tool loop, a count, an error.

    .venv-peers/clients/anthropic/bin/python scripts/peers/anthropic_calls.py URL MODEL

Prints what it read, as JSON.
"""

import argparse
import json
from typing import Any


def main(url: str, model: str) -> None:
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    tool = {"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}

    def plain(message: Any) -> list[dict[str, Any]]:
        """Returns the blocks without ids and the client's own fields."""
        left_out = ("id", "parsed_output")
        return [{k: v for k, v in block.to_dict().items() if k not in left_out} for block in message.content]

    def say(*messages: Any, **options: Any) -> Any:
        request = {"model": model, "max_tokens": 400, "messages": list(messages), **options}
        whole = client.messages.create(**request)
        with client.messages.stream(**request) as stream:
            final = stream.get_final_message()
        assert plain(final) == plain(whole), (final, whole)
        assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
        return whole

    def user(content: Any) -> dict[str, Any]:
        return {"role": "user", "content": content}

    text = say(user("Please: a"), system="Be brief.")
    thoughts = say(user("Please: a"), thinking={"type": "enabled", "budget_tokens": 1024})
    called = say(user("Please: t"), tools=[tool])
    result = {"type": "tool_result", "tool_use_id": called.content[-1].id, "content": "5 degrees, a"}
    after = say(user("Please: t"), {"role": "assistant", "content": called.content}, user([result]), tools=[tool])
    try:
        refused: Any = say(user("a"), tools=[{"type": "bash_20250124", "name": "bash"}])
    except anthropic.BadRequestError as error:
        refused = error.body["error"]["type"]
    found = {
        "text": text.content[0].text,
        "counted": client.messages.count_tokens(
            model=model, system="Be brief.", messages=[user("Please: a")]
        ).input_tokens,
        "used": text.usage.input_tokens + text.usage.cache_read_input_tokens,
        "thinking": [block.type for block in thoughts.content],
        "called": called.content[-1].input,
        "stop_reason": called.stop_reason,
        "after": after.content[-1].text,
        "refused": refused,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("model")
    main(**vars(parser.parse_args()))
