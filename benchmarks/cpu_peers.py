"""The same model and work in three loops on the CPU, taking turns: ours, transformers, TorchTitan's model.

    python -m benchmarks.cpu_peers                                  eager and compiled, fp32 and bf16
    python -m benchmarks.cpu_peers --modes eager --dtypes float32

Ours is `train.train`, the loop that `python train.py` runs, with its journal, windows and record; only its data is replaced by
the fixed tokens that all contenders read. The peers' models run in a plain loop: forward, cross entropy over all logits,
backward, clipping, fused AdamW. Each contender is a process of its own that waits while another one works, so that a slow
minute of the machine hits all of them alike; and all processes are started anew several times, because where a process's memory
lies is worth some per cent. TorchTitan takes part where `torchtitan==0.2.2` and `triton` are installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from types import SimpleNamespace

DIM, LAYERS, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB = 256, 8, 8, 4, 32, 768, 4_096
BATCH, SEQ_LEN = 4, 512
TOKENS = BATCH * SEQ_LEN
LR, MAX_GRAD_NORM = 3e-4, 1.0


class Gate:
    """Lets a worker run `steps` steps each time the conductor says so, and times them from inside."""

    def __init__(self, pipe: Connection):
        self.pipe, self.left, self.began = pipe, 0, 0.0

    def step(self) -> None:
        """Called at the start of every step."""
        if self.left == 0:
            self.pipe.send(time.perf_counter() - self.began)
            self.left = self.pipe.recv()
            if not self.left:
                os._exit(0)
            self.began = time.perf_counter()
        self.left -= 1


def tokens():
    """Return tokens and labels, [BATCH, SEQ_LEN] each, the same for everybody."""
    import torch

    drawn = torch.randint(0, VOCAB, (BATCH, SEQ_LEN + 1), generator=torch.Generator().manual_seed(0))
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def ours(gate: Gate, mode: str, dtype: str) -> None:
    """Run our own main job on the fixed tokens."""
    import train
    import training.data
    from backends import get_backend
    from recipes import command_line
    from training.packing import Batch
    from training.timeline import Timeline
    from training.world import World

    class FixedBatches:
        """Hands out the same batch at every step."""

        epoch = 0
        source = tokenizer = SimpleNamespace(fingerprint="seed 0")

        def __init__(self):
            inputs, labels = tokens()
            self.batch = Batch(inputs, labels, num_valid_tokens=TOKENS, num_valid_tokens_of_all_ranks=TOKENS)

        def __next__(self):
            gate.step()
            return self.batch

        def describe(self):
            return {"source": "fixed random tokens", "fingerprint": "seed 0"}

    training.data.build_data = lambda *_, **__: (FixedBatches(), None)
    debug = command_line.load("debug")
    recipe = replace(
        debug,
        optimizer=replace(debug.optimizer, lr=LR, schedule="constant", warmup_steps=0),
        training=replace(debug.training, steps=1_000_000, seq_len=SEQ_LEN, local_batch_size=BATCH, dtype=dtype),
        validation=replace(debug.validation, every_steps=0),
        run=replace(debug.run, mode=mode, output_dir=tempfile.mkdtemp(prefix="cpu_peers-"), log_every=10),
    )
    train.start(recipe, get_backend("cpu"), World(), Timeline(), [])


def plain_loop(gate: Gate, mode: str, dtype: str, model, blocks, logits: Callable) -> None:
    """Train a peer's model the plain way.

    Args:
        blocks: what is compiled one by one in compile mode.
        logits: model and tokens to [BATCH, SEQ_LEN, VOCAB].
    """
    import torch

    inputs, labels = tokens()
    if mode == "compile":
        for block in blocks:
            block.compile(dynamic=False, fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    while True:
        gate.step()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
            flat = logits(model, inputs).flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(flat.float(), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()


def transformers(gate: Gate, mode: str, dtype: str) -> None:
    """Train Qwen3ForCausalLM of transformers."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=DIM,
        intermediate_size=FFN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=4_096,
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation="sdpa",  # pyright: ignore[reportCallIssue] - taken from **kwargs
    )
    model = Qwen3ForCausalLM(config)
    plain_loop(gate, mode, dtype, model, model.model.layers, lambda model, inputs: model(input_ids=inputs).logits)


def torchtitan(gate: Gate, mode: str, dtype: str) -> None:
    """Train the Qwen3Model of TorchTitan 0.2.2."""
    import torch
    from torchtitan.models.qwen3.model.args import Qwen3ModelArgs  # pyright: ignore[reportMissingImports] - optional
    from torchtitan.models.qwen3.model.model import Qwen3Model  # pyright: ignore[reportMissingImports]

    arguments = Qwen3ModelArgs(
        dim=DIM,
        n_layers=LAYERS,
        n_heads=HEADS,
        n_kv_heads=KV_HEADS,
        vocab_size=VOCAB,
        head_dim=HEAD_DIM,
        hidden_dim=FFN,
        max_seq_len=4_096,
    )
    model = Qwen3Model(arguments)
    with torch.no_grad():
        model.init_weights()
    plain_loop(gate, mode, dtype, model, model.layers.values(), lambda model, inputs: model(inputs))


def contenders() -> dict[str, Callable]:
    """Return who takes part on this machine."""
    found = {"transformers": transformers}
    if importlib.util.find_spec("torchtitan") and importlib.util.find_spec("triton"):
        found["torchtitan"] = torchtitan
    return {"ours": ours, **found}


def worker(name: str, mode: str, dtype: str, pipe: Connection) -> None:
    """Run one contender with its own printing out of the way."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        contenders()[name](Gate(pipe), mode, dtype)


def race(mode: str, dtype: str, rounds: int, steps: int) -> dict[str, list[float]]:
    """Return the seconds per step of each contender in each round."""
    context = multiprocessing.get_context("spawn")
    pipes, processes, seconds = {}, [], {}
    for name in contenders():
        pipes[name], theirs = context.Pipe()
        processes.append(context.Process(target=worker, args=(name, mode, dtype, theirs), daemon=True))
        processes[-1].start()
        pipes[name].recv()  # it stands at its first step
        pipes[name].send(3)  # first step and warm-up, before the next contender starts
        pipes[name].recv()
        seconds[name] = []
        print(f"  {name} ready", file=sys.stderr, flush=True)
    for number in range(rounds):
        order = list(pipes) if number % 2 == 0 else list(reversed(pipes))
        for name in order:
            pipes[name].send(steps)
            seconds[name].append(pipes[name].recv() / steps)
    for name, process in zip(pipes, processes, strict=True):
        pipes[name].send(0)
        process.join()
    return seconds


def report(mode: str, dtype: str, seconds: dict[str, list[float]]) -> None:
    """Print tokens per second and the ratio of ours to each, round by round and then the median."""
    print(f"\n{mode}, {dtype}: tokens/s, median of {len(seconds['ours'])} rounds (slowest to fastest)")
    for name, times in seconds.items():
        rates = sorted(TOKENS / value for value in times)
        ratios = [theirs / mine for theirs, mine in zip(times, seconds["ours"], strict=True)]
        beside = (
            ""
            if name == "ours"
            else f"   ours is {statistics.median(ratios):.3f}x (rounds {min(ratios):.2f} to {max(ratios):.2f})"
        )
        print(f"  {name:<13}{statistics.median(rates):8,.0f}  ({rates[0]:,.0f} to {rates[-1]:,.0f}){beside}", flush=True)


def main() -> None:
    """Race in every mode and type asked for."""
    parser = argparse.ArgumentParser(description="ours, transformers and TorchTitan taking turns on the CPU")
    parser.add_argument("--modes", nargs="+", default=["eager", "compile"], choices=["eager", "compile"])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=3, help="times that all processes are started anew")
    parser.add_argument("--rounds", type=int, default=6, help="turns of each contender per start")
    parser.add_argument("--steps", type=int, default=2, help="steps of one contender before the next one's turn")
    options = parser.parse_args()
    import torch

    threads = torch.get_num_threads()
    print(f"python {platform.python_version()}, torch {torch.__version__}, {threads} threads, {platform.machine()}")
    for dtype in options.dtypes:
        for mode in options.modes:
            seconds: dict[str, list[float]] = {}
            for _ in range(options.repeats):
                for name, times in race(mode, dtype, options.rounds, options.steps).items():
                    seconds.setdefault(name, []).extend(times)
            report(mode, dtype, seconds)


if __name__ == "__main__":
    main()
