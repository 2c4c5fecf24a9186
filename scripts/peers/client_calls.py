"""Asks a server through another project's client. Prints the answers as JSON.

.venv-peers/clients/openai/bin/python scripts/peers/client_calls.py openai URL MODEL

`chat` and `streamed` answer "Please: a". `loop` is the answer after the calls that "Please: h" gets, and `calls` are
their names. `shape` and `called` answer "Please: t" in the form of `Shape`.
"""

import argparse
import asyncio
import json
from typing import Any, Literal

from pydantic import BaseModel

ASKED, CALLING, SHAPED = "Please: a", "Please: h", "Please: t"
RESULT = "sunny, a"  # the target answers the last letter of a prompt


class Shape(BaseModel):
    """An answer."""

    kind: Literal["x", "y"]
    sure: bool


def weather(city: str, days: int) -> str:
    """Returns the weather of a city."""
    return RESULT


def now() -> str:
    """Returns the time."""
    return RESULT


def function(of: Any, **properties: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {name: {"type": kind} for name, kind in properties.items()}}
    return {"name": of.__name__, "description": of.__doc__, "parameters": schema}


FUNCTIONS = [function(weather, city="string", days="integer"), function(now)]
TOOLS = [{"type": "function", "function": each} for each in FUNCTIONS]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def ask_openai(url: str, model: str) -> dict[str, Any]:
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    fixed: dict[str, Any] = {"model": model, "temperature": 0, "max_tokens": 400}
    whole = client.chat.completions.create(messages=[user(ASKED)], reasoning_effort=None, store=True, **fixed)
    with client.chat.completions.stream(messages=[user(CALLING)], tools=TOOLS, **fixed) as stream:
        made = stream.get_final_completion().choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": RESULT} for call in made.tool_calls]
    again = client.chat.completions.create(messages=[user(CALLING), made, *results], tools=TOOLS, **fixed)
    shaped = client.chat.completions.parse(messages=[user(SHAPED)], response_format=Shape, **fixed)

    to: dict[str, Any] = {"model": model, "temperature": 0, "max_output_tokens": 400, "store": False}
    to |= {"include": ["reasoning.encrypted_content"], "reasoning": {"summary": "auto"}}
    tools = [{"type": "function", **each} for each in FUNCTIONS]
    first = client.responses.create(input=CALLING, tools=tools, **to)
    calls = [item for item in first.output if item.type == "function_call"]
    outputs = [{"type": "function_call_output", "call_id": call.call_id, "output": RESULT} for call in calls]
    second = client.responses.create(input=[user(CALLING), *first.output, *outputs], tools=tools, **to)
    return {
        "chat": whole.choices[0].message.content,
        "calls": [call.function.name for call in made.tool_calls],
        "loop": again.choices[0].message.content,
        "response": second.output_text,
        "shape": shaped.choices[0].message.parsed.model_dump(),
    }


def ask_langchain_openai(url: str, model: str) -> dict[str, Any]:
    from langchain_core.messages import HumanMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    to: dict[str, Any] = {"model": model, "base_url": f"{url}/v1", "api_key": "none", "max_retries": 0}
    to |= {"temperature": 0, "max_tokens": 400}
    tools = {each.name: each for each in (tool(weather), tool(now))}

    def loop(chat: Any) -> tuple[Any, Any]:
        first = chat.invoke([HumanMessage(CALLING)])
        results = [tools[call["name"]].invoke(call) for call in first.tool_calls]
        return first, chat.invoke([HumanMessage(CALLING), first, *results])

    chat = ChatOpenAI(**to)
    first, last = loop(chat.bind_tools([*tools.values()]))
    _, response = loop(ChatOpenAI(**to, use_responses_api=True).bind_tools([*tools.values()]))
    shapes = [
        chat.with_structured_output(Shape, method=by).invoke(SHAPED) for by in ("json_schema", "function_calling")
    ]
    return {
        "chat": chat.invoke(ASKED).content,
        "streamed": "".join(chunk.content for chunk in chat.stream(ASKED)),
        "calls": [call["name"] for call in first.tool_calls],
        "loop": last.content,
        "response": response.text,
        "shape": shapes[0].model_dump(),
        "called": shapes[1].model_dump(),
    }


def ask_litellm(url: str, model: str) -> dict[str, Any]:
    import litellm

    to: dict[str, Any] = {"model": f"hosted_vllm/{model}", "api_base": f"{url}/v1", "api_key": "none"}
    fixed = to | {"temperature": 0, "max_tokens": 400}
    whole = litellm.completion(messages=[user(ASKED)], **fixed)
    made = litellm.completion(messages=[user(CALLING)], tools=TOOLS, **fixed).choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": RESULT} for call in made.tool_calls]
    again = litellm.completion(messages=[user(CALLING), made, *results], tools=TOOLS, **fixed)
    chunks = list(litellm.completion(messages=[user(ASKED)], stream=True, **fixed))
    shaped = litellm.completion(messages=[user(SHAPED)], response_format=Shape, **fixed)
    response = litellm.responses(input=ASKED, max_output_tokens=400, temperature=0, **to)
    return {
        "chat": whole.choices[0].message.content,
        "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
        "calls": [call.function.name for call in made.tool_calls],
        "loop": again.choices[0].message.content,
        "response": response.output[-1].content[0].text,
        "shape": json.loads(shaped.choices[0].message.content),
    }


def ask_llama_index(url: str, model: str) -> dict[str, Any]:
    from llama_index.core.agent.workflow import FunctionAgent
    from llama_index.core.llms import ChatMessage
    from llama_index.core.prompts import PromptTemplate
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    llm = OpenAILike(
        model=model, api_base=f"{url}/v1", api_key="none", is_chat_model=True, is_function_calling_model=True,
        temperature=0, max_tokens=400, max_retries=0,
    )  # fmt: skip

    async def loop() -> Any:
        return await FunctionAgent(tools=tools, llm=llm).run(CALLING, max_iterations=4)

    tools = [FunctionTool.from_defaults(each) for each in (weather, now)]
    agent = asyncio.run(loop())
    message = ChatMessage(role="user", content=ASKED)
    return {
        "chat": llm.chat([message]).message.content,
        "streamed": "".join(chunk.delta for chunk in llm.stream_chat([message])),
        "calls": [call.tool_name for call in agent.tool_calls],
        "loop": agent.response.content,
        "shape": llm.structured_predict(Shape, PromptTemplate(SHAPED)).model_dump(),
    }


def ask_instructor(url: str, model: str) -> dict[str, Any]:
    import instructor
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

    def shape(mode: Any) -> dict[str, Any]:
        wrapped = instructor.from_openai(client, mode=mode)
        fixed: dict[str, Any] = {"model": model, "temperature": 0, "max_tokens": 400, "max_retries": 0}
        return wrapped.chat.completions.create(messages=[user(SHAPED)], response_model=Shape, **fixed).model_dump()

    modes = instructor.Mode
    return {"shape": shape(modes.JSON_SCHEMA), "called": shape(modes.TOOLS), "response": shape(modes.RESPONSES_TOOLS)}


def ask_openai_agents(url: str, model: str) -> dict[str, Any]:
    import agents
    from openai import AsyncOpenAI
    from openai.types.shared import Reasoning

    agents.set_tracing_disabled(True)

    async def loop(kind: Any, text: str, **options: Any) -> Any:
        client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        agent = agents.Agent(
            name="agent",
            model=kind(model=model, openai_client=client),
            tools=[agents.function_tool(each) for each in (weather, now)],
            model_settings=agents.ModelSettings(temperature=0, max_tokens=400, **options),
        )
        return await agents.Runner.run(agent, text, max_turns=3)

    chat = asyncio.run(loop(agents.OpenAIChatCompletionsModel, CALLING))
    made = [item.raw_item.name for item in chat.new_items if isinstance(item, agents.ToolCallItem)]
    thought = Reasoning(effort="none", summary="auto")
    return {
        "chat": asyncio.run(loop(agents.OpenAIChatCompletionsModel, ASKED)).final_output,
        "calls": made,
        "loop": chat.final_output,
        "response": asyncio.run(loop(agents.OpenAIResponsesModel, CALLING)).final_output,
        "unthought": asyncio.run(loop(agents.OpenAIResponsesModel, ASKED, reasoning=thought)).final_output,
    }


CLIENTS = {
    "openai": ask_openai,
    "langchain-openai": ask_langchain_openai,
    "litellm": ask_litellm,
    "llama-index": ask_llama_index,
    "instructor": ask_instructor,
    "openai-agents": ask_openai_agents,
}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("client", choices=CLIENTS)
    parser.add_argument("url")
    parser.add_argument("model")
    args = parser.parse_args()
    print(json.dumps(CLIENTS[args.client](args.url, args.model)))
