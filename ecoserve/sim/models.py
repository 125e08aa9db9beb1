"""What the cost model needs to know of a model: its shape. All weights and KV are in BF16."""

from __future__ import annotations

from dataclasses import dataclass

BYTES = 2
"""Bytes of a BF16 value."""


@dataclass(frozen=True, slots=True)
class Model:
    """A dense Llama-like decoder (gated MLP). Sizes in elements, from its public ``config.json``.

    Biases and norms, under a thousandth of the weights, are left out.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    head_dim: int = 128
    tied: bool = False
    """Whether the embedding also serves as LM head."""

    @property
    def layer_weights(self) -> int:
        """Weights of one layer."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.ffn

    @property
    def weights(self) -> int:
        """Weights of the model, embedding and LM head included."""
        tables = 1 if self.tied else 2
        return self.layers * self.layer_weights + tables * self.vocab * self.hidden

    def kv_bytes(self, tp: int = 1) -> int:
        """Bytes of KV a token over all devices; more than the model's own where TP copies heads."""
        return 2 * BYTES * self.layers * self.head_dim * max(self.kv_heads, tp)

    @property
    def tensor_parallel(self) -> tuple[int, ...]:
        """Powers of two up to 64 that divide the heads and the MLP, and the KV heads or are their
        multiple (each device then holds a copy of one)."""
        return tuple(tp for tp in (1, 2, 4, 8, 16, 32, 64) if self._divides(tp))

    def check(self, tp: int, pp: int = 1) -> None:
        """ValueError, with what is allowed, unless TP divides the model and PP its layers."""
        if tp < 1 or not self._divides(tp):
            allowed = ", ".join(map(str, self.tensor_parallel))
            raise ValueError(
                f"tp: {self.name} has {self.heads} heads and {self.kv_heads} KV heads, which {tp} "
                f"devices cannot share evenly; allowed are {allowed}"
            )
        if pp < 1 or self.layers % pp:
            allowed = ", ".join(str(n) for n in range(1, 9) if self.layers % n == 0)
            raise ValueError(
                f"pp: {self.name} has {self.layers} layers, which {pp} stages cannot share evenly; "
                f"allowed are {allowed} and further divisors"
            )

    def _divides(self, tp: int) -> bool:
        shared = self.kv_heads % tp == 0 or tp % self.kv_heads == 0
        return shared and self.heads % tp == 0 and self.ffn % tp == 0


MODELS = {
    model.name: model
    for model in (
        Model("Llama-30B", 60, 6656, 52, 52, 17920, 32000),
        Model("CodeLlama-34B", 48, 8192, 64, 8, 22016, 32000),
        Model("Qwen2-72B", 80, 8192, 64, 8, 29568, 152064),
        Model("Llama-3-8B", 32, 4096, 32, 8, 14336, 128256),
        Model("Llama-3-70B", 80, 8192, 64, 8, 28672, 128256),
        Model("SmolLM2-135M", 30, 576, 9, 3, 1536, 49152, head_dim=64, tied=True),
        # Those below are in the public tables that the cost model is calibrated against. This
        # Qwen-72B is the first one, without grouped KV heads.
        Model("Llama-2-7B", 32, 4096, 32, 32, 11008, 32000),
        Model("Llama-2-70B", 80, 8192, 64, 8, 28672, 32000),
        Model("Qwen-72B", 80, 8192, 64, 64, 24576, 152064),
    )
}


def model(name: str) -> Model:
    """The model of that name, in any case; a ValueError lists the names otherwise."""
    for known, found in MODELS.items():
        if known.lower() == name.lower():
            return found
    raise ValueError(f"model: {name!r} is not known; known are {', '.join(MODELS)}")
