"""What packed_qkv_views saves: from the operator's dq, dk, dv to the gradient of the projected row.

split: row.split and view; the operator gives three contiguous gradients, which autograd
concatenates. strided: the same where they are columns of one row, which autograd copies too. packed:
packed_qkv_views; they are columns of one row, which is the gradient. The operator itself does not
run. CPU time of one thread, or on a GPU time until it is done; arms in palindromic order, medians.

Usage: python bench/packed_views.py [--device cuda] [--tokens 2048] [--heads 2,6] [--groups 10]
"""

import argparse
import statistics
import time

import torch

import gdn_kcp

D = 128


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    p.add_argument("--tokens", type=int, default=2048)
    p.add_argument("--heads", default="2,6")
    p.add_argument("--groups", type=int, default=10)
    args = p.parse_args()
    torch.set_num_threads(1)
    cuda = args.device == "cuda"
    H, HV = map(int, args.heads.split(","))
    sizes = [H * D, H * D, HV * D]
    row = torch.randn(1, args.tokens, sum(sizes), dtype=torch.bfloat16, device=args.device)
    row.requires_grad_()

    def split(x):
        return [part.unflatten(-1, (-1, D)) for part in x.split(sizes, -1)]

    def packed(x):
        return gdn_kcp.packed_qkv_views(x, H_qk=H, HV=HV)

    columns = packed(torch.randn_like(row, requires_grad=False))
    contiguous = [t.contiguous() for t in columns]
    forms = {"split": (split, contiguous), "strided": (split, columns), "packed": (packed, columns)}

    def seconds(form):
        make, gradients = forms[form]
        views = make(row)
        clock = time.perf_counter if cuda else time.process_time
        if cuda:
            torch.cuda.synchronize()
        begun = clock()
        torch.autograd.grad(views, row, gradients)
        if cuda:
            torch.cuda.synchronize()
        return clock() - begun

    times = {form: [] for form in forms}
    for form in forms:
        seconds(form)  # warms up
    for _ in range(args.groups):
        for form in [*forms, *reversed(forms)]:
            times[form].append(seconds(form))
    mib = row.numel() * row.element_size() / 2**20
    print(f"{args.device}, {args.tokens} tokens, {H}/{HV} heads of {D}, a row of {mib:.1f} MiB, "
          f"median of {2 * args.groups}")
    for form, taken in times.items():
        print(f"{form:<8}{statistics.median(taken) * 1e6:10.0f} us")


if __name__ == "__main__":
    main()
