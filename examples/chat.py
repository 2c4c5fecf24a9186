"""Sends a server one question and prints the answer as it arrives: `python examples/chat.py URL MODEL QUESTION`."""

import sys

from openai import OpenAI


def main() -> None:
    url, model, question = sys.argv[1:]
    client = OpenAI(base_url=url, api_key="none")
    answer = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": question}], max_tokens=256, stream=True
    )
    for chunk in answer:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main()
