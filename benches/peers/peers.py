"""The optimizer steps that users would otherwise run on the CPU: DeepSpeed's CPUAdam and torch's AdamW.

    peers.py PARAMETERS THREADS build|deepspeed|torch

`build` compiles DeepSpeed's kernel and measures nothing. The others print one line per row, tab-separated:
`row`, name, bytes per parameter, median seconds, share of the ceiling. STREAM_LIBRARY names stream.c as a shared
library: every run of a peer comes after a pass of it, and the share is the median of the ratios of such pairs.
"""

import ctypes
import os
import statistics
import sys
import time

# The same in stream.c and in our own benchmark.
WARM_UPS, RUNS = 2, 9
# As in our own benchmark (benches/cpu_step.rs). DeepSpeed's default is no weight decay.
ADAMW = dict(lr=1e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)

if len(sys.argv) != 4 or sys.argv[3] not in ("build", "deepspeed", "torch"):
    sys.exit(__doc__)
PARAMETERS, THREADS, WHAT = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
# Before the imports: the OpenMP runtime of torch and of DeepSpeed's kernel reads it when it is loaded.
os.environ["OMP_NUM_THREADS"] = str(THREADS)
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch  # noqa: E402

torch.set_num_threads(THREADS)
stream = ctypes.CDLL(os.environ["STREAM_LIBRARY"]).adam_mix_seconds
stream.argtypes, stream.restype = (ctypes.c_size_t, ctypes.c_int), ctypes.c_double


def row(name, bytes_per_parameter, run):
    seconds, shares = [], []
    for _ in range(WARM_UPS + RUNS):
        ceiling = stream(PARAMETERS, THREADS)
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
        shares.append(ceiling / seconds[-1])
    median, share = (statistics.median(values[WARM_UPS:]) for values in (seconds, shares))
    print("row", name, bytes_per_parameter, f"{median:.9f}", f"{share:.6f}", sep="\t", flush=True)


def parameter(dtype=torch.float32):
    """One parameter with a gradient, filled as in our own benchmark. Optimizers want both of one type."""
    weight = torch.nn.Parameter(torch.full((PARAMETERS,), 0.01, dtype=dtype))
    weight.grad = torch.full((PARAMETERS,), 1e-3, dtype=dtype)
    return weight


def alone_and_offloaded(alone, offloaded, make):
    """The step alone, fp32 gradient in and fp32 parameter out; then all that offloading asks of the CPU: the
    gradient came from the device in bf16 and a bf16 weight goes back. 28 bytes are what each has to touch;
    the conversions are passes of their own, so the second moves 40."""
    master = parameter()
    optimizer = make([master])
    row(alone, 28, optimizer.step)

    gradient = master.grad.to(torch.bfloat16)
    weight = torch.empty(PARAMETERS, dtype=torch.bfloat16)

    def step():
        master.grad.copy_(gradient)
        optimizer.step()
        weight.copy_(master.data)

    row(offloaded, 28, step)


if WHAT == "build":
    from deepspeed.ops.op_builder import CPUAdamBuilder

    CPUAdamBuilder().load()

if WHAT == "deepspeed":
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    alone_and_offloaded(
        "DeepSpeed CPUAdam, fp32 gradient",
        "DeepSpeed, bf16 gradient to bf16 weight",
        lambda parameters: DeepSpeedCPUAdam(parameters, adamw_mode=True, **ADAMW),
    )
    # No conversions, but no fp32 master either: updates below half a unit of bf16 are lost.
    weight = parameter(torch.bfloat16)
    optimizer = DeepSpeedCPUAdam([weight], adamw_mode=True, fp32_optimizer_states=False, **ADAMW)
    row("DeepSpeed, all bf16, no master", 14, optimizer.step)

if WHAT == "torch":
    alone_and_offloaded(
        "torch fused AdamW",
        "torch fused, bf16 gradient to bf16 weight",
        lambda parameters: torch.optim.AdamW(parameters, fused=True, **ADAMW),
    )
    row("torch default AdamW", 28, torch.optim.AdamW([parameter()], **ADAMW).step)
