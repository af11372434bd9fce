"""Candidate kernels, timed on a GPU: python -m reproduction.bench.trial_kernels OUT SECONDS."""
# ruff: noqa
import json, os, sys, time, traceback
import torch, torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile
import triton, triton.language as tl

DEV = "cuda" if torch.cuda.is_available() else "cpu"
START = time.time()
out_dir = sys.argv[1] if len(sys.argv) > 1 else "/tmp"
LIMIT = float(sys.argv[2]) if len(sys.argv) > 2 else 110
rows = open(os.path.join(out_dir, "micro.jsonl"), "w")
SMALL = DEV == "cpu"

def bench(fn, reps=5):
    if SMALL:
        fn(); return 0.0
    fn(); torch.cuda.synchronize()
    ts = []
    for _ in range(reps):
        a, b = torch.cuda.Event(True), torch.cuda.Event(True)
        a.record(); fn(); b.record(); torch.cuda.synchronize(); ts.append(a.elapsed_time(b))
    return sorted(ts)[len(ts) // 2]

def note(group, name, ms, **kw):
    r = dict(group=group, name=name, ms=round(ms, 4), **kw)
    rows.write(json.dumps(r) + "\n"); rows.flush()
    print(group, name, f"{ms:.3f}", kw, flush=True)

def attempt(group, name, fn, **kw):
    if time.time() - START > LIMIT: return
    try:
        note(group, name, bench(fn), **kw)
    except Exception as e:
        note(group, name, -1, error=f"{type(e).__name__} {str(e)[:150]}")
        torch.cuda.empty_cache() if not SMALL else None

def tf32(on):
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = on

def rounded(t):
    return ((t.view(torch.int32) + 0x1000) & -8192).view(torch.float32)

def conv_micro(B, C, H, O, k, s, tiles):
    from dpsur.per_example.rules.patches import Window, patches
    from dpsur.per_example.kernels import fused; fused.DEVICE = DEV
    pad = k // 2; OH = (H + 2 * pad - k) // s + 1
    group = f"conv B{B} {C}->{O} k{k} s{s} {H}->{OH}"
    x = rounded(torch.randn(B, C, H, H, device=DEV)); g = rounded(torch.randn(B, O, OH, OH, device=DEV))
    win = Window((k, k), (s, s), (1, 1), (pad, pad))
    note(group, "gflop", 0, gflop=2e-9 * B * O * C * k * k * OH * OH, rows_gb=B*O*C*k*k*4e-9)
    n4 = min(4, B)
    ref = torch.bmm(g[:n4].double().flatten(2), patches(win.padded(x[:n4].double()), win, inside=False).mT)
    for tile in tiles:
        if time.time() - START > LIMIT: return
        try:
            t0 = time.time()
            r, q = fused.rounded_gradients(x[:n4], g[:n4], win, tile)
            took = time.time() - t0
            err = ((r.flatten(2).double() - ref).norm() / ref.norm()).item()
            ms = bench(lambda: fused.rounded_gradients(x, g, win, tile), 3)
            note(group, f"fused {tile}", ms, err=err, compile=round(took, 2))
        except Exception as e:
            note(group, f"fused {tile}", -1, error=f"{type(e).__name__} {str(e)[:150]}")
    r = fused.rounded_gradients(x, g, win)[0].flatten(1)
    f = torch.rand(B, device=DEV)
    attempt(group, "weighted_rows", lambda: fused.weighted_rows(r, f))
    attempt(group, "f @ rows", lambda: f @ r)
    note(group, "weighted err", 0, err=((fused.weighted_rows(r, f) - f @ r).norm() / (f @ r).norm()).item())

def other_micro():
    from dpsur.per_example.kernels import fused; fused.DEVICE = DEV
    B = 2 if SMALL else 512
    for C, H in ((64, 32), (128, 16), (256, 8)):
        group = f"groupnorm B{B} {C}x{H}"
        x = torch.randn(B, C, H, H, device=DEV); dy = torch.randn_like(x)
        y, m, r = torch.native_group_norm(x, None, None, B, C, H * H, 16, 1e-5)
        attempt(group, "sums", lambda: fused.channel_sums(x, dy, m, r))
        a, b = fused.channel_sums(x, dy, m, r)
        note(group, "err", 0, err=((a - (dy * y).sum((2, 3))).norm() / a.norm()).item())
    x = torch.randn(B, 128, 192, device=DEV); dy = torch.randn_like(x)
    y, m, r = torch.native_layer_norm(x, [192], None, None, 1e-5)
    attempt("layernorm", "sums", lambda: fused.position_sums(x, dy, m, r))
    a, b = fused.position_sums(x, dy, m, r)
    note("layernorm", "err", 0, err=((a - (dy * y).sum(1)).norm() / a.norm()).item())
    for (M, N) in ((512, 576), (512, 147456), (512, 192), (32, 2359296)):
        r = torch.randn(M if not SMALL else 3, N, device=DEV); f = torch.rand(len(r), device=DEV)
        attempt(f"rows {M}x{N}", "weighted", lambda: fused.weighted_rows(r, f))
        attempt(f"rows {M}x{N}", "gemv", lambda: f @ r)

def profiles():
    from dpsur.bench.arms import arm_named
    from dpsur.bench.settings import Cell
    from reproduction.bench.networks import network_named
    tf32(False); torch.backends.cudnn.allow_tf32 = True
    jobs = [("wrn-16-4", 512), ("resnet18-64", 256), ("encoder-192x6", 512), ("lstm-256", 512), ("gpt2", 32), ("mlp", 4096)]
    if SMALL: jobs = [("wrn-16-4", 2), ("mlp", 4)]
    for name, B in jobs:
        net = network_named(name)
        cell = Cell(net, net.batch(B, torch.device(DEV)))
        for arm in ("plain", "dpsgd", "dpsgd-captured", "dpsur-captured"):
            if time.time() - START > LIMIT: return
            if name == "gpt2-tied" and arm.startswith("opacus"): continue
            try:
                t0 = time.time()
                step = arm_named(arm).make(cell)
                torch.cuda.reset_peak_memory_stats() if not SMALL else None
                step(); step()
                ms = bench(step, 5)
                note(f"net {name} {B}", arm, ms, setup=round(time.time() - t0, 1), peak_gb=0 if SMALL else torch.cuda.max_memory_allocated() / 1e9)
                if arm in ("plain", "dpsgd"):
                    acts = [ProfilerActivity.CPU] + ([] if SMALL else [ProfilerActivity.CUDA])
                    with profile(activities=acts) as prof:
                        for _ in range(2): step()
                        if not SMALL: torch.cuda.synchronize()
                    key = "self_cpu_time_total" if SMALL else "self_device_time_total"
                    ev = sorted((e for e in prof.key_averages() if SMALL or str(e.device_type).endswith("CUDA")), key=lambda e: -getattr(e, key))
                    total = sum(getattr(e, key) for e in ev)
                    with open(os.path.join(out_dir, "profiles.txt"), "a") as f:
                        f.write(f"\n{name} {B} {arm}: kernels {total / 2e3:.3f} ms per step, step {ms:.3f} ms\n")
                        for e in ev[:40]:
                            f.write(f"{getattr(e, key) / 2e3:9.3f} ms {e.count / 2:6.1f}x  {e.key[:150]}\n")
                del step
            except Exception as e:
                note(f"net {name} {B}", arm, -1, error=f"{type(e).__name__} {str(e)[:200]}")
                traceback.print_exc()
            import gc; gc.collect()
            if not SMALL: torch.cuda.empty_cache()

if __name__ == "__main__":
    which = sys.argv[3].split(",") if len(sys.argv) > 3 else ["conv", "other", "nets"]
    whole = LIMIT
    LIMIT = 0.45 * whole
    if "conv" in which:
        narrow = [(64, 64, 32, 4, 3), (64, 64, 64, 4, 3), (64, 128, 32, 4, 3), (64, 64, 32, 4, 4), (64, 192, 32, 8, 3), (64, 128, 64, 4, 3)]
        wide = [(128, 128, 32, 8, 3), (128, 128, 32, 4, 3), (128, 64, 32, 4, 3), (128, 256, 32, 8, 3), (128, 128, 64, 8, 3), (128, 128, 32, 8, 4)]
        jobs = [(512, 64, 32, 64, 3, 1, narrow), (512, 128, 16, 128, 3, 1, wide), (512, 64, 32, 128, 3, 2, wide[:3]), (256, 64, 64, 64, 3, 1, narrow[:3]), (256, 256, 16, 256, 3, 1, wide[:2]), (512, 16, 32, 64, 3, 1, narrow[:3]), (512, 3, 32, 16, 3, 1, narrow[:1] + [(16, 32, 64, 4, 3), (32, 32, 64, 4, 3)]), (512, 256, 8, 256, 3, 1, wide[:1])]
        if SMALL: jobs = [(2, 4, 6, 8, 3, 1, narrow[:2]), (2, 4, 6, 8, 3, 2, wide[:1])]
        for job in jobs:
            try: conv_micro(*job)
            except Exception: traceback.print_exc()
    LIMIT = 0.6 * whole
    if "other" in which:
        try: other_micro()
        except Exception: traceback.print_exc()
    LIMIT = whole
    if "nets" in which:
        profiles()
    print("seconds", time.time() - START)
