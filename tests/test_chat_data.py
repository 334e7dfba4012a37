"""Chats as rows of tokens: what is learned, what packing keeps, bad lines by number."""

import json

import jax
import numpy as np
import pytest

import chat_data
import decoder
import packing
import training
from tests import hf_models
from tests.byte_tokenizer import ASSISTANT, END, USER, ByteTokenizer, tokenizer_of_transformers

CHAT = [
    {"role": "user", "content": "a?"},
    {"role": "assistant", "content": "bc"},
    {"role": "user", "content": "d"},
    {"role": "assistant", "content": "e"},
]
A, B, C, D, E, MARK = b"abcde?"


def read(tmp_path, *lines, tokenizer=None, max_tokens=1000, **options):
    file = tmp_path / "data.jsonl"
    lines = [line if isinstance(line, bytes | str) else json.dumps(line) for line in lines]
    file.write_bytes(b"".join((x if isinstance(x, bytes) else x.encode()) + b"\n" for x in lines))
    return chat_data.read_examples([file], tokenizer or ByteTokenizer(), max_tokens=max_tokens, **options)


@pytest.mark.parametrize("marks", [False, True])
def test_of_chats_the_answers_are_learned(marks, tmp_path):
    (example,), counts = read(tmp_path, {"messages": CHAT}, tokenizer=ByteTokenizer(marks=marks))
    assert example.tokens.tolist() == [USER, A, MARK, END, ASSISTANT, B, C, END, USER, D, END, ASSISTANT, E, END]
    assert example.learned.astype(int).tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 1, 1]
    assert str(counts) == "1 examples (0 of them cut), 0 dropped, 0 bad lines skipped"


def test_of_prompts_the_completion_is_learned_and_of_text_everything(tmp_path):
    lines = ({"prompt": "ab", "completion": "c"}, "", {"text": "de"}, {"prompt": "", "completion": "a"})
    examples, _ = read(tmp_path, *lines)
    assert [x.tokens.tolist() for x in examples] == [[A, B, C, END], [D, E, END], [A, END]]
    assert [x.learned.astype(int).tolist() for x in examples] == [[0, 0, 1, 1], [0, 1, 1], [0, 1]], "never the first"


def test_long_examples_are_cut_and_those_with_nothing_left_are_dropped(tmp_path):
    lines = ({"text": "a" * 9}, {"prompt": "a" * 5, "completion": "b"}, {"text": "abcd"})
    examples, counts = read(tmp_path, *lines, max_tokens=5)
    assert [x.tokens.tolist() for x in examples] == [[A] * 5, [A, B, C, D, END]]
    assert (counts.examples, counts.cut, counts.dropped, counts.bad) == (2, 1, 1, 0)
    with pytest.raises(ValueError, match=r"0 examples .*, 1 dropped"):
        read(tmp_path, {"prompt": "a" * 5, "completion": "b"}, max_tokens=5)


BAD = {
    '{"text": "a"': "This is not JSON",
    "[1]": "must be an object: got list",
    '{"txt": "a"}': r"must have `messages`, .*: got \['txt'\]",
    '{"text": 3}': r"must have `messages`",
    '{"messages": "a"}': "`messages` must be a list",
    '{"messages": [{"role": "robot", "content": "a"}]}': "role of message 0 is 'robot', not one of system",
    '{"messages": [{"role": "assistant", "content": null}]}': "content of message 0 is not text: got None",
    '{"messages": [{"role": "user", "content": "a"}]}': "no message of the assistant",
    b'{"text": "caf\xe9"}': "This is not text in UTF-8",
    b'{"text": "\\ud83d cut"}': "This is not text in UTF-8",
    b'{"messages": [{"role": "user", "content": "\\udc00"}]}': "This is not text in UTF-8",
    '{"text": "a"}'.encode("utf-16"): "This is not",
    b'{"text": ' + b"[" * 100_000: "This is not JSON",
    b'{"text": ' + b"1" * 5000 + b"}": "This is not JSON",
    b"\x00\xff\x93NUMPY": "This is not",
    '{"messages": [{"role": "tool", "content": ""}, {"role": "assistant", "content": ""}]}': "refuses this: no tool",
}


@pytest.mark.parametrize("line", BAD, ids=lambda x: repr(x[:40]))
def test_a_bad_line_is_named_or_skipped(line, tmp_path):
    with pytest.raises(ValueError, match=rf"jsonl:3: .*{BAD[line]}.*--skip-bad"):
        read(tmp_path, {"text": "ab"}, "", line, {"text": "cd"})
    examples, counts = read(tmp_path, {"text": "ab"}, line, {"text": "cd"}, skip_bad=True)
    assert (len(examples), counts.bad) == (2, 1)


def test_chats_need_a_template_that_writes_them_one_way(tmp_path):
    for skips in (False, True):  # which would leave out every line
        with pytest.raises(
            ValueError, match=r"jsonl:1: .*no chat template.* all chats as `prompt` and `completion`\.$"
        ):
            read(tmp_path, {"messages": CHAT}, tokenizer=ByteTokenizer(template=False), skip_bad=skips)
    with pytest.raises(ValueError, match=r"message 1 .*\{% generation %\}"):
        read(tmp_path, {"messages": CHAT}, tokenizer=ByteTokenizer(drops_old=True))
    (example,), _ = read(tmp_path, {"messages": CHAT[:2]}, tokenizer=ByteTokenizer(drops_old=True))
    assert example.learned.sum() == 3


def random_examples(number, seed=0, longest=30):
    rng = np.random.default_rng(seed)
    examples = []
    for size in rng.integers(2, longest + 1, number):
        learned = rng.random(size) < 0.6
        learned[0], learned[-1] = False, True
        examples.append(chat_data.Example(rng.integers(0, 61, size).astype(np.int32), learned))
    return examples


def test_packing_loses_no_token():
    examples = random_examples(200)
    rows = packing.PackedRows(examples, 31)
    found = []
    for row in rows:
        assert {name: x.shape for name, x in row.items()} == dict.fromkeys(row, (31,))
        for segment in range(row["segments"].max() + 1):
            (at,) = np.nonzero(row["segments"] == segment)
            assert at.tolist() == list(range(at[0], at[0] + len(at))), "in one piece"
            assert row["positions"][at].tolist() == list(range(len(at)))
            found.append((*row["tokens"][at], *row["learned"][at]))
        rest = row["segments"] < 0
        assert not row["learned"][rest].any()
    assert sorted(found) == sorted((*x.tokens, *x.learned) for x in examples)
    used = sum(len(x.tokens) for x in examples)
    assert used > 0.9 * 31 * len(rows), "rows are full"
    one = chat_data.Example(np.arange(4, dtype=np.int32), np.array([False, True, False, False]))
    assert str(packing.PackedRows([one], 8)) == "1 rows of 8 tokens, 50% full, 12% learned"
    assert packing.PackedRows(examples, 31).fingerprint == rows.fingerprint
    assert packing.PackedRows(examples[1:], 31).fingerprint != rows.fingerprint


@pytest.mark.slow
def test_the_loss_of_packed_rows_is_that_of_each_example_alone(tmp_path):
    model = decoder.Decoder(hf_models.write_folder(tmp_path, "gemma3_text"))
    shapes = jax.eval_shape(model.init, jax.random.key(0), np.zeros((1, 4), np.int32))["params"]
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: np.float32(rng.normal(size=x.shape) / 3), shapes)
    loss_fn = jax.jit(training.next_token_loss(model))
    examples = random_examples(11)
    rows = packing.PackedRows(examples, 31)
    batch = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    packed = loss_fn(params, {**batch, "weights": np.ones(len(rows), np.float32)})
    alone = []
    for x in examples:
        pad = (0, 31 - len(x.tokens))
        one = {"tokens": np.pad(x.tokens, pad)[None], "learned": np.pad(x.learned, pad)[None]}
        alone.append(loss_fn(params, {**one, "weights": np.ones(1, np.float32)}))
    assert float(packed.weight) == sum(float(x.weight) for x in alone) == sum(x.learned.sum() for x in examples)
    mean = sum(float(x.sum) for x in alone) / float(packed.weight)
    assert float(packed.sum) / float(packed.weight) == pytest.approx(mean, rel=1e-6)


ANSWER = "{% generation %}{{ m.content }}</s>{% endgeneration %}"
ONE = "<|{{ m.role }}|>{% if m.role == 'assistant' %}" + ANSWER + "{% else %}{{ m.content }}{% endif %}"
TEMPLATE = f"{{% for m in messages %}}{ONE}{{% endfor %}}{{% if add_generation_prompt %}}<|assistant|>{{% endif %}}"


@pytest.mark.slow  # to import transformers takes two seconds
@pytest.mark.parametrize("marks", [False, True])
def test_the_tokenizers_of_transformers_do_all_that(marks, tmp_path):
    unmarked = TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    tokenizer_of_transformers(TEMPLATE if marks else unmarked).save_pretrained(tmp_path / "model")
    tokenizer = chat_data.load_tokenizer(tmp_path / "model")

    (chat, prompt), _ = read(tmp_path, {"messages": CHAT}, {"prompt": "ab", "completion": "c"}, tokenizer=tokenizer)
    want = "<|user|>a?<|assistant|>bc</s><|user|>d<|assistant|>e</s>"
    assert tokenizer.decode(chat.tokens) == want
    assert chat.learned.astype(int).tolist() == [0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1]
    assert tokenizer.decode(prompt.tokens) == "abc</s>"
    assert prompt.learned.astype(int).tolist() == [0, 0, 1, 1]
