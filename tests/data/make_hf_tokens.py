"""Makes `hf_tokens.json`: what `transformers` generates with tiny models, the likeliest token each time.

It needs torch and transformers: `python -m tests.data.make_hf_tokens`.
"""

import json
import pathlib
import tempfile

import torch
import transformers

from tests import hf_models
from tests.test_generate import PROMPTS, TOKENS

NUM_TOKENS = 12
FAMILIES = ("llama", "mistral", "qwen3", "gemma3_text", "mixtral", "gpt_oss")


def continued(folder, prompt):
    """Returns the new tokens behind a prompt, by itself."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = torch.tensor([prompt])
    options = {"do_sample": False, "max_new_tokens": NUM_TOKENS, "eos_token_id": None, "pad_token_id": 0}
    new = model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
    return new[0, len(prompt) :].tolist()


def main():
    """Writes the tokens of some families."""
    found = {}
    with tempfile.TemporaryDirectory() as made:
        for family in FAMILIES:
            folder = pathlib.Path(made) / family
            hf_models.write_folder(folder, family)
            found[family] = [continued(folder, prompt) for prompt in PROMPTS]
    lines = ",\n".join(f" {json.dumps(family)}: {json.dumps(rows)}" for family, rows in found.items())
    TOKENS.write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main()
