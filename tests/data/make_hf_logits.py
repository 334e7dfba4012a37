"""Makes `hf_logits.npz`: the logits of tiny models by `transformers`, from both spellings of their `config.json`.

It needs torch and transformers: `python -m tests.data.make_hf_logits`.
"""

import pathlib
import tempfile

import numpy as np
import torch
import transformers

from tests import hf_models


def logits(folder):
    """Returns the logits of `hf_models.TOKENS`: [2, 9, V]."""
    kwargs = {"attn_implementation": "eager", "output_loading_info": True, "dtype": torch.float32}
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, **kwargs)
    assert not any(info.values()), info
    with torch.no_grad():
        return model.eval()(torch.tensor(hf_models.TOKENS)).logits.float().numpy()


def main():
    """Writes the logits of all families."""
    found = {}
    with tempfile.TemporaryDirectory() as made:
        for family in hf_models.FAMILIES:
            folder = pathlib.Path(made) / family
            hf_models.write_folder(folder, family)
            found[family] = logits(folder)
            hf_models.write_folder(folder, family, "old")
            np.testing.assert_array_equal(logits(folder), found[family])
    np.savez_compressed(hf_models.LOGITS, **found)


if __name__ == "__main__":
    main()
