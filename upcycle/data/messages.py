"""Chats of several spellings as the messages that chat templates take."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

# ShareGPT's names of who speaks, which are not those of chat templates.
_ROLES = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bard": "assistant",
    "bing": "assistant", "observation": "tool", "function_response": "tool",
}  # fmt: skip
_CALLER = "function_call"  # ShareGPT's turn that calls functions and has them as JSON
# What an assistant's message may have instead of content.
_INSTEAD = ("tool_calls", "function_call")


class UnusableError(Exception):
    """Why a row is of no use."""


def messages_of(value: Any, *, key: str, system: Any) -> list[dict[str, Any]]:
    """The messages of a chat, each with "role" and "content", and what else it has.

    A message is spelled with "role" and "content", or as ShareGPT does with "from" and "value".
    Keys without a value are left out: Parquet gives every message the keys of all. Content in
    parts of text becomes one text, for most templates would print the list. Calls of tools have
    their arguments as an object, as transformers documents it, also where a row has them as text in
    JSON, as OpenAI's interface does: templates write that text as JSON once more.

    Args:
        value: what the row has.
        key: its key, for errors.
        system: what the row has as its system prompt, put before the messages if it is text.

    Raises:
        UnusableError: it is no list of messages, or one has no content that is text.
    """
    if not isinstance(value, list) or not all(isinstance(message, Mapping) for message in value):
        raise UnusableError(f"{key!r} is no list of messages with a role")
    messages = [_message(message, key) for message in value]
    if isinstance(system, str) and system.strip() and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return messages


def with_text_arguments(
    messages: Sequence[Mapping[str, Any]],
) -> list[dict[str, Any]] | None:
    """The messages with the arguments of calls as text in JSON; None where none is an object."""
    changed = [_with_each_call(message, _as_text) for message in messages]
    return changed if changed != list(messages) else None


def _message(given: Mapping[str, Any], key: str) -> dict[str, Any]:
    message = {name: value for name, value in given.items() if value is not None}
    if "role" not in message and isinstance(message.get("from"), str):
        role = message.pop("from")
        message = {
            "role": _ROLES.get(role.lower(), role),
            "content": message.pop("value", None),
            **message,
        }
    if not isinstance(message.get("role"), str):
        raise UnusableError(f"{key!r} is no list of messages with a role")
    if message["role"] == _CALLER:
        message = {**message, **_calls(message.get("content"))}
    message = _with_each_call(message, _as_object)
    content = message.get("content")
    if content is None and any(message.get(name) for name in _INSTEAD):
        content = ""  # templates differ in what they make of none
    return {**message, "content": _text(content)}


def _calls(content: Any) -> dict[str, Any]:
    """What ShareGPT's `function_call` says, as an assistant's message with calls of tools."""
    found = _from_json(content)
    calls = found if isinstance(found, list) else [found]
    if not calls or not all(isinstance(call, Mapping) and "name" in call for call in calls):
        raise UnusableError(f"a {_CALLER} that is no JSON object with the name of a function")
    calls = [{"type": "function", "function": call} for call in calls]
    return {"role": "assistant", "content": "", _INSTEAD[0]: calls}


def _with_each_call(
    message: Mapping[str, Any], arguments_of: Callable[[Any], Any]
) -> dict[str, Any]:
    calls = message.get(_INSTEAD[0])
    if not isinstance(calls, list):
        return dict(message)
    return {**message, _INSTEAD[0]: [_with_arguments(call, arguments_of) for call in calls]}


def _with_arguments(call: Any, arguments_of: Callable[[Any], Any]) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or "arguments" not in function:
        return call
    changed = {**function, "arguments": arguments_of(function["arguments"])}
    return {**call, "function": changed}


def _as_object(arguments: Any) -> Any:
    found = _from_json(arguments)
    return found if isinstance(found, Mapping) else arguments


def _as_text(arguments: Any) -> Any:
    if isinstance(arguments, Mapping):
        return json.dumps(arguments, ensure_ascii=False)
    return arguments


def _from_json(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return None


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        raise UnusableError("a message without content")
    if not isinstance(content, list):
        raise UnusableError(f"a message's content is not text: {type(content).__name__}")
    return "".join(map(_part, content))


def _part(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type", "text") == "text":
        text = part.get("text")
        if isinstance(text, str):
            return text
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise UnusableError(f"a part of a message is not text: {kind}")
