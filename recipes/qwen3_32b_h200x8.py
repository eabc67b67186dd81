"""The work of qwen3_32b_trn2_compiled on one host with eight GPUs of 141 GB: the same tokens a step, for a comparison.

Hardware: 8 x H200 (141 GB each). Not yet run. FSDP alone is enough here: fp32 weights, gradients and AdamW state are 16 bytes a
parameter, 65.5 GB for each of eight ranks.

    torchrun --nproc_per_node 8 train.py qwen3_32b_h200x8
    torchrun --nproc_per_node 2 train.py qwen3_32b_h200x8 --tiny           the same path in seconds, on the CPU
"""

from dataclasses import replace

from recipes.base import Comm, Parallel
from recipes.qwen3_32b_trn2_compiled import RECIPE as TRN2

RECIPE = replace(
    TRN2,
    name="qwen3_32b_h200x8",
    description="Qwen3-32B on 8 x H200, compiled: the same work as on the trn2.48xlarge (not yet run)",
    training=replace(TRN2.training, global_batch_size=16),  # 8 ranks x 2 forward passes x 4,096 = 65,536 tokens a step
    parallel=Parallel(ranks=8, activation_checkpointing="selective"),
    comm=Comm(),
    run=replace(TRN2.run, device="cuda", chip=None),
    published=None,
)
