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

@triton.jit
def conv_each(x, g, rows_out, partial, C, H, W, O, OH, OW,
              KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
              PH: tl.constexpr, PW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
              BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
              PREC: tl.constexpr, STORE: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    tiles_n = tl.cdiv(C * KH * KW, BN)
    om = (tile // tiles_n) * BM + tl.arange(0, BM)
    jn = (tile % tiles_n) * BN + tl.arange(0, BN)
    N = C * KH * KW
    c = jn // (KH * KW)
    ky = (jn % (KH * KW)) // KW
    kx = jn % KW
    P = OH * OW
    x += n * C * H * W
    g += n * O * P
    acc = tl.zeros((BM, BN), tl.float32)
    for p0 in range(0, P, BK):
        p = p0 + tl.arange(0, BK)
        oh = p // OW
        ow = p % OW
        gt = tl.load(g + om[:, None] * P + p[None, :], mask=(om < O)[:, None] & (p < P)[None, :], other=0.0)
        ih = oh[:, None] * SH - PH + (ky * DH)[None, :]
        iw = ow[:, None] * SW - PW + (kx * DW)[None, :]
        inside = (ih >= 0) & (ih < H) & (iw >= 0) & (iw < W) & (jn < N)[None, :] & (p < P)[:, None]
        xt = tl.load(x + (c * (H * W))[None, :] + ih * W + iw, mask=inside, other=0.0)
        acc = tl.dot(gt, xt, acc, input_precision=PREC)
    if STORE:
        tl.store(rows_out + n * O * N + om[:, None] * N + jn[None, :], acc, mask=(om < O)[:, None] & (jn < N)[None, :])
    tl.store(partial + n * tl.num_programs(1) + tile, tl.sum(acc * acc))

def run_each(x, g, k, s, pad, cfg, prec, store):
    B, C, H, W = x.shape; O, OH, OW = g.shape[1:]
    bm, bn, bk, warps, stages = cfg
    tiles = triton.cdiv(O, bm) * triton.cdiv(C * k * k, bn)
    partial = torch.empty(B, tiles, device=x.device)
    r = torch.empty(B, O, C * k * k, device=x.device) if store else partial
    conv_each[(B, tiles)](x, g, r, partial, C, H, W, O, OH, OW, k, k, s, s, pad, pad, 1, 1, bm, bn, bk,
                          PREC=prec, STORE=store, num_warps=warps, num_stages=stages)
    return r, partial.sum(1)

@triton.jit
def gn_sums(x, dy, mean, rstd, a, b, C, P, CG, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    n = row // C
    grp = (row % C) // CG
    G = C // CG
    m = tl.load(mean + n * G + grp)
    r = tl.load(rstd + n * G + grp)
    s1 = tl.zeros((BLOCK,), tl.float32)
    s2 = tl.zeros((BLOCK,), tl.float32)
    for p0 in range(0, P, BLOCK):
        p = p0 + tl.arange(0, BLOCK)
        d = tl.load(dy + row * P + p, mask=p < P, other=0.0)
        v = tl.load(x + row * P + p, mask=p < P, other=0.0)
        s1 += d * (v - m) * r
        s2 += d
    tl.store(a + row, tl.sum(s1)); tl.store(b + row, tl.sum(s2))

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

def conv_micro(B, C, H, O, k, s):
    from dpsur.per_example.rules.patches import Window, patches, instantiate, inner_products
    from dpsur.per_example.rules.convolution import Sliding, _each
    pad = k // 2; OH = (H + 2 * pad - k) // s + 1
    group = f"conv B{B} {C}->{O} k{k} s{s} {H}->{OH}"
    x = rounded(torch.randn(B, C, H, H, device=DEV)); g = rounded(torch.randn(B, O, OH, OH, device=DEV)); w = torch.randn(O, C, k, k, device=DEV)
    win = Window((k, k), (s, s), (1, 1), (pad, pad))
    note(group, "tflop", 0, gflop=2e-9 * B * O * C * k * k * OH * OH, rows_gb=B*O*C*k*k*4e-9)
    back = lambda gg, xx, ww, m: torch.ops.aten.convolution_backward(gg, xx, ww, [0], (s, s), (pad, pad), (1, 1), False, [0, 0], 1, m)
    cl = dict(memory_format=torch.channels_last)
    xc, gc, wc = x.contiguous(**cl), g.contiguous(**cl), w.contiguous(**cl)
    for on in (True, False):
        tf32(on); t = "tf32" if on else "fp32"
        attempt(group, f"fwd {t}", lambda: F.conv2d(x, w, None, s, pad))
        attempt(group, f"dgrad {t}", lambda: back(g, x, w, [True, False, False]))
        attempt(group, f"wgrad {t}", lambda: back(g, x, w, [False, True, False]))
        if on:
            attempt(group, f"fwd {t} nhwc", lambda: F.conv2d(xc, wc, None, s, pad))
            attempt(group, f"dgrad {t} nhwc", lambda: back(gc, xc, wc, [True, False, False]))
            attempt(group, f"wgrad {t} nhwc", lambda: back(gc, xc, wc, [False, True, False]))
    tf32(False)
    ref = None
    attempt(group, "each now fp32", lambda: _each(x, g, win, 1))
    if OH <= 16:
        attempt(group, "gram now fp32", lambda: Sliding(x, g, win, tuple(w.shape), 1).measure())
        tf32(True); attempt(group, "gram now tf32", lambda: Sliding(x, g, win, tuple(w.shape), 1).measure()); tf32(False)
    tf32(True)
    attempt(group, "patches bmm tf32", lambda: instantiate(x, g, win, 1))
    tf32(False)
    if s == 1 and k == 3:
        def shifted():
            xp = F.pad(x, (1, 1, 1, 2)).flatten(2); gp = F.pad(g, (0, 2)).flatten(2)
            L = gp.shape[2]
            return [torch.bmm(gp, xp[:, :, dy * (H + 2) + dx:][:, :, :L].mT) for dy in range(3) for dx in range(3)]
        tf32(True); attempt(group, "shifted bmm tf32 nchw", shifted)
        def shifted_l():
            xp = F.pad(xc.permute(0, 2, 3, 1), (0, 0, 1, 1, 1, 2)).flatten(1, 2); gp = F.pad(gc.permute(0, 2, 3, 1), (0, 0, 0, 2)).flatten(1, 2)
            L = gp.shape[1]
            return [torch.bmm(gp.mT, xp[:, dy * (H + 2) + dx:][:, :L]) for dy in range(3) for dx in range(3)]
        attempt(group, "shifted bmm tf32 nhwc", shifted_l); tf32(False)
    n4 = min(4, B)
    ref = torch.bmm(g[:n4].double().flatten(2), patches(win.padded(x[:n4].double()), win, inside=False).mT)
    cfgs = [(64, 64, 32, 4, 3), (64, 128, 32, 4, 3), (128, 128, 32, 8, 3), (64, 256, 32, 8, 3), (128, 64, 32, 4, 4), (64, 128, 64, 8, 3)]
    best = {}
    todo = [("tf32", c) for c in (cfgs if s == 1 else cfgs[1:3])] + [("tf32x3", c) for c in cfgs[1:3]]
    if C > 200: todo = [t for t in todo if t[1] in cfgs[1:4]]
    want = ref.flatten(1).square().sum(1)
    for prec, cfg in todo:
        if time.time() - START > LIMIT: return
        try:
            t0 = time.time()
            q = run_each(x[:n4], g[:n4], k, s, pad, cfg, prec, False)[1]
            took = time.time() - t0
            err = ((q.double() - want).abs() / want).max().item()
            ms = bench(lambda: run_each(x, g, k, s, pad, cfg, prec, False), 3)
            ms2 = bench(lambda: run_each(x, g, k, s, pad, cfg, prec, True), 3) if cfg == cfgs[2] and prec == "tf32" else None
            note(group, f"triton {prec} {cfg}", ms, store_ms=ms2, err=err, compile=round(took, 2))
        except Exception as e:
            note(group, f"triton {prec} {cfg}", -1, error=f"{type(e).__name__} {str(e)[:150]}")

def other_micro():
    B = 2 if SMALL else 512
    for C, H in ((64, 32), (128, 16), (256, 8)):
        group = f"groupnorm B{B} {C}x{H}"
        x = torch.randn(B, C, H, H, device=DEV); dy = torch.randn_like(x); w = torch.randn(C, device=DEV); b = torch.randn(C, device=DEV)
        y, m, r = torch.native_group_norm(x, w, b, B, C, H * H, 16, 1e-5)
        attempt(group, "fwd", lambda: torch.native_group_norm(x, w, b, B, C, H * H, 16, 1e-5))
        attempt(group, "bwd", lambda: torch.ops.aten.native_group_norm_backward(dy, x, m, r, w, B, C, H * H, 16, [True, True, True]))
        attempt(group, "bwd input only", lambda: torch.ops.aten.native_group_norm_backward(dy, x, m, r, w, B, C, H * H, 16, [True, False, False]))
        attempt(group, "rows now", lambda: ((dy * F.group_norm(x, 16)).flatten(2).sum(2), dy.flatten(2).sum(2)))
        a, bb = torch.empty(B * C, device=DEV), torch.empty(B * C, device=DEV)
        for blk in (256, 1024):
            attempt(group, f"rows triton {blk}", lambda: gn_sums[(B * C,)](x, dy, m, r, a, bb, C, H * H, C // 16, BLOCK=blk, num_warps=1 if blk == 256 else 4))
        xc = x.contiguous(memory_format=torch.channels_last)
        attempt(group, "fwd nhwc", lambda: F.group_norm(xc, 16, w, b))
        attempt(group, "relu", lambda: torch.relu(x))
    for name, B, T, d, h in (("enc", 512, 128, 192, 768), ("enc qkv", 512, 128, 192, 576), ("gpt mlp", 32, 256, 768, 3072), ("gpt head", 32, 256, 768, 50257)):
        if SMALL: B, h = 2, min(h, 100)
        x = torch.randn(B, T, d, device=DEV); g = torch.randn(B, T, h, device=DEV); w = torch.randn(h, d, device=DEV)
        group = f"linear {name} B{B} T{T} {d}->{h}"
        note(group, "gflop", 0, gflop=2e-9 * B * T * d * h)
        for on in (False, True):
            tf32(on); t = "tf32" if on else "fp32"
            attempt(group, f"fwd {t}", lambda: F.linear(x, w))
            attempt(group, f"dgrad {t}", lambda: g @ w)
            attempt(group, f"wgrad {t}", lambda: g.flatten(0, 1).mT @ x.flatten(0, 1))
            attempt(group, f"gram {t}", lambda: (torch.bmm(x, x.mT) * torch.bmm(g, g.mT)).sum((1, 2)))
            if h < 9999: attempt(group, f"each {t}", lambda: torch.bmm(g.mT, x))
        tf32(False)
        attempt(group, "split", lambda: (rounded(g), g - rounded(g)))
        del x, g, w
    from dpsur.mechanism.streams import Streams, NOISE
    st = Streams(0, torch.device(DEV)).at(1)
    for n in (2_700_000, 27_000_000):
        attempt("noise", f"{n}", lambda: st[NOISE].normal(n))
    a = torch.randn(2**28 if not SMALL else 10, device=DEV); attempt("copy", "1GiB", lambda: a.clone())

def profiles():
    from dpsur.bench.arms import arm_named
    from dpsur.bench.settings import Cell
    from reproduction.bench.networks import network_named
    tf32(False); torch.backends.cudnn.allow_tf32 = True
    jobs = [("wrn-16-4", 512), ("resnet18-64", 256), ("encoder-192x6", 512), ("gpt2", 32), ("gpt2-lora", 32), ("mlp", 4096), ("lstm-256", 512), ("gpt2-tied", 32)]
    if SMALL: jobs = [("wrn-16-4", 2), ("mlp", 4)]
    for name, B in jobs:
        net = network_named(name)
        cell = Cell(net, net.batch(B, torch.device(DEV)))
        for arm in ("plain", "dpsgd", "dpsgd-captured", "opacus-hooks", "opacus-ghost"):
            if time.time() - START > LIMIT: return
            if name == "gpt2-tied" and arm.startswith("opacus"): continue
            try:
                t0 = time.time()
                step = arm_named(arm).make(cell)
                torch.cuda.reset_peak_memory_stats() if not SMALL else None
                step(); step()
                ms = bench(step, 5)
                note(f"net {name} {B}", arm, ms, setup=round(time.time() - t0, 1), peak_gb=0 if SMALL else torch.cuda.max_memory_allocated() / 1e9)
                if arm in ("plain", "dpsgd", "opacus-hooks"):
                    acts = [ProfilerActivity.CPU] + ([] if SMALL else [ProfilerActivity.CUDA])
                    with profile(activities=acts) as prof:
                        for _ in range(2): step()
                        if not SMALL: torch.cuda.synchronize()
                    key = "self_cpu_time_total" if SMALL else "self_device_time_total"
                    ev = sorted((e for e in prof.key_averages() if SMALL or str(e.device_type).endswith("CUDA")), key=lambda e: -getattr(e, key))
                    total = sum(getattr(e, key) for e in ev)
                    with open(os.path.join(out_dir, f"profile_{name}_{arm}.txt"), "w") as f:
                        f.write(f"{name} {B} {arm}: kernels {total / 2e3:.3f} ms per step, step {ms:.3f} ms\n")
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
        shapes = [(512, 64, 32, 64, 3, 1), (512, 128, 16, 128, 3, 1), (512, 256, 8, 256, 3, 1), (512, 64, 32, 128, 3, 2), (256, 512, 8, 512, 3, 1), (256, 64, 64, 64, 3, 1)]
        if SMALL: shapes = [(2, 4, 6, 8, 3, 1), (2, 4, 6, 8, 3, 2)]
        for shape in shapes[:6]:
            try: conv_micro(*shape)
            except Exception: traceback.print_exc()
    LIMIT = 0.6 * whole
    if "other" in which:
        try: other_micro()
        except Exception: traceback.print_exc()
    LIMIT = whole
    if "nets" in which:
        profiles()
    print("seconds", time.time() - START)
