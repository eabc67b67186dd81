"""A 8.4M-parameter Qwen3 on the standard library's own text: the whole path in under a minute on a laptop CPU.

python train.py debug
python train.py debug --run.mode compile
"""

from recipes.base import Data, Model, Optimizer, Recipe, Run, Training, Validation

RECIPE = Recipe(
    name="debug",
    description="a 8.4M-parameter Qwen3 on Python's standard library, for the CPU",
    model=Model(family="qwen3", flavor="debug"),
    data=Data(source="stdlib"),
    optimizer=Optimizer(lr=1e-3, warmup_steps=10, schedule="cosine"),
    training=Training(
        steps=100,
        seq_len=256,
        local_batch_size=4,  # 4 x 256 = 1,024 tokens a step
    ),
    validation=Validation(every_steps=50, num_batches=4),
    run=Run(device="cpu", log_every=5),
)
