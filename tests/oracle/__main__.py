"""x."""
import sys
import time
import torch
torch.set_num_threads(1)
from tests.oracle.harness import FORMS, judge, gradient_error
from tests.oracle.programs import all_programs
forms = [a for a in sys.argv[1:] if a in FORMS] or FORMS
words = [a for a in sys.argv[1:] if a not in FORMS]
for p in all_programs():
    if words and not any(w in f"{p.family} {p.name}" for w in words): continue
    for form in forms:
        if form not in p.expected: continue
        t=time.time()
        v=judge(p, form)
        extra=""
        if form=="private_step" and p.legitimate and not p.draws and v.outcome=="bounded":
            try: e=gradient_error(p); extra=f" err {e:.1e}" if e>1e-9 else ""
            except AssertionError as x: extra=f" GRAD {x}"
        flag = "  " if v.as_expected and not extra else "!!"
        print(flag, form, "|", p.family, "|", p.name, "|", str(v)[:300], extra, f"{time.time()-t:.1f}s", flush=True)
