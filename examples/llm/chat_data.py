"""Chats, prompts with completions, and plain text from JSONL files, as tokens of which some are learned.

    {"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}]}
    {"prompt": "2 + 2 =", "completion": " 4"}
    {"text": "Once upon a time"}

Of chats the assistant's tokens are learned, of prompts the completion, of text everything.
"""

import dataclasses
import itertools
import json
import pathlib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

ROLES = ("system", "developer", "user", "assistant", "tool")
MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


class NoTemplateError(ValueError):
    """A tokenizer that cannot write chats."""


class BadLineError(ValueError):
    """A line that is not an example; the message names file and line."""


@dataclasses.dataclass(frozen=True)
class Example:
    """Tokens, int32 [n], and which of them are learned, bool [n]: never the first, since nothing precedes it."""

    tokens: np.ndarray
    learned: np.ndarray


@dataclasses.dataclass
class Counts:
    """The lines by outcome: examples, of which some were cut; without anything to learn; bad."""

    examples: int = 0
    cut: int = 0
    dropped: int = 0
    bad: int = 0

    def __str__(self) -> str:
        return (
            f"{self.examples} examples ({self.cut} of them cut), {self.dropped} dropped, {self.bad} bad lines skipped"
        )


def load_tokenizer(folder: Any) -> Any:
    """Returns the tokenizer of a published model."""
    print(f"loading the tokenizer of {folder}", file=sys.stderr)
    try:
        from transformers import AutoTokenizer  # noqa: PLC0415  # which takes seconds, and is an extra
    except ImportError as error:
        raise SystemExit("The tokenizers are those of transformers: pip install -e '.[llm]'.") from error
    return AutoTokenizer.from_pretrained(folder)


def read_examples(
    paths: Iterable[Any], tokenizer: Any, *, max_tokens: int, skip_bad: bool = False
) -> tuple[list[Example], Counts]:
    """Returns the examples of JSONL files, cut to `max_tokens`; those with nothing left to learn are dropped.

    Raises:
      BadLineError: A line is no example, unless `skip_bad`.
      ValueError: No line is an example.
    """
    examples: list[Example] = []
    counts = Counts()
    for where, line in read_lines(paths):
        try:
            example = example_of(fields_of(line), tokenizer)
        except NoTemplateError as error:  # no matter which line
            raise NoTemplateError(f"{where}: {error}") from error
        except BadLineError as error:
            if not skip_bad:
                raise BadLineError(f"{where}: {error} --skip-bad leaves such lines out.") from error
            counts.bad += 1
            continue
        cut = Example(example.tokens[:max_tokens], example.learned[:max_tokens])
        if cut.learned.any():
            examples.append(cut)
            counts.examples += 1
            counts.cut += len(example.tokens) > max_tokens
        else:
            counts.dropped += 1
    if not examples:
        raise ValueError(f"{', '.join(map(str, paths))} leave nothing to learn: {counts}.")
    return examples, counts


def read_lines(paths: Iterable[Any]) -> Iterator[tuple[str, str]]:
    """Yields the lines of files that are not empty, each with its place."""
    for path in paths:
        with pathlib.Path(path).open(encoding="utf-8", errors="surrogateescape") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield f"{path}:{number}", line


def fields_of(line: str) -> dict[str, Any]:
    """Returns the object that a line of JSON is."""
    try:
        fields = json.loads(line)
        json.dumps(fields, ensure_ascii=False).encode()  # half a character, of which a tokenizer makes nothing
    except UnicodeEncodeError as error:
        raise BadLineError(f"This is not text in UTF-8: {error}.") from error
    except (ValueError, RecursionError) as error:
        raise BadLineError(f"This is not JSON: {error}.") from error
    if not isinstance(fields, dict):
        raise BadLineError(f"A line must be an object: got {type(fields).__name__}.")
    return fields


def example_of(fields: Mapping[str, Any], tokenizer: Any) -> Example:
    """Returns a chat, a prompt with its completion, or a text as tokens."""
    match fields:
        case {"messages": messages}:
            tokens, learned = _chat(messages, tokenizer)
        case {"prompt": str(prompt), "completion": str(completion)}:
            before = without_end(prompt, tokenizer)
            after = _ended(tokenizer(completion, add_special_tokens=False)["input_ids"], tokenizer)
            tokens, learned = before + after, [False] * len(before) + [True] * len(after)
        case {"text": str(text)}:
            tokens = _ended(without_end(text, tokenizer), tokenizer)
            learned = [True] * len(tokens)
        case _:
            raise BadLineError(
                "A line must have `messages`, or the texts `prompt` and `completion`, or the text `text`: got "
                f"{sorted(fields)}."
            )
    is_learned = np.array(learned, bool)
    is_learned[:1] = False
    return Example(np.array(tokens, np.int32), is_learned)


def without_end(text: str, tokenizer: Any) -> list[int]:
    """Returns the tokens of a text that goes on: without the end that some tokenizers add, with their beginning."""
    whole, inner = (list(tokenizer(text, add_special_tokens=special)["input_ids"]) for special in (True, False))
    num_ends = [
        sum(1 for _ in itertools.takewhile(lambda token: token == tokenizer.eos_token_id, reversed(tokens)))
        for tokens in (whole, inner)
    ]
    return whole[: len(whole) - (num_ends[0] - num_ends[1])]


def _ended(tokens: list[int], tokenizer: Any) -> list[int]:
    """Returns tokens with one end, which a text may have brought along."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return tokens if tokens[-1:] == end else tokens + end


def _chat(messages: Any, tokenizer: Any) -> tuple[list[int], list[bool]]:
    """Returns the tokens of a chat by the tokenizer's template, and which of them are the assistant's."""
    _check_messages(messages)
    if not tokenizer.chat_template:
        raise NoTemplateError(
            "The tokenizer has no chat template, as those of base models: take the instruct model, add its "
            "chat_template.jinja to the folder, or write all chats as `prompt` and `completion`."
        )

    def render(messages: Sequence[Any], **options: bool) -> Mapping[str, Any]:
        try:
            return tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **options)
        except Exception as error:  # a template may raise anything
            raise BadLineError(f"The chat template refuses this: {error}.") from error

    if MARK.search(tokenizer.get_chat_template()):
        marked = render(messages, return_assistant_tokens_mask=True)
        return list(marked["input_ids"]), [bool(x) for x in marked["assistant_masks"]]
    whole = list(render(messages)["input_ids"])
    learned = [False] * len(whole)
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            start = list(render(messages[:number], add_generation_prompt=True)["input_ids"])
            end = list(render(messages[: number + 1])["input_ids"])
            if whole[: len(end)] != end or end[: len(start)] != start:
                raise BadLineError(
                    f"The chat template writes message {number} differently when more messages follow, so its tokens "
                    "cannot be located: put {% generation %} around what the template writes for the assistant."
                )
            learned[len(start) : len(end)] = [True] * (len(end) - len(start))
    return whole, learned


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise BadLineError("`messages` must be a list of objects with `role` and `content`.")
    for number, message in enumerate(messages):
        if message.get("role") not in ROLES:
            raise BadLineError(
                f"The role of message {number} is {message.get('role')!r}, not one of {', '.join(ROLES)}."
            )
        if not isinstance(message.get("content"), str):
            raise BadLineError(f"The content of message {number} is not text: got {message.get('content')!r:.80}.")
    if all(message["role"] != "assistant" for message in messages):
        raise BadLineError("There is no message of the assistant, so nothing to learn.")
