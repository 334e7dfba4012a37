"""Messages of errors and warnings: each says what to do, or a page under docs/troubleshooting/ does."""

import ast
import functools
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs/troubleshooting").glob("*.md"))
VERBS = (
    "add|allow|ask|begin|build|call|change|check|choose|compile|copy|cut|do|draw|drop|edit|enable|export|fetch|"
    "free|give|go on|install|keep|leave|let|list|load|look|lower|make|map|mend|merge|move|name|pad|pass|"
    "pip install|put|raise|read|remove|rename|repeat|restore|return|run|save|say|see|select|set|shard|start|sum|"
    "take|train|trim|try|turn|undo|use|wait|wrap|write"
)
REMEDY = re.compile(
    rf"(?:^|[:;.,(`)] |\n\s*|(?:\b(?:or|and|so|then) ))(?:{VERBS})\b"  # what to do
    r"|\b(?:must|needs?|requires?|contradict\w*|would do)\b|, not\b"  # what must hold
    r"|Did you mean|: got|: it (?:has|writes)|[Tt]he(?:se|re) are|knows …"  # what there is
    r"|is not a regular expression: …|means nothing without|\btwice\b",  # the cause, which is its own remedy
    re.IGNORECASE,
)

QUOTED = re.compile(r"`[^`]*`|(?<!\w)'[^'\n]*'|\w+=…")  # code, what a user may have written, and values
WRONG = {
    "does not end with a period": r"\A(?:jzero|[A-Z`…])(?s:.*)[^.…]\Z",  # as a part of another message must not
    "has a name outside of backticks": r"\w_\w|\bjzero\.\w",
    "begs or shouts": r"(?i:\bplease\b|\bsorry\b)|!",
}
"""What is wrong with the form of a message, by how one finds it."""


def template(node):
    """Returns the text of a message as it is written in the source, with an ellipsis for what varies."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(map(template, parts))
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            return template(left) + template(right)
    return "…"


def head(message):
    """Returns how a message begins: up to the end of a clause that has three words or more."""
    line = re.sub(r"^…\. ", "… ", re.sub("…+", "…", message.strip().splitlines()[0]))
    for end in re.finditer(r"[:;.](?=\s|$)", line):
        text = line[: end.start()]
        if len(re.findall(r"[A-Za-z]\w*", text)) >= 3 and text.count("(") == text.count(")"):
            return text
    return line


@functools.cache
def messages():
    """Returns all errors and warnings that the sources make: where, and the text."""
    found = []
    for path in sorted((ROOT / "jzero").rglob("*.py")):
        calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call) and node.args)
        for node in calls:
            text = template(node.args[0])
            is_message = re.fullmatch(r"[A-Z]\w*Error|warn", ast.unparse(node.func))
            if is_message and re.search("[a-z]", text and head(text)):  # else it is put together elsewhere
                found.append((f"{path.relative_to(ROOT)}:{node.lineno}", text))
    return found


def faults(text):
    """Returns what is wrong with the form of a message."""
    bare = QUOTED.sub("…", text.rstrip())
    return [fault for fault, pattern in WRONG.items() if re.search(pattern, bare)]


def explained():
    """Returns the heads of messages that the pages explain."""
    text = "".join(page.read_text() for page in PAGES)
    return re.findall(r"^(?!:   |#)(\S.*)\n(?=(?:\S.*\n)*:   )", text, re.MULTILINE)


def test_every_message_says_what_to_do_or_is_explained():
    terms = explained()
    assert len(terms) == len(set(terms)), [term for term in terms if terms.count(term) > 1]
    bare = [f"{at}: {text}" for at, text in messages() if not REMEDY.search(text) and head(text) not in terms]
    assert not bare, "say what to do, or explain under docs/troubleshooting/:\n" + "\n".join(bare)


def test_every_message_that_is_explained_exists():
    heads = {head(text) for _, text in messages()}
    assert len(heads) > 300
    assert not [term for term in explained() if term not in heads]


def test_the_form_of_messages():
    found = [f"{at}: {text}\n  {', '.join(faults(text))}" for at, text in messages() if faults(text)]
    assert not found, "\n".join(found)
