#!/usr/bin/env python3
"""Times of PyTorch and its libraries (cuBLAS, cuDNN, fused AdamW) that our kernels are compared with.

    tools/bench/torch_baselines.py [--device cuda] [--out FILE.json] NAME DIMS [NAME DIMS]...
    tools/bench/torch_baselines.py gemm M=256,N=1536,K=1536 sdpa_fwd S=4096,H=12,K=2,D=128

Writes {"gemm M=...": {"seconds": {"median", "least", "most"}, "how": ...}} after every measurement, so that a cut run
leaves what it has.  Exits with 3 where there is no PyTorch, or none that sees the device.  Operands are random bf16 and
rotate past the last cache; times are between CUDA events, medians of 30 samples.  As with our kernels, the calls of a
sample are one launch, of a CUDA graph; "how" says where one could not be captured.
"""
import argparse
import json
import statistics
import sys
import time


def gemm(torch, device, M, N, K):
    def make():
        x, w = torch.randn(M, K, device=device).bfloat16(), torch.randn(N, K, device=device).bfloat16()
        return (lambda: torch.nn.functional.linear(x, w)), 2 * (M * K + N * K + M * N)
    return make, "torch.nn.functional.linear (cuBLAS), bf16"


def sdpa(torch, device, S, H, K, D, backward):
    """Causal, one sequence; cuDNN where it takes the shape, else the flash kernel."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def make_with(backend):
        q, k, v = (torch.randn(1, h, S, D, device=device).bfloat16().requires_grad_(backward) for h in (H, K, K))

        def forward():
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        if not backward:
            return forward, 2 * S * D * (2 * H + 2 * K)
        o = forward()
        do = torch.randn_like(o)
        return (lambda: torch.autograd.grad(o, (q, k, v), do, retain_graph=True)), 2 * S * D * (4 * H + 4 * K)

    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
        try:
            make_with(backend)[0]()
            return (lambda: make_with(backend)), f"scaled_dot_product_attention, {backend.name}, bf16"
        except RuntimeError as e:
            print(f"torch_baselines: {backend.name}: {str(e).splitlines()[0]}", file=sys.stderr)
    raise RuntimeError("no backend of scaled_dot_product_attention takes this shape")


def rmsnorm(torch, device, N, C):
    def make():
        x, w = torch.randn(N, C, device=device).bfloat16(), torch.randn(C, device=device).bfloat16()
        return (lambda: torch.nn.functional.rms_norm(x, (C,), w, 1e-6)), 4 * N * C
    return make, "torch.nn.functional.rms_norm, bf16"


def adamw_fused(torch, device, n):
    def make():
        p = torch.randn(n, device=device).requires_grad_()
        p.grad = torch.randn(n, device=device)
        short = torch.empty(n, device=device, dtype=torch.bfloat16)
        optimizer = torch.optim.AdamW([p], fused=device == "cuda", capturable=device == "cuda")

        def step():
            optimizer.step()
            short.copy_(p.detach())
        return step, 22 * n
    return make, "torch.optim.AdamW(fused), f32, then a copy to bf16"


def score_topk(torch, device, B, L, H, K, D, block, budget):
    def choose(q, c):
        scores = torch.einsum("bkd,bkpd->bkp", q.mean(2), c)
        return torch.topk(scores, budget, dim=-1).indices.sort(-1).values
    compiled = torch.compile(choose, fullgraph=True)

    def make():
        q = torch.randn(B, K, H // K, D, device=device).bfloat16()
        c = torch.randn(B, K, L // block, D, device=device).bfloat16()
        return (lambda: compiled(q, c)), 2 * c.numel()
    return make, "torch.compile of mean, einsum, topk, sort, bf16"


BASELINES = {"gemm": gemm, "rmsnorm": rmsnorm, "adamw_fused": adamw_fused, "score_topk": score_topk,
             "sdpa_fwd": lambda *a, **d: sdpa(*a, **d, backward=False),
             "sdpa_bwd": lambda *a, **d: sdpa(*a, **d, backward=True)}


def measure(torch, device, make):
    """(seconds, why the calls were launched one by one, or None)"""
    first, size = make()
    cache = torch.cuda.get_device_properties(0).L2_cache_size if device == "cuda" else 1 << 20
    copies = [first] + [make()[0] for _ in range(min(2 * cache // max(size, 1), 255))]

    def several(calls):
        for i in range(calls):
            copies[i % len(copies)]()

    def seconds(queue):
        if device != "cuda":
            start = time.perf_counter()
            queue()
            return time.perf_counter() - start
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        queue()  # keeps the device busy while the host queues what is timed
        begin.record()
        queue()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e-3
    seconds(lambda: several(len(copies)))
    calls = max(1, min(int(1e-3 / seconds(first)), 1000))
    calls = -(-calls // len(copies)) * len(copies)
    queue, why = lambda: several(calls), None
    if device == "cuda":
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
                several(calls)
            queue = graph.replay
        except Exception as e:
            torch.cuda.synchronize()
            why = f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"
    start, samples = time.perf_counter(), []
    while len(samples) < 30 and (len(samples) < 3 or time.perf_counter() - start < 1):
        samples.append(seconds(queue) / calls)
    return {"median": statistics.median(samples), "least": min(samples), "most": max(samples)}, why


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: only to try this script")
    parser.add_argument("--out", help="JSON file; not given: to standard output at the end")
    parser.add_argument("names", nargs="+", metavar="NAME DIMS", help=", ".join(BASELINES))
    o = parser.parse_args()
    if len(o.names) % 2:
        parser.error("names and dimensions come in pairs")
    try:
        import torch
    except (ImportError, OSError) as e:
        print(f"torch_baselines: no PyTorch here ({e}): nothing to compare with", file=sys.stderr)
        sys.exit(3)
    if o.device == "cuda" and not torch.cuda.is_available():
        print("torch_baselines: PyTorch sees no CUDA device: nothing to compare with", file=sys.stderr)
        sys.exit(3)
    results = {}
    for name, dims in zip(o.names[::2], o.names[1::2]):
        key = f"{name} {dims}"
        try:
            sizes = {k: int(v) for k, v in (d.split("=") for d in dims.split(","))}
            # A stream of its own, as the backward of a graph's forward runs on the stream of that, and none is captured on
            # the one that is there by default.
            with torch.cuda.stream(torch.cuda.Stream() if o.device == "cuda" else None):
                make, how = BASELINES[name](torch, o.device, **sizes)
                seconds, why = measure(torch, o.device, make)
            how = f"PyTorch {torch.__version__}: {how}" + (f"; in no graph: {why}" if why else "")
            results[key] = {"seconds": seconds, "how": how}
        except Exception as e:  # one that fails must not cost the others
            results[key] = {"seconds": None, "how": f"failed: {type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"}
        print(f"{key}: {results[key]}", file=sys.stderr, flush=True)
        if o.device == "cuda":
            torch.cuda.empty_cache()
        if o.out:
            with open(o.out, "w") as f:
                json.dump(results, f, indent=1)
    if not o.out:
        json.dump(results, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
