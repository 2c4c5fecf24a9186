import torch, sys, time

sys.path.insert(0, ".")
from dflash_toolkit.kernels import reference as R, fused as Fz, attention as A, linear as L

torch.manual_seed(0)
d = "cuda"


def rel(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


x = torch.randn(128, 4096, device=d, dtype=torch.bfloat16)
for name, n, k in (
    ("linear", 6144, 4096),
    ("linear_partials", 4096, 4096),
    ("linear_partials", 4096, 12288),
    ("linear_swiglu", 24576, 4096),
    ("linear_argmax", 151936, 4096),
):
    w = torch.randn(n, k, device=d, dtype=torch.bfloat16) / k**0.5
    x = torch.randn(128, k, device=d, dtype=torch.bfloat16)
    f = getattr(Fz, name)
    red = (lambda t: t.float().sum(0)) if name == "linear_partials" else (lambda t: t)
    t = time.time()
    full = red(f(x, w))
    torch.cuda.synchronize()
    t = time.time() - t
    ref = getattr(R, name)(x.double(), w.double()) if name != "linear_argmax" else R.linear_argmax(x, w)
    ref = red(ref) if name != "linear_argmax" else ref
    eq = all(torch.equal(red(f(x[:m], w)), full[:m]) for m in (1, 2, 3, 5, 8, 16, 17, 31, 32, 48, 64, 100, 127))
    eq2 = torch.equal(red(f(x[5:6].clone(), w))[0], full[5])
    print(
        name,
        n,
        k,
        "rel",
        rel(full, ref) if name != "linear_argmax" else (full == ref).float().mean().item(),
        "invariant",
        eq,
        eq2,
        round(t, 2),
    )
B, N, G, H, P = 8, 32, 8, 128, 64
for ctx in ((0, 1, 63, 64, 130, 511, 1100, 4000),):
    W = 300
    perm = (torch.randperm(B * W, device=d) + 1).view(B, W).int()
    cache = torch.randn(2, (B * W + 2) * P, G, H, device=d, dtype=torch.bfloat16)
    lengths = torch.tensor(ctx, dtype=torch.int32, device=d)
    for S in (16, 8, 1):
        q = torch.randn(B * S, N, H, device=d, dtype=torch.bfloat16)
        for causal in (True, False):
            r = R.block_attention(q.double(), cache.double(), lengths, perm, P, causal=causal)
            a = A._attention(q, cache, lengths, perm, P, causal, 0, False)
            b = A._attention(q, cache, lengths, perm, P, causal, 0, True)
            one = torch.stack(
                [
                    A._attention(q.view(B, S, N, H)[i], cache, lengths[i : i + 1], perm[i : i + 1], P, causal, 0, False)
                    for i in range(B)
                ]
            ).view_as(a)
            sdpa = R.block_attention(q, cache, lengths, perm, P, causal=causal)
            print("att", S, causal, rel(a, r), rel(sdpa, r), rel(b, r), torch.equal(a, one), end=" ")
            if S > 1 and causal:
                k = 5
                same = A._attention(q.view(B, S, N, H)[:, k].contiguous(), cache, lengths + k, perm, P, True, 0, False)
                print("S=1 same", torch.equal(same, a.view(B, S, -1)[:, k]), end="")
            print()
qkv = torch.randn(B * 16, (N + 2 * G) * H, device=d, dtype=torch.bfloat16)
qw = torch.rand(H, device=d).bfloat16()
kw = torch.rand(H, device=d).bfloat16()
rope = torch.randn(2, 8192, H // 2, device=d)
c1, c2 = cache.clone(), cache.clone()
q1 = R.rope_write(qkv, qw, kw, 1e-6, rope, lengths, perm, c1, P)
q2 = Fz.rope_write(qkv, qw, kw, 1e-6, rope, lengths, perm, c2, P)
print("rope", rel(q2, q1), rel(c2, c1))
xx = torch.randn(128, 4096, device=d, dtype=torch.bfloat16)
part = torch.randn(2, 128, 4096, device=d)
w = torch.rand(4096, device=d).bfloat16()
print("norm", [rel(a, b) for a, b in zip(Fz.add_rms_norm(xx, part, w, 1e-6), R.add_rms_norm(xx, part, w, 1e-6))])
