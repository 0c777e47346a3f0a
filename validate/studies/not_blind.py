"""What was looked up or chosen with the errors of published runs in view, by what it is a fact
of."""

from collections.abc import Mapping, Sequence
from typing import Final

NOT_BLIND: Final[Mapping[str, Sequence[str]]] = {
    "nanotron": (
        "what it keeps, copies, reduces and launches, and the host time per operator, by operators counted in it",
        "its pipelines check every collective",
    ),
    "NeMo, Megatron-Bridge, Transformer Engine": (
        "they hide tensor-parallel collectives",
        "what recipes set, by release, and that NeMo of 2023 shards optimizer states",
        "configurations of T5 and BERT in NeMo's launcher overlap no reduction with the backward",
        "rows whose recipe says so attend in 8 bits",
        "the element type in which partial attention is added up, and that an adapter's input is gathered in 16 bits",
        "what tensor-parallel ranks of adapters send, and that they wait for none of them once more",
        "host time per expert of grouped products",
        "rates and multiprocessors of HybridEP, as its authors and recipes have them",
        "rings hide nothing that experts exchange nor anything of the output layer, and which recipes have none",
        "HybridEP's permutations are kernels of their own, and recipes of 26.06 fuse experts and attend in 8 bits",
    ),
    "Megatron-LM, Megatron-DeepSpeed, DeepSpeed": (
        "element type of gradients in fp16",
        "what Habana's fork sets",
        "gradients that Megatron-DeepSpeed keeps",
        "Gaudi runs compiled graphs, and what Intel fine-tunes with there is DeepSpeed",
        "BigScience's hosts wait for every kernel",
        "the rate at which a host updates parameters is the mean of the known ones instead of the slowest",
    ),
    "other frameworks": (
        "Pax shards weights and recomputes repeated layers alone",
        "InternEvo all-reduces gradients, and its attention is of before FlashAttention-2",
        "element type of gradients of torch's FSDP and of llm-foundry",
        "OneFlow's collectives share the kernels' stream with tensor parallelism",
        "heads of BERT see masked tokens alone outside PyTorch",
        "AQT rounds gradients by random numbers that it writes",
        "what Pax's configurations set, and which modules MaxText recomputes",
        "which operators of TensorFlow, PyTorch, OneFlow and PaddlePaddle are not fused in BERT",
        "NVIDIA's BERT for PyTorch reduces gradients in one bucket",
        "OneFlow and XLA fuse batch norms with what follows",
    ),
    "kernels": (
        "operators of latent attention",
        "servers' attention also fills caches and training's does not",
        "FlashAttention-2 takes what its authors published (seen on runs outside the record)",
        "convolutions may beat the nominal rate",
        "exponentials of Blackwell Ultra in attention",
        "Gaudi 2's products reach what a search found",
    ),
    "power": (
        "no remainder beside the power limit is kept for Blackwell",
        "its energy per FLOP is the mean of four sources of kernels, SimuMax's among them, and falls with less than "
        "the square of the clock",
    ),
    "networks and hosts": (
        "latency of EFA per rank, from collectives of the playbook's own cluster",
        "rate and contention of Omni-Path, from all-reduces on BLOOM's",
        "hosts go on while collectives wait",
        "how many multiprocessors collectives hold, inside a node as between nodes",
    ),
    "memory": (
        "frozen 8-bit weights, and communicators",
        "what LoRA keeps of frozen layers, how XLA divides the residual stream, that logits are gone in backward",
        "inputs kept in 8 bits where a row would not fit else",
        "BigScience read its first node's memory",
        "the chance to fit counts what the allocator loses",
    ),
    "how rows are read": (
        "what a row leaves open is taken as it is fastest, of what more likely than not fits, with that one's interval",
        "CUDA graphs are open where a row says nothing of its launch",
        "the Llama 3 paper's FSDP is ZeRO 2",
        "`FSDP+DP` leaves open over how many ranks weights are sharded",
    ),
    "sites": ("how known runs of a site are weighed was chosen with all sources' errors in view",),
}
