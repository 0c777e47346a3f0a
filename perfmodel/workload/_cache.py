"""What the cache of keys and values holds of every layer, on one device."""

from perfmodel.spec import Transformer

MAMBA_STATE_BYTES = 4
"""Of an element of a Mamba layer's state, which servers keep in fp32."""


def layer_cache_bytes(model: Transformer, tp: int, tokens: int, element_bytes: float) -> tuple[float, ...]:
    """Bytes that a sequence of `tokens` takes in the cache of each layer, in model order, on a rank of tensor
    parallelism.

    Keys and values of the rank's heads, which are copied where there are fewer heads than ranks; one compressed vector
    for all heads under latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1.2), held by every rank; the last
    `window` tokens where attention slides; of Mamba layers a state that does not grow.
    """
    latent, mamba = model.latent_attention, model.mamba
    if latent:
        a_token = (latent.kv_lora_rank + latent.qk_rope_head_dim) * element_bytes
    else:
        a_token = 2.0 * max(1, model.kv_heads // tp) * model.head_dim * element_bytes
    full = tokens * a_token
    windowed = min(tokens, model.window or tokens) * a_token
    if model.mixers:
        state = 0.0
        if mamba:
            convolved = (mamba.heads * mamba.head_dim + 2 * mamba.groups * mamba.state) * (mamba.conv_kernel - 1)
            state = MAMBA_STATE_BYTES * (mamba.heads * mamba.head_dim * mamba.state + convolved) / tp
        return tuple({"*": windowed, "M": state}.get(letter, 0.0) for letter in model.mixers)
    every = model.full_attention_every
    return tuple(full if every and i % every == 0 else windowed for i in range(1, model.layers + 1))
