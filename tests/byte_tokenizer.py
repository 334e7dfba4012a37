"""A tokenizer whose tokens are bytes, with as much of transformers' interface as the examples use."""

from __future__ import annotations

from typing import Any

import pytest

USER, ASSISTANT, END = 256, 257, 258
NUM_TOKENS = 259
HEADS = {"user": USER, "assistant": ASSISTANT}


class ByteTokenizer:
    """Bytes, and three more tokens: the heads of user and assistant, and the end.

    Its chat template writes head, content, end; it marks content and end of the assistant, or does not.
    """

    eos_token_id = END

    def __init__(self, *, marks: bool = False, template: bool = True, drops_old: bool = False) -> None:
        mark = "{% generation %}" if marks else ""
        self.chat_template = f"head {mark} content end" if template else None
        self.marks, self.drops_old = marks, drops_old

    def __len__(self) -> int:
        return NUM_TOKENS

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def get_chat_template(self) -> str:
        return self.chat_template

    def apply_chat_template(
        self,
        messages: list[dict[str, str]],
        *,
        tokenize: bool,
        return_dict: bool,
        add_generation_prompt: bool = False,
        return_assistant_tokens_mask: bool = False,
    ) -> dict[str, Any]:
        assert tokenize
        assert return_dict
        tokens: list[int] = []
        mask: list[int] = []
        for number, message in enumerate(messages):
            if message["role"] not in HEADS:
                raise TypeError(f"no {message['role']} here")  # as a template may
            is_old = self.drops_old and number < len(messages) - 1
            content = [] if is_old and message["role"] == "assistant" else list(message["content"].encode())
            tokens += [HEADS[message["role"]], *content, END]
            mask += [0] + [int(message["role"] == "assistant")] * (len(content) + 1)
        if add_generation_prompt:
            tokens, mask = [*tokens, ASSISTANT], [*mask, 0]
        masks = {"assistant_masks": mask} if return_assistant_tokens_mask else {}
        return {"input_ids": tokens, **masks}

    def decode(self, tokens: list[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return bytes(token for token in tokens if token < USER).decode(errors="replace")


TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tokenizer_of_transformers(chat_template: str = TEMPLATE, *, ends: bool = False) -> Any:
    """Returns such a tokenizer by `transformers`, with this template; skips the test where that is not installed.

    With `ends`, it ends each text itself.
    """
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    special = ["</s>", "<|user|>", "<|assistant|>"]
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=NUM_TOKENS, special_tokens=special, initial_alphabet=alphabet)
    made.train_from_iterator([], trainer)
    if ends:
        special = [("</s>", made.token_to_id("</s>"))]
        made.post_processor = tokenizers.processors.TemplateProcessing(single="$A </s>", special_tokens=special)
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>")
    wrapped.chat_template = chat_template
    return wrapped
