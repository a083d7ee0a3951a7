"""Our safetensors reader and writer against the format's own library.

Usage: safetensors_python_test.py PATH_OF_safetensors_probe
Exits with 77 (skipped) where the packages safetensors and numpy are not installed.
"""

import random
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

try:
    import numpy as np
    from safetensors import SafetensorError, deserialize, safe_open
    from safetensors.numpy import load_file, save_file
except ImportError as why:
    print(f"skipped: {why} (python -m pip install safetensors numpy)")
    sys.exit(77)

PROBE = sys.argv[1]

# What the library takes and we refuse on purpose, by our words for it: the format's text forbids it
# or other readers disagree about it.
STRICTER = (
    "is given twice",
    "header must begin with '{'",
    "expected an object, found an array",  # a tensor's fields as a list
    "expected a string, found an object",  # a dtype as {"F32": null}
    "more than 2^63 bits",
    "too large",
    "nested too deeply",
    "not valid JSON",  # in the values of unknown keys the two JSON readers differ
)


def probe(pairs):
    """Our verdict ("ok" or the refusal) for every (in, out)."""
    lines = "".join(f"{a} {b}\n" for a, b in pairs)
    done = subprocess.run([PROBE], input=lines.encode(), capture_output=True, check=True)
    answers = done.stdout.decode("utf-8", "replace").split("\n")[:-1]
    assert len(answers) == len(pairs), (len(answers), len(pairs))
    return answers


def bf16_file(path, shape, raw):
    header = b'{"x":{"dtype":"BF16","shape":%s,"data_offsets":[0,%d]}}' % (
        str(list(shape)).encode(), len(raw))
    path.write_bytes(struct.pack("<Q", len(header)) + header + raw)


def test_round_trip(folder):
    rng = np.random.default_rng(0)
    tensors = {
        "f32": rng.standard_normal((3, 4, 5)).astype(np.float32),
        "f64": rng.standard_normal((7,)),
        "i32": rng.integers(-9, 9, (2, 2, 2, 2), dtype=np.int32),
        "i64": rng.integers(-9, 9, (5, 1)),
        "no rows": np.zeros((0, 4), np.float32),
        "\u00e9 \"\\\n": np.arange(3, dtype=np.int64),
    }
    save_file(tensors, folder / "in", metadata={"note": "caf\u00e9"})
    assert probe([(folder / "in", folder / "out")]) == ["ok"]
    back = load_file(folder / "out")
    assert back.keys() == tensors.keys()
    for name, value in tensors.items():
        assert back[name].dtype == value.dtype and back[name].shape == value.shape, name
        assert back[name].tobytes() == value.tobytes(), name
    with safe_open(folder / "out", "np") as f:
        assert f.metadata() == {"note": "caf\u00e9"}

    raw = bytes(range(24))
    bf16_file(folder / "in16", (3, 4), raw)
    assert probe([(folder / "in16", folder / "out16")]) == ["ok"]
    [(name, info)] = deserialize((folder / "out16").read_bytes())
    assert (name, info["dtype"], list(info["shape"])) == ("x", "BF16", [3, 4])
    assert bytes(info["data"]) == raw


def mutants(count):
    pick = random.Random(7)
    good = '{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},' \
           '"b":{"dtype":"BF16","shape":[1,4],"data_offsets":[8,16]}}'
    pieces = ["[", "]", "{", "}", ",", ":", '"', "-1", "1e9", "null", "true", "0", "8", "16", " ",
              "18446744073709551615", '"dtype":"F64"', '"shape":[0]', '"data_offsets":[0,0]',
              '"__metadata__":{}', '"x":[[1]]', "F16", "I64", "[8,8]", '"a"', "\\u0061", "\x01"]
    for _ in range(count):
        header = good
        for _ in range(pick.randint(0, 3)):
            at = pick.randrange(len(header) + 1)
            kind = pick.randrange(3)
            if kind == 0:
                header = header[:at] + pick.choice(pieces) + header[at:]
            elif kind == 1:
                header = header[:at] + header[at + pick.randint(1, 12):]
            else:
                digits = [i for i, c in enumerate(header) if c.isdigit()] or [0]
                i = pick.choice(digits)
                header = header[:i] + str(pick.randrange(20)) + header[i + 1:]
        raw = header.encode()
        data = bytes(pick.choice([16, 16, 16, 8, 17, 0]))
        yield struct.pack("<Q", len(raw)) + raw + data


def test_same_verdict_on_mutants(folder):
    files = list(mutants(3000))
    for i, raw in enumerate(files):
        (folder / f"m{i}").write_bytes(raw)
    verdicts = probe([(folder / f"m{i}", "-") for i in range(len(files))])
    both = 0
    for raw, ours in zip(files, verdicts):
        try:
            deserialize(raw)
            theirs = True
        except SafetensorError:
            theirs = False
        both += theirs and ours == "ok"
        if ours == "ok":
            assert theirs, f"we accept, the library does not: {raw!r}"
        elif theirs:
            assert any(words in ours for words in STRICTER), f"we refuse ({ours}): {raw!r}"
    assert both > 300, both


with tempfile.TemporaryDirectory() as name:
    test_round_trip(Path(name))
    test_same_verdict_on_mutants(Path(name))
print("passed")
