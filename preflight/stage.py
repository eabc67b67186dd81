"""One rank of a recipe's whole mesh, without a device and without its numbers.

The model is built, laid out and stepped by the code that trains it, on fake tensors (shapes and types, no storage) in a fake
process group (collectives return at once). So whatever a step needs, computes, sends and compiles can be read off on any
machine, for the real size and the real number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.distributed.fake_pg import FakeStore

from backends import get_backend
from models import load_family, model_config
from recipes.base import Recipe
from training.data_parallel import multiply_dtype, sharding
from training.distributed import Ranks
from training.gradients import clip_grad_norm_
from training.optimizer import build_optimizer
from training.world import World

Attention = Literal["fused", "math"]
"""fused: the flash kernel of torch's CPU build, which stands for any. math: products and a softmax that keep every score."""


_FIRST_DDP_BUCKET_BYTES, _DDP_BUCKET_BYTES = 2**20, 25 * 2**20
"""Defaults of DistributedDataParallel."""


@contextmanager
def rehearsed_ranks(recipe: Recipe, world_size: int, rank: int = 0) -> Iterator[Ranks]:
    """Be one rank of many, of which the others do not exist. Nothing else may have a process group in this process."""
    ranks = Ranks(recipe, World(rank, world_size, rank, world_size))
    if world_size > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        ranks.arrange(get_backend("cpu"))
        yield ranks
    finally:
        if world_size > 1:
            dist.destroy_process_group()


class Stage:
    """A recipe's model, laid out as its ranks would, and its optimizer, which has its state: that of a steady step.

    Made by `staged`; everything here runs on fake tensors.
    """

    def __init__(self, recipe: Recipe, ranks: Ranks, fake: FakeTensorMode, compile_keywords: dict[str, Any] | None):
        self.recipe, self.ranks = recipe, ranks
        family, parallel = load_family(recipe.model.family), recipe.parallel
        config = model_config(recipe.model, recipe.training.seq_len, parallel.tensor_parallel_degree)
        # On meta and outside of the mode: a device mesh has a real tensor of ranks, which the mode would refuse.
        with torch.device("meta"):
            self.model = family.Model(config)
        shard = sharding(recipe, ranks)
        family.parallelize(
            self.model,
            tensor_mesh=ranks.axis("tp"),
            activation_checkpointing=parallel.activation_checkpointing,
            compile_region=recipe.compile.region if compile_keywords else None,
            compile_kwargs=compile_keywords,
            shard=shard,
        )
        self._autocast_dtype = None if shard else multiply_dtype(recipe)
        self._compiles = compile_keywords is not None
        with fake:
            fake.allow_non_fake_inputs = True  # materialising turns meta tensors into fake ones
            self.model.materialise(torch.device("cpu"))
            fake.allow_non_fake_inputs = False
            self._copied = ranks.data > 1 and parallel.data_parallel_wrapper == "ddp"
            implementations = get_backend(recipe.run.device).adamw
            self.optimizer, _ = build_optimizer(self.model, recipe.optimizer, implementations)
            for parameter in self.model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def batch(self, seq_len: int | None = None) -> list[Tensor | None]:
        """Return tokens, positions, documents and labels, each [B, T] or absent."""
        shape = (self.recipe.training.local_batch_size, seq_len or self.recipe.training.seq_len)
        apart = self.recipe.data.isolate_documents
        return [torch.zeros(shape, dtype=torch.int64) if there else None for there in (True, apart, apart, True)]

    def forward(self, batch: list[Tensor | None]) -> Tensor:
        """Return the loss of one micro-batch as the loop scales it."""
        with get_backend("cpu").autocast(self._autocast_dtype):
            return self.model(*batch) / 2

    def backward(self, loss: Tensor) -> None:
        """Add one micro-batch's gradients."""
        (loss * self.ranks.data).backward()
        if self._copied:
            self._average()

    def _average(self) -> None:
        """Send what DistributedDataParallel would, which needs real tensors: gradients in flat buckets, the last ones first."""
        limit, size = _FIRST_DDP_BUCKET_BYTES, 0
        for parameter in reversed(list(self.model.parameters())):
            size += parameter.numel() * parameter.element_size()
            if size >= limit:
                dist.all_reduce(torch.empty(size // parameter.element_size(), dtype=parameter.dtype))
                limit, size = _DDP_BUCKET_BYTES, 0
        if size:
            dist.all_reduce(torch.empty(size // 4))

    def clip(self) -> None:
        """Clip the gradients."""
        clip_grad_norm_(self.model.parameters(), self.recipe.training.max_grad_norm or math.inf)

    def update(self) -> None:
        """Let the optimizer step."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def validate(self) -> None:
        """Run one validation batch."""
        with torch.set_grad_enabled(self._compiles):
            self.forward(self.batch())


@contextmanager
def staged(
    recipe: Recipe, ranks: Ranks, *, compile_keywords: dict[str, Any] | None = None, attention: Attention = "fused"
) -> Iterator[Stage]:
    """Set up a recipe's step on fake tensors, and the modes in which it runs.

    Args:
        compile_keywords: keywords of torch.compile. None: eager, whatever the recipe's mode.
    """
    fake = FakeTensorMode()
    stage = Stage(recipe, ranks, fake, compile_keywords)
    with fake, ranks.contexts(), ExitStack() as kernels:
        if attention == "math":
            kernels.enter_context(sdpa_kernel(SDPBackend.MATH))
        yield stage
