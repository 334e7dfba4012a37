"""Makes `hf_defaults.json`: what jzero reads of the `config.json` of each family, as `transformers` fills it in.

It needs transformers: `python -m tests.data.make_hf_defaults`.
"""

import json

from transformers import AutoConfig

from jzero.weights.model_types import COMMON, FAMILIES
from tests import hf_models


def main():
    """Writes the fields of all families."""
    found = {}
    for family, own in FAMILIES.items():
        fields = AutoConfig.for_model(family).to_dict()
        found[family] = {name: fields[name] for name in sorted({*COMMON, *own} & set(fields))}
    lines = (f"{json.dumps(family)}: {json.dumps(fields)}" for family, fields in found.items())
    hf_models.DEFAULTS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
