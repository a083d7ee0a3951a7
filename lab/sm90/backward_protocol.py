"""The barriers of k_backward (src/backend/cuda/sm90/backward_shared.cuh), played by its roles in random
order and with random delays: does every order end?

An mbarrier tells phases apart by parity alone. A role that waits for a phase without being waited for
before the next one can complete may come two phases late, takes the newer for an older one, and waits for
ever. That happens once in millions of chunks on a GPU and in most runs here.

Usage: python lab/sm90/backward_protocol.py [orders to try]
"""

import random
import sys

WARP, GROUP = 32, 128  # threads that arrive
STATE = GRADIENTS = 2 * GROUP

COUNTS = {
    "keys_full": 1, "before_full": 1, "before_read": STATE, "keys_empty": STATE + GRADIENTS + 3 * WARP, "factors_full": WARP,
    "values_full": 1, "values_empty": STATE + GRADIENTS + WARP,
    "d_o_full": 1, "d_o_empty": 2 * WARP,  # full: one more when d_o is copied by a warp
    "d_v_full": 1, "d_v_empty": STATE + GRADIENTS + WARP,
    "dstates_full": 1, "dstates_read": STATE + GRADIENTS,
    "states_ready": STATE, "states_empty": STATE + GRADIENTS,
    "e_ready": STATE, "c_e_empty": GRADIENTS,
    "squares_ready": STATE + GRADIENTS, "squares_empty": STATE + GRADIENTS,
    "sums_full": STATE + GRADIENTS, "sums_empty": WARP,
    "dq_full": STATE, "dk_full": GRADIENTS,
}  # fmt: skip
STAGED = {"keys_full", "keys_empty", "factors_full", "dk_full"}  # one per turn


# In clocks, about as measured by clock64 stamps on an H200.
CLOCKS = {
    "copy": 1500, "store": 1300, "release": 4000, "factors": 600, "sums": 900, "scalars": 2500,
    "image": 500, "K S": 900, "Y, W": 1400, "E": 900, "dots, S": 900, "state_dot": 800,
    "square": 2500, "pairs": 2300, "dO S": 1000, "dots": 900, "dP K": 500, "dY S": 900, "E dS": 850,
    "squares K": 650, "rows": 800,
}  # fmt: skip


class Barrier:
    def __init__(self, count):
        self.count = self.pending = count
        self.phase = 0

    def arrive(self, threads, phase):
        assert phase == self.phase, f"arrives for phase {phase} in phase {self.phase}"
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


def work(clocks):
    return ("work", "", 0, clocks)


def fill(turns, by_hand, short):
    for t in range(turns):
        for name in ("keys", "values", "d_v", "d_o", "dstates"):
            if name == "d_o":  # and q, in the place of the rows before
                yield empty("before_read", t)
            yield empty("dstates_read" if name == "dstates" else name + "_empty", t)
            yield ("copy", name + "_full", t, 1)


def factors(turns, by_hand, short):
    for t in range(turns):
        yield full("keys_full", t)
        yield work(CLOCKS["factors"])
        if not short[t]:
            yield arrive("factors_full", t, WARP)
        if by_hand:
            yield empty("d_o_empty", t)
            yield arrive("d_o_full", t, 1)
        for name in ("values", "d_v", "d_o"):
            yield full(name + "_full", t)
        if short[t]:
            yield arrive("factors_full", t, WARP)
        for name in ("values", "d_v", "d_o"):
            yield arrive(name + "_empty", t, WARP)
        yield arrive("keys_empty", t, WARP)
        # Of a block that others of its group come before.
        yield empty("keys_empty", t + 1)
        yield ("copy", "before_full", t, 1)


def rows_out(turns, by_hand, short):
    for t in range(turns):
        for rows, place in (("dq", "d_o"), ("dk", "keys")):
            yield full(rows + "_full", t)
            yield work(CLOCKS["store"])
            yield arrive(place + "_empty", t, WARP)
        yield work(CLOCKS["release"])  # for the next block of the group


def scalars(turns, by_hand, short):
    for t in range(turns):
        yield full("keys_full", t)
        yield arrive("keys_empty", t, WARP)
        yield full("sums_full", t)
        yield work(CLOCKS["sums"])
        yield arrive("sums_empty", t, WARP)
        yield work(CLOCKS["scalars"])


def state(turns, by_hand, short):
    for t in range(turns):
        yield full("factors_full", t)
        yield empty("states_empty", t)
        yield work(CLOCKS["image"])
        yield arrive("states_ready", t, GROUP)
        yield work(CLOCKS["K S"])
        yield full("values_full", t)
        yield work(CLOCKS["Y, W"])
        yield empty("c_e_empty", t)
        yield work(CLOCKS["E"])
        for name in ("e_ready", "values_empty"):
            yield arrive(name, t, GROUP)
        yield full("d_v_full", t)
        yield empty("sums_empty", t)
        yield work(CLOCKS["dots, S"])
        yield arrive("d_v_empty", t, GROUP)
        yield full("d_o_full", t)
        yield full("states_ready", t)
        yield work(CLOCKS["dO S"])
        yield arrive("squares_ready", t, GROUP)
        yield work(CLOCKS["dots"])
        yield empty("sums_empty", t)
        yield arrive("states_empty", t, GROUP)
        yield full("dstates_full", t)
        yield work(CLOCKS["state_dot"])
        for name in ("dstates_read", "sums_full"):
            yield arrive(name, t, GROUP)
        yield full("squares_ready", t)
        yield work(CLOCKS["dP K"])
        yield arrive("squares_empty", t, GROUP)
        yield full("before_full", t)
        yield arrive("before_read", t, GROUP)
        yield work(CLOCKS["rows"])
        yield arrive("dq_full", t, GROUP)
        yield arrive("keys_empty", t, GROUP)


def gradients(turns, by_hand, short):
    for t in range(turns):
        yield full("factors_full", t)
        for name in ("d_o_full", "d_v_full", "e_ready"):
            yield full(name, t)
        yield work(CLOCKS["square"])
        yield arrive("values_empty", t, GROUP)
        yield arrive("squares_ready", t, GROUP)
        yield empty("sums_empty", t)
        yield work(CLOCKS["pairs"])
        yield work(CLOCKS["dY S"])
        yield arrive("d_v_empty", t, GROUP)
        yield arrive("states_empty", t, GROUP)
        yield work(CLOCKS["dots"])
        yield full("dstates_full", t)
        yield work(CLOCKS["E dS"])
        for name in ("c_e_empty", "dstates_read"):
            yield arrive(name, t, GROUP)
        yield work(CLOCKS["dots"])
        yield arrive("sums_full", t, GROUP)
        yield full("squares_ready", t)
        yield work(CLOCKS["squares K"])
        yield arrive("squares_empty", t, GROUP)
        yield full("squares_empty", t)
        yield work(CLOCKS["rows"])
        yield arrive("dk_full", t, GROUP)
        yield arrive("keys_empty", t, GROUP)


def make_roles(*args):
    return {
        "fill": fill(*args), "factors": factors(*args), "rows out": rows_out(*args),
        "scalars": scalars(*args), "state 0": state(*args), "state 1": state(*args),
        "gradients 0": gradients(*args), "gradients 1": gradients(*args),
    }  # fmt: skip


def stage_of(name, turn):
    return turn % 2 if name in STAGED else 0


def phase_of(name, turn):
    return turn // 2 if name in STAGED else turn


def make_barriers(by_hand):
    return {
        (name, stage): Barrier(count + (by_hand and name == "d_o_full"))
        for name, count in COUNTS.items()
        for stage in ((0, 1) if name in STAGED else (0,))
    }


def play(seed, turns=12):
    """What every role waits for when none can go on; empty if all ended."""
    rng = random.Random(seed)
    by_hand = seed % 2 == 1  # d_o is copied by a warp
    roles = make_roles(turns, by_hand, [rng.random() < 0.3 for _ in range(turns)])
    barriers = make_barriers(by_hand)
    at = {role: next(steps) for role, steps in roles.items()}
    speed = dict.fromkeys(roles, 1.0)
    step = 0
    while at:
        step += 1
        if step % 40 == 0:
            speed = {role: rng.choice([0.01, 1, 1, 1]) for role in roles}
        ready = []
        for role, (kind, name, turn, value) in at.items():
            barrier = barriers.get((name, stage_of(name, turn)))
            if kind != "wait" or barrier.passed(value):
                ready.append((role, kind, barrier, value, phase_of(name, turn)))
        if not ready:
            return {role: name for role, (_, name, _, _) in at.items()}
        role, kind, barrier, value, phase = rng.choices(ready, [speed[r[0]] for r in ready])[0]
        if kind in ("arrive", "copy"):
            barrier.arrive(value, phase)
        try:
            at[role] = next(roles[role])
        except StopIteration:
            del at[role]
    return {}


def clocks_per_chunk(turns=60):
    """Of a model with the times of CLOCKS, and how long each role works and waits for what."""
    roles = make_roles(turns, False, [False] * turns)
    barriers = make_barriers(False)
    events = [(0, i, role) for i, role in enumerate(roles)]  # when a role goes on
    waiting = {}
    waited = {}
    copies = []
    now = 0
    while events or copies:
        events.sort()
        copies.sort()
        if copies and (not events or copies[0][0] <= events[0][0]):
            now, name, turn = copies.pop(0)
            barriers[name, stage_of(name, turn)].arrive(1, phase_of(name, turn))
        else:
            now, i, role = events.pop(0)
            try:
                kind, name, turn, value = next(roles[role])
            except StopIteration:
                continue
            if kind == "work":
                events.append((now + value, i, role))
                continue
            if kind == "copy":
                copies.append((now + CLOCKS["copy"], name, turn))
                events.append((now + 20, i, role))
                continue
            if kind == "arrive":
                barriers[name, stage_of(name, turn)].arrive(value, phase_of(name, turn))
                events.append((now, i, role))
            else:
                waiting[role] = (i, name, turn, value, now)
        for role, (i, name, turn, value, since) in list(waiting.items()):
            if barriers[name, stage_of(name, turn)].passed(value):
                del waiting[role]
                key = (role, name)
                waited[key] = waited.get(key, 0) + now - since
                events.append((now + 20, i, role))
    for (role, name), total in sorted(waited.items(), key=lambda x: -x[1]):
        if total > 100 * turns and role in ("state 0", "gradients 0"):
            print(f"  {role} waits {total / turns:.0f} clocks a chunk for {name}")
    return now / turns


def main():
    orders = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    stuck = {seed: where for seed in range(orders) if (where := play(seed))}
    for seed, where in list(stuck.items())[:3]:
        print(f"order {seed} ends with everyone waiting: {where}")
    print(f"{orders - len(stuck)} of {orders} orders ended")
    print(f"{clocks_per_chunk():.0f} clocks a chunk, by the times above")
    sys.exit(1 if stuck else 0)


if __name__ == "__main__":
    main()
