"""Watts, joules and milliseconds of the operator at workload M on a GPU, back to back for seconds, so at
the power cap where it has one. lab/sm90/energy.cu has the parts.

Usage: python lab/energy_of_calls.py [SECONDS]
"""

import ctypes
import sys
import time

import torch

import gdn_kcp

DOCUMENTS, H, HV, D = (12000, 9000, 6000, 3768, 2000), 16, 48, 128


class Meter:
    def __init__(self):
        self.nvml = ctypes.CDLL("libnvidia-ml.so.1")
        self.device = ctypes.c_void_p()
        assert self.nvml.nvmlInit_v2() == 0
        assert self.nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(self.device)) == 0

    def joules(self) -> float:
        value = ctypes.c_ulonglong()
        assert self.nvml.nvmlDeviceGetTotalEnergyConsumption(self.device, ctypes.byref(value)) == 0
        return value.value * 1e-3

    def megahertz(self) -> int:
        value = ctypes.c_uint()
        assert self.nvml.nvmlDeviceGetClockInfo(self.device, 1, ctypes.byref(value)) == 0  # of SMs
        return value.value


def measure(meter: Meter, name: str, call, seconds: float) -> None:
    def run(limit):
        calls, began = 0, time.perf_counter()
        while time.perf_counter() - began < limit:
            for _ in range(20):
                call()
            clock = meter.megahertz()
            torch.cuda.synchronize()
            calls += 20
        return calls, clock, time.perf_counter() - began

    run(0.5)
    before = meter.joules()
    calls, clock, spent = run(seconds)
    joules = meter.joules() - before
    print(
        f"{name:34} {joules / spent:5.0f} W  {joules / calls:6.3f} J  {1e3 * spent / calls:6.3f} ms  "
        f"{clock} MHz",
        flush=True,
    )


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 2.0
    meter = Meter()
    random = torch.Generator("cuda").manual_seed(0)
    total = sum(DOCUMENTS)

    def normal(*shape):
        return torch.randn(1, total, *shape, generator=random, device="cuda")

    x = [torch.nn.functional.normalize(normal(H, D), dim=-1) for _ in range(2)] + [normal(HV, D)]
    x = [t.to(torch.bfloat16) for t in x]
    # model gates: -A softplus(normal + bias), A uniform in [1, 16), softplus(bias) log-uniform in
    # [1e-3, 1e-1]
    a = 1 + 15 * torch.rand(HV, generator=random, device="cuda")
    step = torch.exp(torch.rand(HV, generator=random, device="cuda") * 4.6 - 6.9)
    x += [-a * torch.nn.functional.softplus(normal(HV) + torch.log(torch.expm1(step))), normal(HV).sigmoid()]
    x = [t.requires_grad_() for t in x]
    do = normal(HV, D).to(torch.bfloat16)
    cu = torch.tensor([0, *DOCUMENTS]).cumsum(0)
    context = gdn_kcp.build_context(gdn_kcp.partition(cu, 1), None, 0, "cuda")
    plain = [t.detach() for t in x]

    def forward():
        gdn_kcp.chunk_gdn_kcp(*plain, context)

    o = gdn_kcp.chunk_gdn_kcp(*x, context)
    kept = gdn_kcp.chunk_gdn_kcp(*x, context, save_mode="light_akk")
    measure(meter, "forward", forward, seconds)
    for name, made in (("backward", o), ("backward, prepared data kept", kept)):
        measure(meter, name, lambda: torch.autograd.grad(made, x, do, retain_graph=True), seconds)


if __name__ == "__main__":
    main()
