"""Hugging Face families and the class that reads the configurations of each: its keys, what they
may hold, and the model that they mean.

Keys that are null count as absent, as in Hugging Face's own classes; keys that are not listed do
not change shapes.
"""

from collections.abc import Mapping
from dataclasses import Field
from typing import Any, ClassVar, Protocol

from perfmodel.catalog.huggingface._convolutions import Lfm2, Lfm2Moe, Lfm3
from perfmodel.catalog.huggingface._deepseek import DeepSeek, DeepSeekSparse, DeepSeekV4, HyV4
from perfmodel.catalog.huggingface._delta_nets import (
    BailingHybrid,
    KimiLinear,
    LaraMini,
    MiniMax,
    OlmoHybrid,
    Qwen3Next,
    Qwen35,
)
from perfmodel.catalog.huggingface._dense import (
    ChatGlm,
    Cohere,
    Cohere2,
    Falcon,
    FirstQwen,
    Gemma,
    Gemma2,
    Gemma3,
    Glm,
    Glm4,
    GptNeoX,
    Nemotron,
    Olmo2,
    Opt,
    Phi,
    StableLm,
    Starcoder2,
)
from perfmodel.catalog.huggingface._diffusion import (
    Flux,
    HunyuanVideo,
    LtxVideo,
    PixArt,
    QwenImage,
    StableDiffusion3,
    Wan,
)
from perfmodel.catalog.huggingface._encoders import (
    T5,
    Albert,
    Bart,
    Bert,
    Deberta,
    DebertaV2,
    Electra,
    EncoderDecoder,
    Ernie,
    Esm,
    ModernBert,
    ModernBertDecoder,
    NomicBert,
    Roberta,
    RoFormer,
    Whisper,
)
from perfmodel.catalog.huggingface._experts import (
    Arctic,
    Cohere2Moe,
    Dbrx,
    Glm4Moe,
    GptOss,
    Llama4,
    LlamaWithExperts,
    LongcatFlash,
    Qwen2Moe,
    Qwen3Moe,
)
from perfmodel.catalog.huggingface._gpt import Bloom, Gpt2, GptBigCode, GptJ, GptNeo, Mpt
from perfmodel.catalog.huggingface._hybrids import (
    Bamba,
    FalconH1,
    FirstMamba,
    GraniteHybrid,
    Jamba,
    Mamba2,
    NemotronH,
)
from perfmodel.catalog.huggingface._linear_models import GatedDeltaNet, RetNet, XLstm
from perfmodel.catalog.huggingface._llama import (
    Fields,
    HyperClovaX,
    LatentLlama,
    Llama,
    Qwen2,
    Qwen3,
)
from perfmodel.catalog.huggingface._nas import NemotronNas
from perfmodel.catalog.huggingface._rwkv import Rwkv, Rwkv5, Rwkv6, Rwkv7
from perfmodel.catalog.huggingface._vision import Dit, Siglip, Vit
from perfmodel.catalog.huggingface._window_heads import Gemma3n, Gemma4, Laguna, MiMoV2, Step35
from perfmodel.catalog.huggingface._zamba import Zamba, Zamba2


class Family(Protocol):
    """Protocol of a family's configuration, a dataclass of its keys."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def fields(self) -> Fields:
        """Fields of the described model."""
        ...


FAMILIES: Mapping[str, type[Family]] = {
    "albert": Albert,
    "arctic": Arctic,
    "bailing_hybrid": BailingHybrid,
    "bamba": Bamba,
    "bart": Bart,
    "bert": Bert,
    "bloom": Bloom,
    "chatglm": ChatGlm,
    "cohere": Cohere,
    "cohere2": Cohere2,
    "cohere2_moe": Cohere2Moe,
    "dbrx": Dbrx,
    "deepseek_v2": DeepSeek,
    "deepseek_v3": DeepSeek,
    "deepseek_v32": DeepSeekSparse,
    "deepseek_v4": DeepSeekV4,
    "DiTTransformer2DModel": Dit,
    "electra": Electra,
    "ernie": Ernie,
    "esm": Esm,
    "falcon": Falcon,
    "falcon_h1": FalconH1,
    "falcon_mamba": FirstMamba,
    "FluxTransformer2DModel": Flux,
    "gated_deltanet": GatedDeltaNet,
    "gemma": Gemma,
    "gemma2": Gemma2,
    "gemma3": Gemma3,
    "gemma3n": Gemma3n,
    "gemma4": Gemma4,
    "glm": Glm,
    "glm4": Glm4,
    "glm4_moe": Glm4Moe,
    "gpt2": Gpt2,
    "gpt_bigcode": GptBigCode,
    "gpt_neo": GptNeo,
    "gpt_neox": GptNeoX,
    "gpt_oss": GptOss,
    "gptj": GptJ,
    "granitemoehybrid": GraniteHybrid,
    "HunyuanVideoTransformer3DModel": HunyuanVideo,
    "hy_v4": HyV4,
    "hyperclovax": HyperClovaX,
    "jamba": Jamba,
    "kimi_linear": KimiLinear,
    "laguna": Laguna,
    "lara_mini": LaraMini,
    "lfm2": Lfm2,
    "lfm2_moe": Lfm2Moe,
    "lfm3": Lfm3,
    "llama": Llama,
    "llama4": Llama4,
    "llama_with_experts": LlamaWithExperts,
    "longcat": LongcatFlash,
    "LTXVideoTransformer3DModel": LtxVideo,
    "mamba": FirstMamba,
    "mamba2": Mamba2,
    "mimo_v2_flash": MiMoV2,
    "minicpm3": LatentLlama,
    "minimax": MiniMax,
    "mistral": Llama,
    "modernbert": ModernBert,
    "modernbert-decoder": ModernBertDecoder,
    "mpt": Mpt,
    "mt5": T5,
    "nemotron": Nemotron,
    "nemotron-nas": NemotronNas,
    "nemotron_h": NemotronH,
    "nomic_bert": NomicBert,
    "olmo2": Olmo2,
    "olmo_hybrid": OlmoHybrid,
    "opt": Opt,
    "pegasus": EncoderDecoder,
    "phi": Phi,
    "phi3": Llama,
    "PixArtTransformer2DModel": PixArt,
    "qwen": FirstQwen,
    "qwen2": Qwen2,
    "qwen2_moe": Qwen2Moe,
    "qwen3": Qwen3,
    "qwen3_5": Qwen35,
    "qwen3_moe": Qwen3Moe,
    "qwen3_next": Qwen3Next,
    "QwenImageTransformer2DModel": QwenImage,
    "retnet": RetNet,
    "roberta": Roberta,
    "rwkv": Rwkv,
    "rwkv5": Rwkv5,
    "rwkv6": Rwkv6,
    "rwkv7": Rwkv7,
    "SD3Transformer2DModel": StableDiffusion3,
    "deberta": Deberta,
    "deberta-v2": DebertaV2,
    "roformer": RoFormer,
    "siglip_vision_model": Siglip,
    "stablelm": StableLm,
    "starcoder2": Starcoder2,
    "step3p5": Step35,
    "t5": T5,
    "vit": Vit,
    "WanTransformer3DModel": Wan,
    "whisper": Whisper,
    "xlstm": XLstm,
    "zamba": Zamba,
    "zamba2": Zamba2,
}
"""Families by `model_type`, each with the class that reads its configuration; see also
`RELATIVES`."""
