"""Qwen3-0.6B from scratch, the smallest published size: for one machine, with the ranks that it has.

Hardware: any one host: one GPU or more, one trn2.3xlarge (1 chip, 4 logical cores at LNC=2), or a patient CPU.

    python train.py qwen3_0_6b --run.device cuda                          one GPU
    torchrun --nproc_per_node 8 train.py qwen3_0_6b --run.device cuda     eight
    INSTANCE=trn2.3xlarge scripts/launch_trn2.sh qwen3_0_6b               not yet run on Trainium
    python train.py qwen3_0_6b --tiny                                     the same path in seconds, on the CPU

Numbers: batch, sequence and learning rate are a starting point of ours, not a published run's.
"""

from recipes.base import Data, Model, Optimizer, Parallel, Recipe, Run, Training

RECIPE = Recipe(
    name="qwen3_0_6b",
    description="Qwen3-0.6B from scratch on the ranks of one host",
    model=Model(family="qwen3", flavor="0.6B"),
    data=Data(source="hub", path="allenai/c4", subset="en", tokenizer="Qwen/Qwen3-0.6B"),
    optimizer=Optimizer(lr=3e-4, warmup_steps=100, schedule="cosine"),
    training=Training(
        steps=1_000,
        seq_len=4_096,
        local_batch_size=1,
        global_batch_size=64,  # 64 x 4,096 = 262,144 tokens a step on 1, 2, 4, ... 64 ranks
        dtype="bfloat16",
    ),
    parallel=Parallel(ranks=4, activation_checkpointing="selective"),
    run=Run(device="neuron", log_every=10),
)
