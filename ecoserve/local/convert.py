"""Turns a GGUF file into a directory that vLLM serves.

``python -m ecoserve.local.convert GGUF OUT``, a process of its own, so that torch and transformers
never enter the launcher.
"""

from __future__ import annotations

import sys
from pathlib import Path

# The tokens of the answer lead clearly (by 1.0 in log-probability, in bfloat16 with AMX). Asked for
# France, the first one is a near tie, which rounding decides: on some CPUs the answer is nonsense.
QUESTION, ANSWER = "What is the capital of Japan?", "Tokyo"


def convert(gguf: Path, out: Path) -> None:
    """Writes ``gguf`` as bfloat16 safetensors with its tokenizer and chat template to ``out``.

    Raises ``RuntimeError`` if the model that was written does not answer an easy question: a
    conversion that mixes up tensors leaves files that load well and talk nonsense.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    folder, name = str(gguf.parent), gguf.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file=name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    tokenizer.model_max_length = model.config.max_position_embeddings
    # What the model's authors recommend, for callers who set nothing: at vLLM's own default, a
    # temperature of 1, so small a model rambles.
    model.generation_config.update(do_sample=True, temperature=0.2, top_p=0.9)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)

    tokenizer = AutoTokenizer.from_pretrained(out)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    tokens = model.generate(**prompt, max_new_tokens=24, do_sample=False)
    answer = tokenizer.decode(tokens[0][prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    if ANSWER not in answer:
        raise RuntimeError(f"the converted model answers {QUESTION!r} with {answer!r}")


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
