"""Commands that start a predicted server: vLLM, SGLang, TensorRT-LLM."""

from collections.abc import Sequence
from typing import Final

from perfmodel.serving._request import MEMORY_SHARE, PREFILL_TOKENS
from perfmodel.serving._serving import Serving

_WIDTH: Final = 78
_VLLM_WEIGHTS: Final = {"fp8": "fp8", "int4": "awq", "fp4": "modelopt_fp4"}
_SGLANG_WEIGHTS: Final = {
    "fp8": "fp8",
    "int8": "w8a8_int8",
    "int4": "awq",
    "fp4": "modelopt_fp4",
}
_TORCH_DTYPES: Final = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def engine_commands(serving: Serving, model: str = "MODEL") -> dict[str, str]:
    """Commands that start the server of a prediction, by the name of the engine.

    Every engine counts requests for one replica; memory, pages and the tokens of prompts that a
    step reads are those of the prediction. TensorRT-LLM starts one replica; several need a command
    each.

    Args:
        serving: result of `serve`.
        model: name or folder of the checkpoint.
    """
    commands = {
        "vllm": ["vllm serve", model, *_vllm(serving)],
        "sglang": [
            "python -m sglang.launch_server",
            f"--model-path {model}",
            *_sglang(serving),
        ],
        "tensorrt-llm": ["trtllm-serve", model, *_tensorrt_llm(serving)],
    }
    return {engine: " ".join(parts) for engine, parts in commands.items()}


def folded(command: str) -> str:
    """Fold a command over several lines with backslashes."""
    lines = [""]
    # A flag and its value stay on one line.
    for word in command.replace(" -", "\n-").split("\n"):
        joined = f"{lines[-1]} {word}".strip()
        if len(joined) > _WIDTH - 4 and lines[-1]:
            lines.append(word)
        else:
            lines[-1] = joined
    return " \\\n    ".join(lines)


def _per_replica(serving: Serving) -> int:
    return serving.requests.batch // serving.layout.dp


def _spreads_experts(serving: Serving) -> bool:
    return serving.layout.ep > 1


def _vllm(serving: Serving) -> Sequence[str]:
    """Flags of vLLM for a server."""
    layout, requests = serving.layout, serving.requests
    flags = [
        f"--tensor-parallel-size {layout.tp}",
        f"--pipeline-parallel-size {layout.pp}",
        f"--data-parallel-size {layout.dp}",
        f"--max-num-seqs {_per_replica(serving)}",
        f"--max-model-len {requests.tokens}",
        f"--max-num-batched-tokens {PREFILL_TOKENS}",
        f"--gpu-memory-utilization {MEMORY_SHARE:g}",
        f"--dtype {_TORCH_DTYPES.get(requests.dtype, 'bfloat16')}",
    ]
    if _spreads_experts(serving):
        flags.append("--enable-expert-parallel")
    weights = requests.weight_dtype or requests.dtype
    if weights in _VLLM_WEIGHTS:
        flags.append(f"--quantization {_VLLM_WEIGHTS[weights]}")
    if requests.kv_dtype == "fp8":
        flags.append("--kv-cache-dtype fp8")
    return flags


def _sglang(serving: Serving) -> Sequence[str]:
    """Flags of SGLang for a server."""
    layout, requests = serving.layout, serving.requests
    # SGLang calls it DP attention: each replica keeps its own cache, while experts are spread over
    # the ranks of all.
    attention_of_replicas = _spreads_experts(serving) and layout.dp > 1
    # With attention by replica the ranks of all replicas count as tensor parallel.
    tp = layout.tp * layout.dp if attention_of_replicas else layout.tp
    flags = [
        f"--tp-size {tp}",
        f"--pp-size {layout.pp}",
        f"--dp-size {layout.dp}",
        f"--max-running-requests {requests.batch if attention_of_replicas else _per_replica(serving)}",
        f"--context-length {requests.tokens}",
        f"--chunked-prefill-size {PREFILL_TOKENS}",
        f"--mem-fraction-static {MEMORY_SHARE:g}",
        f"--dtype {_TORCH_DTYPES.get(requests.dtype, 'bfloat16')}",
    ]
    if attention_of_replicas:
        flags.append("--enable-dp-attention")
    if _spreads_experts(serving):
        flags.append(f"--ep-size {layout.ep}")
    weights = requests.weight_dtype or requests.dtype
    if weights in _SGLANG_WEIGHTS:
        flags.append(f"--quantization {_SGLANG_WEIGHTS[weights]}")
    if requests.kv_dtype == "fp8":
        flags.append("--kv-cache-dtype fp8_e4m3")
    return flags


def _tensorrt_llm(serving: Serving) -> Sequence[str]:
    """Arguments of TensorRT-LLM, which takes the types of weights from the checkpoint."""
    layout, requests = serving.layout, serving.requests
    flags = [
        f"--tp_size {layout.tp}",
        f"--pp_size {layout.pp}",
        f"--max_batch_size {_per_replica(serving)}",
        f"--max_seq_len {requests.tokens}",
        f"--max_num_tokens {PREFILL_TOKENS}",
        f"--kv_cache_free_gpu_memory_fraction {MEMORY_SHARE:g}",
    ]
    if _spreads_experts(serving):
        flags.append(f"--ep_size {layout.ep}")
    if requests.kv_dtype == "fp8":
        flags.append("--kv_cache_dtype fp8")
    return flags
