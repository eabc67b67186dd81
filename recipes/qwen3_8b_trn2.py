"""Qwen3-8B on one trn2.48xlarge: 16 chips, 64 logical cores at LNC=2, TP 4 x FSDP 16. Not yet run on Trainium.

Hardware: trn2.48xlarge (16 Trainium2 chips, 128 physical cores, 64 logical cores at LNC=2, one rank each). The four ranks that
share each matrix are the four logical cores of one chip.

    scripts/launch_trn2.sh qwen3_8b_trn2
    torchrun --nproc_per_node 4 train.py qwen3_8b_trn2 --tiny       the same layout in seconds, on the CPU

Numbers: layout, sequence, batch, learning rate and selective checkpointing are those of the Qwen3-8B configuration that AWS
ships for TorchTitan (qwen3_8b_tp4_fsdp16_sac; its tutorial, and a pre-release copy of 2026-04 for batch and learning rate).
https://awsdocs-neuron.readthedocs-hosted.com/en/latest/training/torchtitan/tutorials/tutorial-basic-training.html
"""

from recipes.base import Comm, Data, Model, Optimizer, Parallel, Recipe, Run, Training

RECIPE = Recipe(
    name="qwen3_8b_trn2",
    description="Qwen3-8B on one trn2.48xlarge, TP 4 x FSDP 16, eager (not yet run on Trainium)",
    model=Model(family="qwen3", flavor="8B"),
    data=Data(source="hub", path="allenai/c4", subset="en", tokenizer="Qwen/Qwen3-8B"),
    optimizer=Optimizer(lr=3e-4, warmup_steps=20, schedule="cosine"),
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
