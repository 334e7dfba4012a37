"""Writes `parameter_counts.json`: what transformers counts in models of each family, by their `config.json`.

python tests/data/make_parameter_counts.py    # needs torch and transformers; allocates nothing
"""

import json
import pathlib

import torch
import transformers

SIZES = {
    "vocab_size": 61,
    "hidden_size": 36,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
GIVEN = {
    "llama": SIZES | {"attention_bias": True, "mlp_bias": True},
    "mistral": SIZES | {"head_dim": 10, "num_key_value_heads": 3},
    "qwen2": SIZES | {"tie_word_embeddings": True},
    "qwen3": SIZES | {"head_dim": 8},
    "gemma": SIZES | {"head_dim": 8},
    "gemma2": SIZES | {"head_dim": 8},
    "gemma3_text": SIZES | {"head_dim": 8},
    "mixtral": SIZES | {"num_local_experts": 5},
    "qwen3_moe": SIZES | {"head_dim": 8, "num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 20},
    "olmoe": SIZES | {"num_experts": 5, "num_experts_per_tok": 3},
    "gpt_oss": SIZES | {"head_dim": 8, "num_local_experts": 5},
}


def main():
    found = {}
    for family, given in GIVEN.items():
        config = transformers.AutoConfig.for_model(family, **given)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        fields = {"model_type": family, **given}
        found[family] = {"config": fields, "parameters": sum(x.numel() for x in model.parameters())}
    path = pathlib.Path(__file__).parent / "parameter_counts.json"
    path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
