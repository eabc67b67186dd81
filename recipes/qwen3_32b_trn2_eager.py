"""Qwen3-32B on one trn2.48xlarge in eager mode: the work of a published run. Not yet run on Trainium.

Hardware: trn2.48xlarge (16 Trainium2 chips, 128 physical cores, 64 logical cores at LNC=2, one rank each).

    scripts/launch_trn2.sh qwen3_32b_trn2_eager
    torchrun --nproc_per_node 4 train.py qwen3_32b_trn2_eager --tiny       the same layout in seconds, on the CPU

To reproduce: 11,099 tokens/s, 23.89 % MFU of 632 TFLOP/s per chip, first step 184.6 s (third-party test of 23 October 2026 with
AWS's TorchTitan image, which names the model, 16 chips, LNC=2 and 64 logical cores). Inferred, not published: seq_len 4,096,
because the 217.68 GFLOP a token of that length give both published MFU figures to all digits; TP 4 x FSDP 16 with local batch
1, because 65,536 tokens a step give the published ratio of the first step to a later one. Selective checkpointing and bf16 are
those of AWS's Qwen3-8B configuration. Data and learning rate are ours: they change neither speed nor the wait.
"""

from recipes.base import Comm, Data, Model, Optimizer, Parallel, Recipe, Run, Training

RECIPE = Recipe(
    name="qwen3_32b_trn2_eager",
    description="Qwen3-32B on one trn2.48xlarge, eager: the work of a published run (not yet run on Trainium)",
    model=Model(family="qwen3", flavor="32B"),
    data=Data(source="hub", path="allenai/c4", subset="en", tokenizer="Qwen/Qwen3-32B"),
    optimizer=Optimizer(lr=1e-4, warmup_steps=20, schedule="cosine"),
    training=Training(
        steps=100,
        seq_len=4_096,
        local_batch_size=1,  # 16 data-parallel ranks x 1 x 4,096 = 65,536 tokens a step
        dtype="bfloat16",
    ),
    parallel=Parallel(ranks=64, tensor_parallel_degree=4, activation_checkpointing="selective"),
    comm=Comm(first_step_timeout_seconds=3_600.0),
    run=Run(device="neuron", chip="Trainium2", log_every=10),
)
