"""Reads conversations in the common formats, renders them as text, and marks the parts that a model learns to write."""

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn, Self

from ...errors import UsageError, first_line

Messages = list[dict[str, Any]]  # [{"role": "user" or "assistant" or ..., "content": text}, ...]
SPEAKERS = {"human": "user", "gpt": "assistant"}  # of ShareGPT's form; others have their usual names
USUAL = ("system", "developer", "user", "assistant", "tool")
THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # the model's reasoning; templates read one of the first two
CHANGES = "the chat template changes earlier turns: use another, or the columns prompt and completion (the last answer)"
OF_ROLE = "messages of the role "
EXPECTED = 'expected a list of messages such as {"role": "user", "content": "Why?"}'


@dataclass(frozen=True)
class Conversation:
    """Messages, and how they become a text."""

    messages: Messages  # checked; no value in them is None
    first: int = 0  # number of the first message that may be learnt
    # More arguments of the template: "tools", and the content of the column chat_template_kwargs.
    options: Mapping[str, Any] = field(default_factory=dict)
    is_plain: bool = False  # the contents are one text, unchanged, with the tokenizer's end mark, without a template
    images: Sequence[Any] = ()  # in the order in which the messages show them

    @property
    def answer(self) -> str:
        """The text of the last message."""
        return text_of(self.messages[-1])

    @property
    def is_answered(self) -> bool:
        """Whether it ends with an answer that is a text."""
        return self.messages[-1]["role"] == "assistant" and self.answer.strip() != ""

    @property
    def has_empty_answer(self) -> bool:
        """Whether a message to learn has neither a text nor calls nor reasoning: the model learns to end at once."""
        answers = [one for one in self.messages[self.first :] if one["role"] == "assistant" and one.get("weight") != 0]
        return any(not text_of(one).strip() and not {"tool_calls", *THOUGHTS} & {*one} for one in answers)

    @classmethod
    def of(cls, given: Any) -> Self:
        """A conversation from messages in any form; a conversation is returned unchanged. Raises UsageError."""
        return given if isinstance(given, cls) else cls(check_messages(as_messages(given)))

    @classmethod
    def of_row(cls, row: dict[str, Any], column: str) -> Self:
        """A row's conversation: messages of this column or "conversations"; prompt, completion. Raises UsageError."""
        for name in (column, "conversations"):
            if name in row:
                return cls(check_messages(as_messages(json_of(row, name, list) or [])), 0, options_of(row))
        prompt, answer = as_messages(row["prompt"], "user"), as_messages(row["completion"], "assistant")
        return cls(check_messages(prompt + answer), len(prompt), options_of(row))


def as_messages(given: Any, role: str | None = None) -> Messages:
    """Messages with roles, without None, which tables put where other rows have a value. `given`: a list of {"role",
    "content", ...}, or of {"from", "value"} (ShareGPT); or a text, with a `role`. Raises UsageError for others."""
    if isinstance(given, str) and role is not None:
        return [{"role": role, "content": given}]
    if not isinstance(given, list) or not all(isinstance(message, dict) for message in given):
        raise UsageError(EXPECTED)
    messages = [_role_first(_without_none(message)) for message in given]
    if not all(isinstance(message["role"], str) and message["role"] for message in messages):
        raise UsageError(EXPECTED)
    return messages


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_none(one) for name, one in value.items() if one is not None}
    return [_without_none(one) for one in value] if isinstance(value, list) else value


def _role_first(message: dict[str, Any]) -> dict[str, Any]:
    """A message of either form, in the first form. An empty list of calls is removed. Reasoning gets both names that
    templates read: transformers below 5.21 passes on only the name in the data."""
    if not message.get("tool_calls", True):
        message = {name: value for name, value in message.items() if name != "tool_calls"}
    thought = next((message[name] for name in THOUGHTS if message.get(name) is not None), None)
    if thought is not None:
        message = {"thinking": thought} | message | {"reasoning_content": thought}
    if "role" in message or "from" not in message:
        return {"role": None} | message
    speaker = str(message["from"]).lower()
    speaker = SPEAKERS.get(speaker, speaker)
    if speaker not in USUAL:
        raise UsageError(f"a message is from {speaker}: expected {', '.join([*SPEAKERS, *USUAL])}")
    others = {name: value for name, value in message.items() if name not in ("from", "value")}
    return {"role": speaker} | ({"content": message["value"]} if "value" in message else {}) | others


def check_messages(messages: Messages) -> Messages:
    """Returns them. Raises UsageError unless contents are texts, or lists of such parts, and the rest is as in JSON."""
    for number, message in enumerate(messages, start=1):
        content, where = message.get("content"), f"message {number} ({message['role']})"
        if content is None and message["role"] != "tool" and not {"tool_calls", *THOUGHTS} & {*message}:
            raise UsageError(f"{where} has no content")
        for part in content if isinstance(content, list) else []:
            kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
            if kind != "text" or not isinstance(part.get("text"), str):
                raise UsageError(f'{where} has a part of the type {kind}: expected {{"type": "text", "text": "Why?"}}')
        if not isinstance(content, str | list | None):
            raise UsageError(f"the content of {where} is of the type {type(content).__name__}: expected a text")
        if message.get("weight", 1) not in (0, 1):
            raise UsageError(f"{where} has the weight {message['weight']!r}: expected 1 (trained) or 0 (not trained)")
        calls = message.get("tool_calls", [])
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            raise UsageError(f"the tool_calls of {where} are not a list of dicts")
        _check_json(message, where)
    return messages


def _check_json(value: Any, where: str) -> None:
    """Raises UsageError for a value that JSON does not have, or half a character. `where` names it in the message."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except (TypeError, ValueError) as error:
        raise UsageError(f"{where} has a value that a text cannot have ({first_line(error)})") from None


def options_of(row: dict[str, Any]) -> dict[str, Any]:
    """A row's arguments for the template, besides messages: its columns tools (a list of JSON schemas) and
    chat_template_kwargs (a dict), each perhaps as JSON. Raises UsageError."""
    tools = [json_of({"tools": tool}, "tools", dict) for tool in json_of(row, "tools", list) or []]
    return (json_of(row, "chat_template_kwargs", dict) or {}) | ({"tools": tools} if tools else {})


def json_of(row: dict[str, Any], name: str, kind: type) -> Any:
    """A cell of this kind, perhaps as JSON, without values that are None. Raises UsageError."""
    value = row.get(name)
    try:
        value = _without_none(json.loads(value) if isinstance(value, str) and value.strip() else value)
    except ValueError:
        raise UsageError(f"its {name} are not valid JSON") from None
    if value and not isinstance(value, kind):
        raise UsageError(f"its {name} are of the type {type(value).__name__}: expected a {kind.__name__}")
    _check_json(value, name)
    return value


def render(messages: Messages, template: Any, **options: Any) -> str:
    """A conversation as a text. Raises UsageError if the template refuses it."""
    if not messages:  # many templates need a message
        return ""
    try:
        return template.apply_chat_template(messages, tokenize=False, **options)
    except Exception as error:  # templates are programs, and may raise anything
        raise UsageError(f"the chat template refuses it ({first_line(error)})") from None


def fit_to_template(messages: Messages, template: Any, options: Mapping[str, Any]) -> tuple[Messages, str]:
    """(the messages in the first form that the template writes as a whole, their text).

    Templates differ: some take parts of a content, others only texts; arguments of a call as a dict, or as JSON; and
    some recognize a call by its missing content. Raises UsageError if the template refuses all forms."""
    refusal, fault, tried = None, None, list[Messages]()
    dump = lambda arguments: arguments if isinstance(arguments, str) else json.dumps(arguments)  # noqa: E731
    for content, joins, convert in itertools.product(("", None), (False, True), (_parse, dump)):
        form = [_in_form({"content": content, **message}, joins, convert) for message in messages]
        if form in tried:
            continue
        tried.append(form)
        try:
            text = render(form, template, **options)
        except UsageError as error:
            refusal = refusal or error
            continue
        if (fault := _fault(form, template, options, text)) is None:
            return form, text
    raise UsageError(fault) if fault else refusal or UsageError(EXPECTED)


def _in_form(message: dict[str, Any], joins: bool, convert: Callable[[Any], Any]) -> dict[str, Any]:
    """A message with one text instead of several text parts, if it `joins` them; and with converted arguments."""
    content, calls = message["content"], message.get("tool_calls")
    if joins and isinstance(content, list) and all(isinstance(part.get("text"), str) for part in content):
        message = message | {"content": "".join(part["text"] for part in content)}
    return message | {"tool_calls": [_convert(one, convert) for one in calls]} if isinstance(calls, list) else message


def _convert(call: Any, convert: Callable[[Any], Any]) -> Any:
    if isinstance(call, dict) and "function" in call:
        return call | {"function": _convert(call["function"], convert)}
    return call | {"arguments": convert(call["arguments"])} if isinstance(call, dict) and "arguments" in call else call


def _parse(arguments: Any) -> Any:
    with suppress(ValueError):
        found = json.loads(arguments) if isinstance(arguments, str) else None
        return found if isinstance(found, dict) else arguments
    return arguments


def _fault(messages: Messages, template: Any, options: Mapping[str, Any], text: str) -> str | None:
    """The mistake in a text: it contains a Python object, or misses a part or the calls of these messages."""
    for name, value in {"messages": messages, **options}.items():
        if any(shown in text for shown in _python_objects(value)):
            return f"the chat template writes a Python object of its {name}: give the tokenizer another chat_template"
    parts = (part for one in messages if isinstance(one.get("content"), list) for part in one["content"])
    if not all(part.get("text", "").strip() in text for part in parts):
        return "the chat template drops a part of a content: give the tokenizer another chat_template"
    if any("tool_calls" in message for message in messages) and not _uses("tool_calls", messages, template, options):
        return "the chat template does not write tool_calls: give the tokenizer a chat_template that does"
    return None


def _python_objects(value: Any) -> Iterator[str]:
    """Python's form of each dict and list in a value, if JSON's differs."""
    if isinstance(value, dict | list):
        if str(value) != json.dumps(value, ensure_ascii=False):
            yield str(value)
        for one in value.values() if isinstance(value, dict) else value:
            yield from _python_objects(one)


def _uses(name: str, messages: Messages, template: Any, options: Mapping[str, Any]) -> bool:
    """Whether the text changes without the entry of this name, in the options or in messages; or, for the name
    "messages of the role tool", when their content changes."""
    without = [
        message | {"content": "?"}
        if name == OF_ROLE + message["role"]
        else {k: v for k, v in message.items() if k != name}
        for message in messages
    ]
    others = {key: value for key, value in options.items() if key != name}
    with suppress(UsageError):  # it needs the name
        return render(messages, template, **options) != render(without, template, **others)
    return True


def find_unused(chats: Iterable[Conversation], template: Any) -> list[str]:
    """The names of options and of entries in messages that the template uses in none of these conversations."""
    names, used = dict[str, None](), set[str]()
    for chat in chats:
        try:
            messages, _ = fit_to_template(chat.messages, template, chat.options)
        except UsageError:  # its encoding reports that
            continue
        found = {*chat.options, *(name for message in messages for name in message)} - {"role", "content", "weight"}
        found |= {OF_ROLE + message["role"] for message in messages if message.get("content")}
        names |= dict.fromkeys(sorted(found))
        used |= {name for name in found - used if _uses(name, messages, template, chat.options)}
    return [name for name in names if name not in used]


def answer_spans(
    messages: Messages, template: Any, first: int, options: Mapping[str, Any] = {}
) -> tuple[str, list[range]]:
    """(the text of a conversation, the places in it that the model learns to write).

    A place is the text that the template writes for the assistant's answer after the prompt for one. `template`: a
    tokenizer or processor; `first`: number of the first message to learn; `options`: for the template. Raises
    UsageError if it begins with an answer, or the template cannot be used."""
    if messages and messages[0]["role"] == "assistant":
        raise UsageError("it begins with an answer: remove it, or put a question before it")
    messages, text = fit_to_template(messages, template, options)
    spans = []
    for turn, message in enumerate(messages):
        if message["role"] != "assistant" or turn < first or message.get("weight") == 0:
            continue
        asking = render(messages[:turn], template, **{**options, "add_generation_prompt": True})
        after = text if turn + 1 == len(messages) else render(messages[: turn + 1], template, **options)
        if not text.startswith(after):
            raise UsageError(CHANGES)
        if not after.startswith(asking):
            _say_why(render(messages[:turn], template, **options), asking, after)
        spans.append(range(len(asking), len(after)))
    return text, spans


def reach_into(spans: Sequence[range], places: Iterable[Sequence[int]]) -> list[bool]:
    """Whether each token, with its (start, end) in the text, overlaps a span: a token may begin before an answer."""
    found, last = list[bool](), 0
    for start, end in places:
        if start == end:  # white space that a tokenizer has trimmed begins where the token before it ends
            start, end = (last, start) if 0 < last < start else (start, start + 1)
        found.append(any(start < span.stop and end > span.start for span in spans))
        last = max(last, end)
    return found


def _say_why(earlier: str, asking: str, after: str) -> NoReturn:
    """Raises the UsageError for an answer whose beginning does not match the end of the prompt that asks for it."""
    if (shared := num_shared(asking, after)) < num_shared(earlier, asking):
        raise UsageError(CHANGES)
    raise UsageError(
        f"the chat template begins an answer with {asking[shared:]!r}, an answer in the data does not: add its "
        'reasoning_content, a column chat_template_kwargs ({"enable_thinking": false}), or use another chat_template'
    )


def num_shared(one: Any, other: Any) -> int:
    """The length of the common beginning, in characters or items."""
    return next((at for at, (mine, yours) in enumerate(zip(one, other)) if mine != yours), min(len(one), len(other)))


def question(chat: Conversation, template: Any) -> str:
    """The text that asks for the last message of a conversation. Raises UsageError."""
    if chat.is_plain:
        return chat.messages[0]["content"]
    messages, _ = fit_to_template(chat.messages, template, chat.options)
    return render(messages[:-1], template, **{**chat.options, "add_generation_prompt": True})


def text_of(message: dict[str, Any]) -> str:
    """The text of a message, whose content may be a list of parts, or missing."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text") or "" for part in content)
