"""Trains a small GPT and writes its checkpoints: the really trained weights that the `runs` section measures.

    .peers/venv-runs/bin/python benches/peers/train.py --out .peers/runs

Byte-level text (the Python sources of the pinned torch package, which lie wherever this runs), AdamW with fp32 state,
bf16 autocast, the rate warmed up, lowered along a cosine and held at `--late-rate` while steps are saved.

    OUT/main/step-N/state.safetensors   model.*, exp_avg.*, exp_avg_sq.* in fp32, and the 0-d `step`
    OUT/main/step-N/model.safetensors   the weights as torch rounds them to bf16, names without `model.`
    OUT/lora/step-N/state.safetensors   model.* frozen, lora.* and its AdamW state, `step`

`main` saves SERIES steps SPACING apart, and 1 to 10 steps after the first of them; `lora` goes on from its last.
What a step does follows from the state, the seed and the step's number: a run that was stopped goes on from its last
checkpoint and gives the bytes that it would have given (on the same processor and torch); what is there is left alone.
"""

import argparse
import itertools
import json
import math
import shutil
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional

VOCABULARY = 256
TEXT_BYTES = 24 << 20
BETAS, DECAY, CLIP = (0.9, 0.999), 0.1, 1.0
AFTER_FIRST = range(1, 11)
WARM_CHECKPOINT_EVERY = 100


def settings():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6, help="10.8 M parameters by default; 512 x 8 are 25.4 M")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--warm", type=int, default=1500, help="steps before the first that is kept")
    parser.add_argument("--series", type=int, default=50, help="steps kept of `main`")
    parser.add_argument("--spacing", type=int, default=20, help="steps between them")
    parser.add_argument("--rate", type=float, default=1e-3, help="the highest")
    parser.add_argument("--late-rate", type=float, default=3e-5, help="while steps are kept")
    parser.add_argument("--lora-series", type=int, default=9)
    parser.add_argument("--lora-rank", type=int, default=8)
    parser.add_argument("--lora-rate", type=float, default=2e-4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1, help="sums depend on it, and with them the bytes")
    return parser.parse_args()


def note(text):
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


class Linear(nn.Linear):
    """Without a bias; with an adapter beside it once `adapt` was called."""

    def __init__(self, fan_in, fan_out):
        super().__init__(fan_in, fan_out, bias=False)
        self.lora_a = self.lora_b = None

    def adapt(self, rank):
        self.lora_a = nn.Parameter(torch.randn(rank, self.in_features) / math.sqrt(self.in_features))
        self.lora_b = nn.Parameter(torch.zeros(self.out_features, rank))

    def forward(self, x):
        y = super().forward(x)
        return y if self.lora_a is None else y + 2.0 * (x @ self.lora_a.T @ self.lora_b.T)


class Block(nn.Module):
    def __init__(self, width, head=64):
        super().__init__()
        self.heads = width // head
        self.ln_1, self.ln_2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.attn = nn.ModuleDict({"qkv": Linear(width, 3 * width), "proj": Linear(width, width)})
        self.mlp = nn.ModuleDict({"up": Linear(width, 4 * width), "down": Linear(4 * width, width)})

    def forward(self, x):
        batch, length, width = x.shape
        qkv = self.attn["qkv"](self.ln_1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.attn["proj"](mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp["down"](functional.gelu(self.mlp["up"](self.ln_2(x))))


class Gpt(nn.Module):
    """GPT-2 without biases; the head is the token embedding."""

    def __init__(self, width, layers, context):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, width), nn.Embedding(context, width)
        self.h = nn.ModuleList(Block(width) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width, bias=False)
        for name, tensor in self.named_parameters():
            if tensor.dim() == 2:
                narrow = name.endswith(("proj.weight", "down.weight"))
                nn.init.normal_(tensor, std=0.02 / math.sqrt(2 * layers) if narrow else 0.02)

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.h:
            x = block(x)
        return self.ln_f(x) @ self.wte.weight.T


def corpus():
    """The text, as bytes: the sources of the torch package in the order of their paths."""
    root, text = Path(torch.__file__).parent, bytearray()
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        text += path.read_bytes()
        if len(text) >= TEXT_BYTES:
            return torch.frombuffer(text[:TEXT_BYTES], dtype=torch.uint8)
    raise SystemExit(f"{root}: fewer than {TEXT_BYTES} bytes of Python sources")


class Training:
    """A model, the parameters that are trained, their AdamW, and the number of the last step done."""

    def __init__(self, options, text):
        torch.manual_seed(options.seed)
        self.options, self.text, self.loss = options, text, math.nan
        self.step = self.began = 0  # the last step done, and the one after which what is trained now began
        self.model = Gpt(options.width, options.layers, options.context)
        self.optimize({f"model.{name}": tensor for name, tensor in self.model.named_parameters()})
        self.rate = self.scheduled

    def optimize(self, tensors):
        """Names the tensors that are trained from here on, under the names they are saved by."""
        self.trained = tensors
        matrices = [tensor for tensor in tensors.values() if tensor.dim() > 1]
        vectors = [tensor for tensor in tensors.values() if tensor.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, betas=BETAS)

    def adapt(self):
        """Freezes the model and trains adapters beside its matrices."""
        options = self.options
        torch.manual_seed(options.seed + 1)
        self.model.requires_grad_(False)
        for module in self.model.modules():
            if isinstance(module, Linear):
                module.adapt(options.lora_rank)
        adapters = {name: tensor for name, tensor in self.model.named_parameters() if "lora_" in name}
        self.optimize({f"lora.{name}": tensor for name, tensor in adapters.items()})
        self.began = self.step
        self.rate = lambda step: options.lora_rate

    def size(self):
        """Parameters that are trained."""
        return sum(tensor.numel() for tensor in self.trained.values())

    def scheduled(self, step):
        """Up for a tenth of the warm steps, down along a cosine until they are over, then level."""
        options = self.options
        up = max(1, options.warm // 10)
        if step <= up:
            return options.rate * step / up
        over = min(1.0, (step - up) / max(1, options.warm - up))
        return options.late_rate + (options.rate - options.late_rate) * 0.5 * (1 + math.cos(math.pi * over))

    def one_step(self):
        self.step += 1
        options = self.options
        draw = torch.Generator().manual_seed(options.seed * 1_000_003 + self.step)
        starts = torch.randint(len(self.text) - options.context - 1, (options.batch,), generator=draw)
        rows = torch.stack([self.text[at : at + options.context + 1] for at in starts.tolist()]).long()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = self.model(rows[:, :-1])
        loss = functional.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.trained.values(), CLIP)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(self.step)
        self.optimizer.step()
        self.loss = loss.item()

    def state(self):
        """Everything that training goes on from, in fp32; the model whole even where it is frozen."""
        whole = {f"model.{name}": tensor for name, tensor in self.model.named_parameters() if "lora_" not in name}
        tensors = {name: tensor.detach() for name, tensor in {**whole, **self.trained}.items()}
        for name, tensor in self.trained.items():
            kept = self.optimizer.state[tensor]
            for moment in ("exp_avg", "exp_avg_sq"):
                tensors[f"{moment}.{name.removeprefix('model.')}"] = kept[moment]
        return tensors | {"step": torch.tensor(self.step, dtype=torch.int64)}

    def weights(self):
        """The export: the fp32 masters as torch rounds them to bf16."""
        return {name: tensor.detach().bfloat16() for name, tensor in self.model.named_parameters()}

    def resume(self, path):
        """Takes up a state that `state` gave."""
        tensors = load_file(path)
        self.step = int(tensors["step"])
        with torch.no_grad():
            for name, tensor in self.model.named_parameters():
                saved = tensors.get(f"model.{name}", tensors.get(f"lora.{name}"))
                tensor.copy_(saved)
        for name, tensor in self.trained.items():
            moments = {m: tensors[f"{m}.{name.removeprefix('model.')}"].clone() for m in ("exp_avg", "exp_avg_sq")}
            self.optimizer.state[tensor] = {"step": torch.tensor(float(self.step - self.began)), **moments}


def step_folder(run, step):
    return run / f"step-{step:06}"


def last_kept(run, steps):
    """The last of these steps that is there with every step before it, or None."""
    there = list(itertools.takewhile(lambda step: step_folder(run, step).exists(), sorted(steps)))
    return there[-1] if there else None


def keep(training, run, export):
    """Writes one checkpoint: the folder appears whole or not at all."""
    folder = step_folder(run, training.step)
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    save_file(training.state(), part / "state.safetensors", metadata={"format": "pt"})
    if export:
        save_file(training.weights(), part / "model.safetensors", metadata={"format": "pt"})
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)
    size = sum(path.stat().st_size for path in folder.iterdir())
    note(f"{run.name} {folder.name}: loss {training.loss:.3f}, {size / 1e6:.0f} MB")


def go_on(training, run, steps, export=True):
    """Trains through `steps` and keeps each of them."""
    began, at = time.monotonic(), training.step
    for step in sorted(step for step in steps if step > training.step):
        while training.step < step:
            training.one_step()
            if training.step < training.options.warm and training.step % WARM_CHECKPOINT_EVERY == 0:
                each = (time.monotonic() - began) / (training.step - at)
                note(f"{run.name} {training.step}: loss {training.loss:.3f}, {each:.2f} s a step")
                save_file(training.state(), run / "warm.part")
                (run / "warm.part").rename(run / "warm.safetensors")
        keep(training, run, export)
    (run / "warm.safetensors").unlink(missing_ok=True)


def main_run(options, text):
    """The run itself: key step, 1 to 10, 20, 40 after it, and on to the end of the series."""
    run, first = options.out / "main", options.warm
    steps = {first + at * options.spacing for at in range(options.series)} | {first + after for after in AFTER_FIRST}
    run.mkdir(parents=True, exist_ok=True)
    training, there = Training(options, text), last_kept(run, steps)
    if there is not None:
        training.resume(step_folder(run, there) / "state.safetensors")
    elif (run / "warm.safetensors").exists():
        training.resume(run / "warm.safetensors")
    note(f"main: {training.size() / 1e6:.1f} M parameters, from step {training.step}")
    go_on(training, run, steps)
    return training


def lora_run(options, training):
    """Adapters beside the frozen model that `main` ended with."""
    run = options.out / "lora"
    steps = {training.step + (at + 1) * options.spacing for at in range(options.lora_series)}
    run.mkdir(parents=True, exist_ok=True)
    training.adapt()
    there = last_kept(run, steps)
    if there is not None:
        training.resume(step_folder(run, there) / "state.safetensors")
    note(f"lora: {training.size() / 1e6:.2f} M parameters, from step {training.step}")
    go_on(training, run, steps, export=False)


def main():
    options = settings()
    told = {name: value for name, value in sorted(vars(options).items()) if name != "out"} | {"torch": torch.__version__}
    made = options.out / "made.json"
    if made.exists() and json.loads(made.read_text()) != told:
        raise SystemExit(f"{made}: other settings made what is there; remove {options.out}, or name another --out")
    options.out.mkdir(parents=True, exist_ok=True)
    made.write_text(json.dumps(told, indent=1) + "\n")
    torch.set_num_threads(options.threads)
    torch.use_deterministic_algorithms(True)
    lora_run(options, main_run(options, corpus()))


if __name__ == "__main__":
    main()
