"""Kubernetes manifests: what their containers run, on the devices that all pods ask for."""

from textwrap import dedent
from typing import Any

import pytest

from perfmodel.errors import LaunchFileError
from perfmodel.ingest.launch import Launch, parse_launch


def read(text: str, **given: Any) -> Launch:
    return parse_launch(dedent(text).lstrip("\n"), "job.yaml", **given)


MODEL = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 2048 --max-position-embeddings 2048 "
    "--vocab-size 50257 --micro-batch-size 1 --global-batch-size 128 --bf16 --use-mcore-models"
)
TRAINING = f"torchrun --nproc_per_node=8 --nnodes=$WORLD_SIZE pretrain_gpt.py --tensor-model-parallel-size $TP {MODEL}"
CONTAINER = f"""
containers:
  - name: main
    image: training
    env: [{{name: TP, value: "4"}}, {{name: POD, valueFrom: {{fieldRef: {{fieldPath: status.podIP}}}}}}]
    command: ["/bin/bash", "-c"]
    args:
      - |
        cd /workspace
        {TRAINING}
    resources: {{limits: {{nvidia.com/gpu: 8}}}}
"""


def indented(text: str, blanks: int) -> str:
    return text.strip("\n").replace("\n", "\n" + " " * blanks)


PYTORCH_JOB = f"""
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata: {{name: training}}
spec:
  pytorchReplicaSpecs:
    Master:
      replicas: 1
      template:
        spec:
          {indented(CONTAINER, 10)}
    Worker:
      replicas: 3
      template:
        spec:
          {indented(CONTAINER, 10)}
"""
INDEXED_JOB = f"""
apiVersion: batch/v1
kind: Job
spec:
  completionMode: Indexed
  completions: 4
  parallelism: 4
  template:
    spec:
      {indented(CONTAINER, 6)}
"""
VOLCANO_JOB = f"""
apiVersion: batch.volcano.sh/v1alpha1
kind: Job
spec:
  minAvailable: 4
  tasks:
    - replicas: 4
      name: worker
      template:
        spec:
          {indented(CONTAINER, 10)}
"""


@pytest.mark.parametrize("manifest", [PYTORCH_JOB, INDEXED_JOB, VOLCANO_JOB])
def test_kinds_of_jobs_run_the_command_of_their_containers(manifest: str) -> None:
    launch = read(manifest)
    assert launch.layout is not None
    assert (launch.devices, launch.layout.tp, launch.layout.dp, launch.global_batch) == (
        32,
        4,
        8,
        128,
    )
    assert launch.framework.partition("@")[0] == "megatron-core"
    assert launch.may_be_wrong == ()


def test_a_command_as_words_with_variables() -> None:
    text = """
        apiVersion: v1
        kind: Pod
        spec:
          containers:
            - name: main
              env: [{name: BATCH, value: "2"}]
              command: [torchrun, --nproc_per_node, "8", train.py]
              args: [--per_device_train_batch_size, $(BATCH), --model_name_or_path, Qwen/Qwen3-8B, --bf16]
              resources: {requests: {nvidia.com/gpu: "8"}}
    """
    launch = read(text, seq_len=2048)
    assert (launch.devices, launch.global_batch, launch.job_fields["dtype"]) == (8, 16, "bf16")


SLICES = """
apiVersion: v1
kind: ConfigMap
metadata: {name: scripts}
data:
  run.sh: |
    python3 -m MaxText.train configs/base.yml model_name=llama2-7b per_device_batch_size=4 MORE
---
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
spec:
  replicatedJobs:
    - name: slice
      replicas: 2
      template:
        spec:
          parallelism: 4
          template:
            spec:
              containers:
                - name: main
                  command: [bash, /scripts/run.sh]
                  resources: {limits: {google.com/tpu: 4}}
"""


@pytest.mark.parametrize(
    ("more", "copies"), [("", 2), ("dcn_fsdp_parallelism=2 dcn_data_parallelism=1", 1)]
)
def test_slices_of_tpus_with_a_mounted_script(more: str, copies: int) -> None:
    """Each slice is a copy of one group of pods, and holds a copy of the model unless an axis spans
    them."""
    launch = read(SLICES.replace("MORE", more), seq_len=2048)
    assert launch.layout is not None
    assert (launch.devices, launch.layout.dp, launch.layout.replicate) == (32, 32, copies)


@pytest.mark.parametrize(
    "text",
    [
        "apiVersion: apps/v1\nkind: Deployment\nspec:\n  template:\n    spec:\n      containers:\n"
        "        - {name: main, command: [vllm, serve, model]}\n",
        "apiVersion: v1\nkind: Service\nspec: {ports: [{port: 80}]}\n",
    ],
)
def test_manifests_without_a_training_are_refused_in_one_line(text: str) -> None:
    with pytest.raises(LaunchFileError, match="Kubernetes") as error:
        read(text)
    assert "\n" not in str(error.value)
