"""Fine-tunes a small network on handwritten digits and saves its state every few steps.

A frozen base (fixed random features, as a pretrained model's frozen layers are) feeds a trainable head: AdamW, written
out, in fp32. Everything that a step does follows from the state and the step's number, so training that is resumed from
a saved state gives the very losses that it would have given without the interruption.
"""

import argparse
import json
import os
import signal
import subprocess
import time
from pathlib import Path

# One thread: sums are added in one order, whatever the machine.
for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"

import numpy as np  # noqa: E402  (reads the variables above)
from safetensors import safe_open  # noqa: E402
from safetensors.numpy import load_file, save_file  # noqa: E402
from sklearn.datasets import load_digits  # noqa: E402

BASE = (64, 2048, 1024)  # frozen: pixels -> random features
HEAD = (1024, 1536, 1024, 10)  # trained
BATCH, RATE, DECAY, BETA1, BETA2, EPSILON = 128, 1e-4, 0.01, 0.9, 0.999, 1e-8


def layers(widths, rng, prefix):
    """Weights and biases between `widths`, as He initialisation draws them."""
    tensors = {}
    for at, (fan_in, fan_out) in enumerate(zip(widths, widths[1:])):
        scale = np.float32(np.sqrt(2.0 / fan_in))
        tensors[f"{prefix}.{at}.weight"] = rng.standard_normal((fan_in, fan_out), dtype=np.float32) * scale
        tensors[f"{prefix}.{at}.bias"] = np.zeros(fan_out, dtype=np.float32)
    return tensors


def forward(tensors, prefix, depth, x, last_relu):
    """The activations before each layer, and the output."""
    inputs = []
    for at in range(depth):
        inputs.append(x)
        x = x @ tensors[f"{prefix}.{at}.weight"] + tensors[f"{prefix}.{at}.bias"]
        if at + 1 < depth or last_relu:
            x = np.maximum(x, np.float32(0))
    return inputs, x


def gradients(head, x, labels):
    """The mean cross-entropy of a batch, and its gradient by each tensor of the head."""
    depth = len(HEAD) - 1
    inputs, logits = forward(head, "head", depth, x, last_relu=False)
    logits = logits - logits.max(axis=1, keepdims=True)
    log_sum = np.log(np.exp(logits).sum(axis=1, keepdims=True))
    rows = np.arange(len(labels))
    loss = float((log_sum[:, 0] - logits[rows, labels]).mean())
    delta = np.exp(logits - log_sum)
    delta[rows, labels] -= np.float32(1)
    delta /= np.float32(len(labels))
    grads = {}
    for at in reversed(range(depth)):
        grads[f"head.{at}.weight"] = inputs[at].T @ delta
        grads[f"head.{at}.bias"] = delta.sum(axis=0)
        if at:
            delta = (delta @ head[f"head.{at}.weight"].T) * (inputs[at] > 0)
    return loss, grads


def adamw(head, first, second, grads, step):
    """One AdamW step, in place."""
    correct1, correct2 = np.float32(1 - BETA1**step), np.float32(1 - BETA2**step)
    for name, grad in grads.items():
        first[name] *= np.float32(BETA1)
        first[name] += np.float32(1 - BETA1) * grad
        second[name] *= np.float32(BETA2)
        second[name] += np.float32(1 - BETA2) * grad * grad
        update = (first[name] / correct1) / (np.sqrt(second[name] / correct2) + np.float32(EPSILON))
        head[name] -= np.float32(RATE) * (update + np.float32(DECAY) * head[name])


def fresh_state():
    """Step 0: base, head, and the optimizer's two moments."""
    rng = np.random.default_rng(20)
    base, head = layers(BASE, rng, "base"), layers(HEAD, rng, "head")
    zeros = {name: np.zeros_like(tensor) for name, tensor in head.items()}
    return 0, base, head, zeros, {name: tensor.copy() for name, tensor in zeros.items()}


def load_state(folder):
    """What `save_state` wrote."""
    model, optimizer = load_file(folder / "model.safetensors"), load_file(folder / "optimizer.safetensors")
    with safe_open(folder / "model.safetensors", "numpy") as opened:
        step = int(opened.metadata()["step"])

    def part(tensors, prefix, drop=""):
        return {name.removeprefix(drop): t.copy() for name, t in tensors.items() if name.startswith(prefix)}

    moments = (part(optimizer, prefix, drop=prefix) for prefix in ("exp_avg.", "exp_avg_sq."))
    return step, part(model, "base."), part(model, "head."), *moments


def save_state(folder, step, base, head, first, second):
    """The state as two safetensors files; the folder appears whole."""
    partial = folder.with_name(folder.name + ".partial")
    partial.mkdir(parents=True)
    save_file(base | head, partial / "model.safetensors", metadata={"step": str(step)})
    moments = {f"exp_avg.{name}": t for name, t in first.items()} | {f"exp_avg_sq.{name}": t for name, t in second.items()}
    save_file(moments, partial / "optimizer.safetensors", metadata={"step": str(step)})
    partial.rename(folder)


def towline_save(program, folder, step, log):
    """Saves a checkpoint under the run's name, and notes what that took."""
    began = time.monotonic()
    command = [program, "save", str(folder), f"run/step-{step}", "--json"]
    answer = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    answer |= {"step": step, "wall_seconds": time.monotonic() - began}
    with log.open("a") as lines:
        lines.write(json.dumps(answer) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, help="folder for checkpoints and losses")
    parser.add_argument("--steps", type=int, required=True, help="train up to this step")
    parser.add_argument("--every", type=int, default=0, help="save a checkpoint every so many steps")
    parser.add_argument("--resume", type=Path, help="folder of the checkpoint to go on from")
    parser.add_argument("--towline", help="the program that saves each checkpoint")
    parser.add_argument("--killed-at", type=int, help="die of SIGKILL after this step, as when a machine is lost")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)

    digits = load_digits()
    pixels, labels = (digits.data / 16.0).astype(np.float32), digits.target
    step, base, head, first, second = load_state(args.resume) if args.resume else fresh_state()
    features = forward(base, "base", len(BASE) - 1, pixels, last_relu=True)[1]
    features /= features.std()
    while step < args.steps:
        step += 1
        rows = np.random.default_rng([20, step]).choice(len(labels), BATCH, replace=False)
        loss, grads = gradients(head, features[rows], labels[rows])
        adamw(head, first, second, grads, step)
        with (args.work / "losses").open("a") as losses:
            losses.write(f"{step} {loss.hex()}\n")
        if args.every and step % args.every == 0:
            folder = args.work / f"step-{step}"
            save_state(folder, step, base, head, first, second)
            print(f"  step {step:3}  loss {loss:.4f}", flush=True)
            if args.towline:
                towline_save(args.towline, folder, step, args.work / "saves.jsonl")
        if step == args.killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
    guesses = forward(head, "head", len(HEAD) - 1, features, last_relu=False)[1].argmax(axis=1)
    print(f"  step {step:3}  {100 * (guesses == labels).mean():.1f} % of the digits right", flush=True)


if __name__ == "__main__":
    main()
