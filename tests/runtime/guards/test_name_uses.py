"""Names that code only writes to are told alike from the instructions of every Python that is on this machine."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

NAME_USES = Path(__file__).parents[3] / "runtime" / "guards" / "bytecode_names.py"
CODE = """
def writes(self, g, name, k, v, i, j):
    w1[name] = g.norm(); w2.append(v); w3["a"] += 1; self.w4 += 1; self.w5["x"] = 1; w6.setdefault(k, []).append(v)
    w7[k].append(v); w8[i:j] = v; w9[i:j] += v; w10.w11.append(v); w12[i, j] = v; w13[k].extend(v); w14[i:j].append(v)
    w15.x[k] = 1; del self.w16
def reads(self, g, name, k, v, i, j):
    r1[name] / 2; r2[-1]; len(r3); self.r4 > 3; self.r5["x"]; r6.setdefault(k, []); r7[k]; r8[i:j]; r9.pop()
    r10(v).append(1); r11[i:j].sum(); r12 < v < 3; 0 < r13 < 5; super().r14(v); super().r15; [r16[q] for q in r17]
    r18[3:4]; {**r19}; f"{r20}"; r21[k](v); r22()[k] = 1; v or r23; r24[(k := 1)]; r25.r26.r27; del r28[k]
    g["r29"]; setattr(self, "r30", 1)
    return "r31"
def files(p, q):
    open(p); open(f(p, "x"), "w"); p.open(mode="ab"); p.open(); open(p, "r+"); torch.save(q, p)
    np.load(p); p.read_text()
"""
ASK = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("bytecode_names", sys.argv[1])
module = sys.modules["bytecode_names"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
codes = [c for c in compile(sys.argv[2], "code", "exec").co_consts if hasattr(c, "co_code")]
for code in codes:
    uses = module.union_of(map(module.uses_in, (code, *(c for c in code.co_consts if hasattr(c, "co_code")))))
    for names in uses[:3]:
        print(*sorted(name for name in names if name[0] in "rw" and name[1:].isdigit()))
    print(*sorted(uses.writes), "|", *sorted(uses.reads))
"""


@pytest.mark.parametrize("python", ["", "python3.12", "python3.13", "python3.14"])
def test_names_are_told_alike_by_every_python(python: str) -> None:
    command = shutil.which(python) if python else sys.executable
    if command is None or subprocess.run([command, "-c", ""], capture_output=True, check=False).returncode:
        pytest.skip(f"there is no {python}")
    ran = subprocess.run([command, "-c", ASK, NAME_USES, CODE], capture_output=True, text=True, check=True)
    written, read = ({f"{kind}{number}" for number in range(1, last)} for kind, last in (("w", 17), ("r", 32)))
    lines = ran.stdout.splitlines()
    of_writes, stored, named, _, of_reads, none = (set(line.split()) for line in lines[:6])
    assert (of_writes, stored, of_reads, none) == (set(), {"w4", "w16"}, read, set())
    assert named == written - {"w16"}
    files = "open(…, 'ab') open(…, 'r+') open(…, 'w') torch.save | np.load open(…, 'r') p.read_text"
    assert [line.strip() for line in lines[3::4]] == ["|", "|", files]
