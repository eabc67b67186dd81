"""The hypothesis: compiled by block, Qwen3-32B is 1.28 times as fast as eager, and ahead from the 57th step on.

Hardware, work and inference as in qwen3_32b_trn2_eager. Not yet run on Trainium.

    scripts/launch_trn2.sh qwen3_32b_trn2_compiled
    torchrun --nproc_per_node 4 train.py qwen3_32b_trn2_compiled --tiny    the same layout in seconds, on the CPU

To reproduce: 14,156 tokens/s, 30.47 % MFU of 632 TFLOP/s per chip, first step 255.7 s. How the published run gathered its
weights is not known. AWS advised simple_fsdp for compiled runs (SDK 2.33), while its later tutorial compiles with FSDP2 (SDK
2.34): `--parallel.data_parallel_wrapper simple_fsdp` is the other choice.
"""

from dataclasses import replace

from recipes.qwen3_32b_trn2_eager import PUBLISHED
from recipes.qwen3_32b_trn2_eager import RECIPE as EAGER

RECIPE = replace(
    EAGER,
    name="qwen3_32b_trn2_compiled",
    description="Qwen3-32B on one trn2.48xlarge, compiled: the work of a published run (not yet run on Trainium)",
    run=replace(EAGER.run, mode="compile"),
    published=replace(PUBLISHED, tokens_per_second=14_156, mfu=0.3047, first_step_seconds=255.7),
)
