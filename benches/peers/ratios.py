"""Reads the lines that run.sh collected and prints the machine and a Markdown table of ratios.

    ratios.py PARAMETERS < LINES

Lines are tab-separated: `row`, name, bytes per parameter, median seconds and, of what ran in pairs with the ceiling,
the median ratio of the pairs; or `note`, name, text. Others are ignored. Needs nothing but Python.
"""

import statistics
import sys

STREAM = "stream adam-mix"
DEEPSPEED = "DeepSpeed, bf16 gradient to bf16 weight"

if len(sys.argv) != 2:
    sys.exit(__doc__)
parameters = int(sys.argv[1])

rows, notes = [], []
for line in sys.stdin:
    words = line.rstrip("\n").split("\t")
    if words[0] == "row" and len(words) in (4, 5):
        share = float(words[4]) if len(words) == 5 else None
        rows.append((words[1], float(words[2]), float(words[3]), share))
    elif words[0] == "note" and len(words) == 3:
        notes.append(words[1:])
if not rows:
    sys.exit("no rows to show")

for name, text in notes:
    print(f"* {name}: {text}")
print(f"* {parameters} parameters; medians of nine runs after two that do not count")
print()
print("| | B/param | ms | Gparam/s | GB/s | of the ceiling beside it | times DeepSpeed, bf16 to bf16 |")
print("|---|" + "---:|" * 6)
of_deepspeed = [share for name, _, _, share in rows if name == DEEPSPEED and share]
for name, bytes_per_parameter, seconds, share in rows:
    cells = [
        name,
        f"{bytes_per_parameter:g}",
        f"{seconds * 1e3:.{1 if seconds >= 0.1 else 2}f}",
        f"{parameters / seconds / 1e9:.3f}",
        f"{parameters * bytes_per_parameter / seconds / 1e9:.1f}",
        f"{share:.2f}" if share else "-",
        f"{share / of_deepspeed[0]:.2f}" if share and of_deepspeed else "-",
    ]
    print("| " + " | ".join(cells) + " |")

print()
print("Ratios are of parameters per second. Every run of a row with a ratio came after a pass over the same streams with")
print("additions for arithmetic, of 28 bytes a parameter, in the same process; the ratio is the median of such pairs. Two")
print("rows are compared by their ratios. Bytes are those a step has to touch, not all that a peer moves.")
streams = [seconds for name, _, seconds, _ in rows if name == STREAM]
if len(streams) > 1:
    print(f"`{STREAM}` ran first and last, the last at {streams[0] / streams[-1]:.2f} of the speed of the first.")
if not of_deepspeed:
    print(f"No row `{DEEPSPEED}`: the peers gave none.")
