"""Small models with every optional part that no model of the catalog has."""

from typing import Any

from perfmodel.spec import Transformer
from perfmodel.spec.parts import (
    CompressedAttention,
    DeltaNet,
    Distances,
    Experts,
    HyperConnections,
    Indexer,
    LatentAttention,
    LayerEmbedding,
    Mamba,
    SharedBlock,
    Streams,
    TimeMix,
    WindowHeads,
)

H, HEADS, D, FFN, VOCAB, TOKENS = 64, 4, 16, 96, 256, 128
PLAIN = Transformer(
    name="plain",
    layers=6,
    hidden=H,
    heads=HEADS,
    kv_heads=HEADS,
    head_dim=D,
    ffn_hidden=FFN,
    vocab=VOCAB,
    seq_len=TOKENS,
    norm="rms_norm",
    positions="rope",
    gated_ffn=True,
    activation="silu",
    bias=False,
    dropout=False,
    tied_embeddings=True,
)
MAMBA = Mamba(heads=8, head_dim=16, state=8, groups=4)
LATENT = LatentAttention(
    q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16
)
RWKV_7 = TimeMix(
    inner=64,
    heads=4,
    chunk=16,
    gate_rank=12,
    decay_rank=8,
    rate_rank=10,
    value_rank=6,
    channel_receptance=False,
)
LINEAR_ATTENTION = DeltaNet(
    heads=HEADS,
    key_heads=HEADS,
    head_dim=D,
    key_dim=D,
    conv_kernel=0,
    chunk=32,
    delta_rule=False,
    fixed_decays=True,
    norm_of_all_heads=True,
)
COMPRESSED_KEYS = CompressedAttention(
    q_lora_rank=24,
    output_groups=4,
    output_rank=12,
    rope_dim=8,
    sparse_rate=4,
    heavy_rate=16,
    index_heads=2,
    index_dim=8,
    index_topk=8,
)
ZAMBA: dict[str, Any] = {"mixers": "M AM AM M AM M ", "mamba": MAMBA}
MODELS_OF_PARTS: dict[str, dict[str, Any]] = {
    "rwkv": {
        "mixers": "RK ",
        "time_mix": TimeMix(inner=80),
        "positions": "none",
        "gated_ffn": False,
    },
    "rwkv 6": {
        "mixers": "RK ",
        "time_mix": TimeMix(
            inner=64, keys=32, heads=4, chunk=16, gate=True, mix_rank=4, decay_rank=8
        ),
        "positions": "none",
        "gated_ffn": False,
    },
    "rwkv 7": {
        "mixers": "RK TK TK TK TK TK ",
        "time_mix": RWKV_7,
        "positions": "none",
        "gated_ffn": False,
    },
    "linear attention": {"mixers": "L- L- *- ", "delta_net": LINEAR_ATTENTION},
    "mlstm": {
        "mixers": "L- ",
        "delta_net": DeltaNet(
            heads=HEADS,
            key_heads=HEADS,
            head_dim=D,
            key_dim=8,
            conv_kernel=0,
            delta_rule=False,
            input_gates=True,
            norm_of_all_heads=True,
        ),
    },
    "streams that are not mixed": {
        "mixers": "HI*H- H*HE ",
        "latent_attention": LATENT,
        "indexer": Indexer(heads=2, head_dim=16),
        "attention_gate": True,
        "attention_sinks": True,
        "hyper_connections": HyperConnections(count=2, mixed=False),
        "experts": Experts(count=8, topk=2, ffn_hidden=32),
    },
    "compressed keys": {
        "mixers": "HYHE HFHE HGHE ",
        "heads": 2 * HEADS,
        "kv_heads": 1,
        "window": 16,
        "compressed_attention": COMPRESSED_KEYS,
        "hyper_connections": HyperConnections(count=3),
        "experts": Experts(count=8, topk=2, ffn_hidden=32, shared_ffn_hidden=32),
    },
    "zamba": ZAMBA | {"shared_block": SharedBlock(), "head_dim": 2 * D},
    "zamba 2": ZAMBA
    | {"shared_block": SharedBlock(copies=2, adapter_rank=8, attention_adapters=True)},
    "indexer": {
        "mixers": "I*- *- *- ",
        "latent_attention": LATENT,
        "indexer": Indexer(heads=2, head_dim=16),
    },
    "small gemma": {
        "mixers": "W-P W-P *-P V-P V-P Q-P",
        "window": 16,
        "window_heads": WindowHeads(heads=HEADS, kv_heads=2, head_dim=8),
        "kv_heads": 2,
        "qk_norm": True,
        "norm_at": "both",
        "ffn_sizes": (FFN, FFN, FFN, 2 * FFN, 2 * FFN, 2 * FFN),
        "layer_embedding": LayerEmbedding(width=8, vocab=384),
    },
    "streams": {
        "mixers": "UW-P UQ-P ",
        "window": 16,
        "norm_at": "both",
        "layer_embedding": LayerEmbedding(width=8, vocab=384),
        "streams": Streams(count=4, low_rank=8),
    },
    "layers that differ": {
        "mixers": "*- - *- * *- -",
        "ffn_sizes": (96, 32, 64, 96, 32, 128),
        "kv_heads": 2,
    },
    "shortcut": {
        "mixers": "*-E*- ",
        "latent_attention": LATENT,
        "experts": Experts(count=8, topk=2, ffn_hidden=32, idle=4),
        "shortcut_experts": True,
    },
    "distances": {
        "distances": Distances(rows=40, projections=("query", "key")),
        "kv_heads": 2,
        "qkv_bias": True,
    },
    "mixers side by side": {"mixers": "*M- ", "mamba": MAMBA, "parallel_mixers": True},
    "normed experts": {
        "experts": Experts(
            count=8, topk=2, ffn_hidden=32, shared_ffn_hidden=48, every=2, branch_norms=True
        ),
        "norm_at": "both",
    },
}
