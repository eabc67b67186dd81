"""The vocabulary of a recipe: frozen dataclasses, data only.

A recipe file holds one ``RECIPE = Recipe(...)``. A variant is ``dataclasses.replace`` of another recipe and reads as the
hypothesis it tests. Nothing here imports torch, so that ``--help`` and ``--dry-run`` answer at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from tyro.conf import Fixed

from recipes.durability import Checkpoint, Health
from recipes.rules import broken_rules


class RecipeError(ValueError):
    """A recipe asks for something that cannot be honoured. The message says what, got, allowed and the fix."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """Which network is trained."""

    family: str = "qwen3"
    """Folder under models/."""
    flavor: str = "debug"
    """Row of the family's size table, for example debug, 0.6B or 32B."""
    tiny: bool = False
    """Keep the flavor's kind (tied or not) with a few small layers. `--tiny` sets it, to try a layout on a CPU."""
    num_layers: int | None = None
    """Number of transformer blocks. None: as the flavor says."""
    ffn_dim: int | None = None
    """Width of the feed-forward network. None: as the flavor says."""
    vocab_size: int | None = None
    """Rows of the embedding. None: as the flavor says."""
    initial_weights: str | None = None
    """A Hugging Face checkpoint (safetensors) to start from: a folder or a hub id. None: the model's own initialisation."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """Where the text comes from and how it becomes token ids."""

    source: Literal["stdlib", "files", "hub"] = "stdlib"
    """stdlib: the sources of Python's own standard library on this machine. files: local text, JSONL or Parquet. hub: a
    Hugging Face data set, streamed."""
    path: str | None = None
    """For files: a file, a folder or a glob (.txt, .jsonl, .parquet). For hub: the data set's name."""
    subset: str | None = None
    """For hub: the configuration name of the data set."""
    split: str = "train"
    """For hub: the split to read."""
    text_field: str = "text"
    """Column that holds the text, for JSONL, Parquet and hub."""
    tokenizer: str | None = None
    """A tokenizer.json, a folder that holds one, or a hub id. None: a byte-level BPE of 4,096 entries, trained once on the
    embedded text and cached."""
    isolate_documents: bool = False
    """True: packed documents do not attend to each other and no label crosses a boundary."""
    held_out_every: int = 50
    """Every n-th document is kept for validation and never trained on."""
    shuffle: bool = True
    """Read the documents of each epoch in an order of its own, drawn from the seed and the epoch. A hub stream is shuffled
    within a buffer of 1,024 documents."""


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """AdamW and its learning-rate schedule."""

    lr: float = 3e-4
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the two moment estimates."""
    eps: float = 1e-8
    """Term added to the denominator."""
    weight_decay: float = 0.1
    """Decoupled weight decay, on matrices only (not on norm weights)."""
    implementation: Literal["auto", "fused", "foreach", "loop"] = "auto"
    """auto: the fastest that the backend declares; the record says which one it was."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """Shape after the warm-up. wsd: warm-up, stable, decay."""
    warmup_steps: int = 10
    """Steps of linear warm-up."""
    decay_fraction: float = 0.2
    """For wsd: the last share of the run that decays linearly."""
    min_lr_ratio: float = 0.1
    """Final learning rate as a share of the peak."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """The work: how many tokens, in which batches, in which precision."""

    steps: int = 100
    """Optimizer steps."""
    seq_len: int = 256
    """Tokens per sample."""
    local_batch_size: int = 4
    """Samples per forward pass on one data-parallel rank."""
    global_batch_size: int | None = None
    """Samples per optimizer step over all ranks; more than local_batch_size x data-parallel ranks accumulates
    gradients. None: no accumulation."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """float32: everything. bfloat16: mixed precision, fp32 parameters and reductions with bf16 matrix products."""
    max_grad_norm: float = 1.0
    """Gradients are scaled so that their global L2 norm is at most this. 0 turns clipping off."""


@dataclass(frozen=True, kw_only=True)
class Validation:
    """Held-out loss while training."""

    every_steps: int = 0
    """Validate after every n-th step. 0: never."""
    num_batches: int = 8
    """Batches per round: exactly this many are read and weighted by their tokens."""


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """How the model is laid out over the ranks: the product of the three degrees is their number."""

    ranks: int = 1
    """Ranks that the recipe is made for: what `--dry-run` is checked against. A launch with another number is held against the
    rules with its own."""
    tensor_parallel_degree: int = 1
    """Ranks that share each matrix. Between blocks the sequence is split over them (sequence parallel), and each computes the
    loss over its part of the vocabulary (loss parallel)."""
    data_parallel_shard_degree: int | None = None
    """Ranks that parameters, gradients and optimizer state are split over. None: all that remain."""
    data_parallel_replicate_degree: int = 1
    """Copies of the sharded model; gradients are averaged over them (HSDP)."""
    data_parallel_wrapper: Literal["fsdp2", "simple_fsdp", "ddp"] = "fsdp2"
    """fsdp2: torch's fully_shard, which gathers weights outside of compiled graphs. simple_fsdp: weights are gathered where
    they are read, so that a compiled graph holds the collectives. ddp: every rank holds the whole model."""
    reshard_after_forward: bool = True
    """Free a block's gathered weights after its forward pass and gather them again for its backward pass. False: keep them."""
    prefetch_blocks: int = 0
    """With fsdp2: blocks whose weights are gathered ahead of the one that computes. 0: torch's own order."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """full: keep only each block's input and recompute the rest in the backward pass. selective: keep attention, collectives
    and every second matrix product as well."""


@dataclass(frozen=True, kw_only=True)
class Comm:
    """How long ranks wait for each other, in seconds."""

    first_step_timeout_seconds: float = 1800.0
    """Longest first step, compilation included, before the run ends and names the rank that is waited for."""
    step_timeout_seconds: float = 300.0
    """The same for every later step."""
    heartbeat_seconds: float = 15.0
    """While the first step lasts, a line says this often how long it has taken and what the slowest rank is doing."""


@dataclass(frozen=True, kw_only=True)
class Compile:
    """What torch.compile gets when run.mode is compile. Shapes are always static (dynamic=False)."""

    region: Literal["block", "model"] = "block"
    """block: each transformer block by itself, so that identical blocks share one graph. model: the whole forward pass."""
    backend: str | None = None
    """Compile backend. None: the device's own (inductor on cpu and cuda, neuron on neuron)."""
    fullgraph: bool = True
    """Refuse graph breaks."""
    require_cached: bool = False
    """End the run after its first step if anything had to be compiled that should have been in the compile cache."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Where and how it runs, and what is watched."""

    device: Literal["cpu", "cuda", "neuron"] = "cpu"
    """The device, by name. Nothing is detected behind your back."""
    mode: Literal["eager", "compile"] = "eager"
    """eager, or torch.compile as described under compile."""
    seed: int = 0
    """Seed of initialisation and data order."""
    deterministic: bool = False
    """Only deterministic kernels. Such a run is marked and its speed is not quoted."""
    log_every: int = 5
    """Optimizer steps in one measured window. The device is synchronised only at window edges."""
    output_dir: str = "runs"
    """Folder that receives one folder per run."""
    tensorboard: bool = True
    """Write TensorBoard scalars into the run folder."""
    tracker: Literal["none", "mlflow", "wandb"] = "none"
    """Tell MLflow or Weights & Biases as well. Where they are and who asks, their own variables and files say."""
    tracker_project: str = "firststep"
    """MLflow's experiment, or the project of Weights & Biases."""
    profile: Literal["none", "first", "steady"] = "none"
    """Write a torch.profiler trace of the first step, or of the first three steps after step 2."""
    budget_minutes: float | None = None
    """Wall-clock minutes from process start, after which the run has saved and stopped. None: no limit."""
    stop_file: str | None = None
    """Stop as after SIGTERM once this file is there; see docs/durability.md for spot notices."""
    chip: str | None = None
    """Accelerator name for the peak table, for example Trainium2. None: as the backend reports it; unknown stays unknown."""
    price_per_hour: float | None = None
    """Price of the machine in US dollars per hour. None: no cost is recorded."""
    price_source: str | None = None
    """Where the price comes from, with its date."""


@dataclass(frozen=True, kw_only=True)
class Published:
    """What somebody else measured with the same work."""

    tokens_per_second: float
    """Of all ranks together."""
    mfu: float
    """Share of the peak, between 0 and 1."""
    first_step_seconds: float
    source: str
    """Who measured it, when and on what, and which of the work is inferred rather than published."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One training run, complete."""

    name: Fixed[str]
    """Name of the recipe: its file name, and part of the run's folder name."""
    description: Fixed[str] = ""
    """One sentence: what this recipe is for."""
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    optimizer: Optimizer = field(default_factory=Optimizer)
    training: Training = field(default_factory=Training)
    validation: Validation = field(default_factory=Validation)
    parallel: Parallel = field(default_factory=Parallel)
    comm: Comm = field(default_factory=Comm)
    compile: Compile = field(default_factory=Compile)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    health: Health = field(default_factory=Health)
    run: Run = field(default_factory=Run)
    published: Fixed[Published | None] = None
    """Figures to reproduce. None: nobody has published any."""

    def data_parallel_size(self, world_size: int = 1) -> int:
        """Ranks that read different samples: all, divided by those that share each matrix."""
        return world_size // self.parallel.tensor_parallel_degree

    def shard_degree(self, world_size: int = 1) -> int:
        """Ranks that each parameter is split over by the data-parallel wrapper."""
        parallel = self.parallel
        if parallel.data_parallel_wrapper == "ddp":
            return 1
        return parallel.data_parallel_shard_degree or (
            self.data_parallel_size(world_size) // parallel.data_parallel_replicate_degree
        )

    def global_batch_size(self, world_size: int = 1) -> int:
        """Samples per optimizer step over all ranks."""
        return self.training.global_batch_size or self.training.local_batch_size * self.data_parallel_size(world_size)

    def accumulation_steps(self, world_size: int = 1) -> int:
        """Forward passes per optimizer step on one rank."""
        return self.global_batch_size(world_size) // (self.training.local_batch_size * self.data_parallel_size(world_size))

    def tokens_per_step(self, world_size: int = 1) -> int:
        """Tokens of one optimizer step over all ranks, padding included."""
        return self.global_batch_size(world_size) * self.training.seq_len

    def tiny(self) -> Recipe:
        """Return the recipe's twin for CPU ranks: the same layout and code path with few small layers, without the network."""
        accumulated = None if self.training.global_batch_size is None else 8
        return replace(
            self,
            published=None,
            model=replace(self.model, tiny=True, initial_weights=None),
            data=Data(isolate_documents=self.data.isolate_documents),
            optimizer=replace(self.optimizer, lr=1e-3, warmup_steps=2),
            training=replace(self.training, steps=10, seq_len=64, local_batch_size=1, global_batch_size=accumulated),
            parallel=replace(self.parallel, ranks=self.parallel.tensor_parallel_degree),
            validation=replace(self.validation, every_steps=min(self.validation.every_steps, 5), num_batches=2),
            run=replace(self.run, device="cpu", chip=None, log_every=1, price_per_hour=None, price_source=None),
        )

    def check(self, world_size: int = 1) -> None:
        """Hold the recipe against every rule that needs no model, data or device.

        Raises:
            RecipeError: naming, for each broken rule, what was got, what is allowed and the fix.
        """
        problems = broken_rules(self, world_size)
        if problems:
            raise RecipeError("; ".join(problems))
