"""The barriers of k_backward (src/backend/cuda/sm90/backward_shared.cuh), played by its roles in random
order and with random delays: does every order end?

An mbarrier tells phases apart by parity alone. A role that waits for a phase without being waited for
before the next one can complete may come two phases late, takes the newer for an older one, and waits for
ever. That happens once in millions of chunks on a GPU and in most runs here.

Usage: python lab/sm90/backward_protocol.py [orders to try]
"""

import random
import sys

WARP, GROUP, STATE = 32, 128, 256  # threads that arrive

COUNTS = {
    "keys_full": 1, "keys_empty": STATE + GROUP + 2 * WARP, "factors_full": WARP,
    "q_full": 1, "q_empty": STATE + GROUP + WARP,
    "values_full": 1, "values_empty": STATE + WARP,
    "d_o_full": 1, "d_o_empty": STATE + WARP,
    "d_v_full": 1, "d_v_empty": STATE + GROUP + WARP,
    "dstates_full": 1, "dstates_empty": GROUP + WARP,
    "states_ready": STATE, "states_empty": STATE + GROUP + WARP,
    "e_ready": STATE, "e_empty": WARP,
    "dp_ready": GROUP, "n_ready": GROUP, "squares_empty": STATE + GROUP,
    "sums_full": STATE + GROUP + WARP, "sums_empty": WARP,
    "dq_full": STATE, "dq_empty": WARP, "dk_full": GROUP,
}  # fmt: skip
STAGED = {"keys_full", "keys_empty", "factors_full"}  # one per turn


class Barrier:
    def __init__(self, count):
        self.count = self.pending = count
        self.phase = 0

    def arrive(self, threads):
        self.pending -= threads
        assert self.pending >= 0, "more arrivals than a phase has"
        if self.pending == 0:
            self.phase += 1
            self.pending = self.count

    def passed(self, parity):
        return self.phase % 2 != parity


def full(name, turn):
    """Waits until `name` of this turn is there."""
    return ("wait", name, turn, turn // 2 % 2 if name in STAGED else turn % 2)


def empty(name, turn):
    """Waits until what `name` guards has been read in the turn before."""
    return ("wait", name, turn, (turn // 2 + 1) % 2 if name in STAGED else (turn + 1) % 2)


def arrive(name, turn, threads):
    return ("arrive", name, turn, threads)


def fill(turns, by_hand, short):
    copies = ["keys", "values", "d_v", "dstates", "d_o", "q"]
    for t in range(turns):
        for name in copies:
            if name == "d_o" and by_hand:
                continue
            yield empty(name + "_empty", t)
            yield arrive(name + "_full", t, 1)


def factors(turns, by_hand, short):
    for t in range(turns):
        yield full("keys_full", t)
        if not short[t]:
            yield arrive("factors_full", t, WARP)
        if by_hand:
            yield empty("d_o_empty", t)
            yield arrive("d_o_full", t, 1)
        for name in ("values", "d_v", "d_o", "q"):
            yield full(name + "_full", t)
        if short[t]:
            yield arrive("factors_full", t, WARP)
        for name in ("values", "d_v", "d_o", "q"):
            yield arrive(name + "_empty", t, WARP)
        yield full("states_ready", t)
        yield full("dstates_full", t)
        for name in ("states_empty", "dstates_empty", "sums_full", "keys_empty"):
            yield arrive(name, t, WARP)


def rows_out(turns, by_hand, short):
    for t in range(turns):
        yield full("dk_full", t)
        yield arrive("e_empty", t, WARP)
        yield full("dq_full", t)
        yield arrive("dq_empty", t, WARP)


def scalars(turns, by_hand, short):
    for t in range(turns):
        yield full("keys_full", t)
        yield full("sums_full", t)
        yield arrive("sums_empty", t, WARP)
        yield arrive("keys_empty", t, WARP)


def state(turns, by_hand, short, is_n):
    for t in range(turns):
        yield full("keys_full", t)
        yield full("factors_full", t)
        yield empty("states_empty", t)
        yield arrive("states_ready", t, GROUP)
        yield full("values_full", t)
        yield arrive("values_empty", t, GROUP)
        yield empty("e_empty", t)
        yield arrive("e_ready", t, GROUP)
        yield full("d_v_full", t)
        yield empty("sums_empty", t)
        yield empty("squares_empty", t)
        for name in ("d_o_full", "q_full", "e_ready"):
            yield full(name, t)
        yield arrive("n_ready" if is_n else "dp_ready", t, GROUP)
        yield arrive("d_v_empty", t, GROUP)
        for name in ("d_o_empty", "states_empty", "sums_full"):
            yield arrive(name, t, GROUP)
        yield full("dp_ready", t)
        for name in ("squares_empty", "keys_empty", "q_empty"):
            yield arrive(name, t, GROUP)
        yield empty("dq_empty", t)
        yield arrive("dq_full", t, GROUP)


def gradients(turns, by_hand, short):
    for t in range(turns):
        for name in ("keys_full", "factors_full", "d_v_full", "states_ready"):
            yield full(name, t)
        yield arrive("d_v_empty", t, GROUP)
        yield arrive("states_empty", t, GROUP)
        yield empty("sums_empty", t)
        yield full("e_ready", t)
        yield full("dstates_full", t)
        yield arrive("dstates_empty", t, GROUP)
        yield arrive("sums_full", t, GROUP)
        for name in ("q_full", "dp_ready", "n_ready"):
            yield full(name, t)
        for name in ("squares_empty", "q_empty", "dk_full", "keys_empty"):
            yield arrive(name, t, GROUP)


def play(seed, turns=12):
    """What every role waits for when none can go on; empty if all ended."""
    rng = random.Random(seed)
    by_hand = seed % 2 == 1  # d_o is copied by a warp
    short = [rng.random() < 0.3 for _ in range(turns)]
    args = (turns, by_hand, short)
    roles = {
        "fill": fill(*args), "factors": factors(*args), "rows out": rows_out(*args),
        "scalars": scalars(*args), "state 0": state(*args, is_n=False),
        "state 1": state(*args, is_n=True), "gradients": gradients(*args),
    }  # fmt: skip
    barriers = {}
    for name, count in COUNTS.items():
        for stage in (0, 1) if name in STAGED else (0,):
            barriers[name, stage] = Barrier(count)
    at = {role: next(steps) for role, steps in roles.items()}
    speed = dict.fromkeys(roles, 1.0)
    step = 0
    while at:
        step += 1
        if step % 40 == 0:
            speed = {role: rng.choice([0.01, 1, 1, 1]) for role in roles}
        ready = []
        for role, (kind, name, turn, value) in at.items():
            barrier = barriers[name, turn % 2 if name in STAGED else 0]
            if kind == "arrive" or barrier.passed(value):
                ready.append((role, kind, barrier, value))
        if not ready:
            return {role: name for role, (_, name, _, _) in at.items()}
        role, kind, barrier, value = rng.choices(ready, [speed[r[0]] for r in ready])[0]
        if kind == "arrive":
            barrier.arrive(value)
        try:
            at[role] = next(roles[role])
        except StopIteration:
            del at[role]
    return {}


def main():
    orders = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    stuck = {seed: where for seed in range(orders) if (where := play(seed))}
    for seed, where in list(stuck.items())[:3]:
        print(f"order {seed} ends with everyone waiting: {where}")
    print(f"{orders - len(stuck)} of {orders} orders ended")
    sys.exit(1 if stuck else 0)


if __name__ == "__main__":
    main()
