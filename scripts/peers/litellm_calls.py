"""Asks a server through LiteLLM: a chat, the same streamed, a tool, a response. Prints what it read, as JSON.

.venv-peers/litellm/bin/python scripts/peers/litellm_calls.py URL MODEL
"""

import argparse
import json


def main(url: str, model: str) -> None:
    import litellm

    to = {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": "none"}
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}

    def chat(text: str, **options: object) -> object:
        return litellm.completion(messages=[{"role": "user", "content": text}], max_tokens=400, **to, **options)

    whole, called = chat("Please: a"), chat("Please: h", tools=[tool])
    chunks = list(chat("Please: a", stream=True, stream_options={"include_usage": True}))
    response = litellm.responses(input="Please: a", max_output_tokens=400, **to)
    found = {
        "chat": whole.choices[0].message.content,
        "usage": whole.usage.total_tokens,
        "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
        "calls": [call.function.name for call in called.choices[0].message.tool_calls],
        "response": response.output[-1].content[0].text,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("model")
    main(**vars(parser.parse_args()))
