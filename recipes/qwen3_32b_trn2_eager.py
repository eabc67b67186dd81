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

from dataclasses import replace

from recipes.base import Model, Published
from recipes.qwen3_8b_trn2 import RECIPE as EIGHT_B

PUBLISHED = Published(
    tokens_per_second=11_099,
    mfu=0.2389,
    first_step_seconds=184.6,
    source="third-party test, 23 October 2026, 16 Trainium2 chips, LNC=2; seq_len, layout and batch are inferred",
)

RECIPE = replace(
    EIGHT_B,
    name="qwen3_32b_trn2_eager",
    description="Qwen3-32B on one trn2.48xlarge, eager: the work of a published run (not yet run on Trainium)",
    model=Model(family="qwen3", flavor="32B"),
    data=replace(EIGHT_B.data, tokenizer="Qwen/Qwen3-32B"),
    optimizer=replace(EIGHT_B.optimizer, lr=1e-4),
    published=PUBLISHED,
)
