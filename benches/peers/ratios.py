"""Reads the lines that run.sh collected and prints the machine and a Markdown table of ratios.

    ratios.py PARAMETERS < LINES

Lines are tab-separated: `row`, name, bytes per parameter, median seconds; or `note`, name, text. Others are
ignored. Needs nothing but Python.
"""

import statistics
import sys

CEILING = "ceiling"
STREAM = "stream adam-mix"
DEEPSPEED = "DeepSpeed, bf16 gradient to bf16 weight"

if len(sys.argv) != 2:
    sys.exit(__doc__)
parameters = int(sys.argv[1])

rows, notes = [], []
for line in sys.stdin:
    words = line.rstrip("\n").split("\t")
    if words[0] == "row" and len(words) == 4:
        rows.append((words[1], float(words[2]), float(words[3])))
    elif words[0] == "note" and len(words) == 3:
        notes.append(words[1:])
if not rows:
    sys.exit("no rows to show")


def all_seconds(name):
    return [seconds for other, _, seconds in rows if other == name]


def ratio(name, seconds):
    """How many times as fast as the row `name`; the mean of it where it was measured more than once."""
    of = all_seconds(name)
    return f"{statistics.mean(of) / seconds:.2f}" if of else "-"


for name, text in notes:
    print(f"* {name}: {text}")
print(f"* {parameters} parameters; medians of nine runs after two that do not count")
print()
print(f"| | B/param | ms | Gparam/s | GB/s | of the ceiling | of `{STREAM}` | times DeepSpeed, bf16 to bf16 |")
print("|---|" + "---:|" * 7)
seen = {}
for name, bytes_per_parameter, seconds in rows:
    seen[name] = seen.get(name, 0) + 1
    times = len(all_seconds(name))
    label = f"{name} ({seen[name]} of {times})" if times > 1 else name
    if name.startswith("stream ") and name != STREAM:
        # Not a step: its bandwidth says something, its time beside that of a step does not.
        ratios = ["-"] * 3
    else:
        ratios = [ratio(of, seconds) for of in (CEILING, STREAM, DEEPSPEED)]
    cells = [
        label,
        f"{bytes_per_parameter:g}",
        f"{seconds * 1e3:.{1 if seconds >= 0.1 else 2}f}",
        f"{parameters / seconds / 1e9:.3f}",
        f"{parameters * bytes_per_parameter / seconds / 1e9:.1f}",
        *ratios,
    ]
    print("| " + " | ".join(cells) + " |")

print()
print("Ratios are of parameters per second. Bytes are those a step has to touch, not all that a peer moves.")
streams = all_seconds(STREAM)
if len(streams) > 1:
    print(f"`{STREAM}` ran first and last, the last at {streams[0] / streams[-1]:.2f} of the speed of the first;")
    print("ratios to it are to the mean time of both.")
    if not 0.95 <= streams[0] / streams[-1] <= 1.05:
        print("**The machine changed by more than 5 % meanwhile: measure again on an idle one.**")
for name, what in ((CEILING, "our own benchmark"), (DEEPSPEED, "the peers")):
    if not all_seconds(name):
        print(f"No row `{name}`: {what} gave none.")
