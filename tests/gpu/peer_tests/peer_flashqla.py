"""pytest plugin for FlashQLA's tests of the gated delta rule, beside the stand-ins of flashqla/.

PEER_TESTS_DEVICE (default cuda) says where, PEER_TESTS_ITERATIONS (default 100) how often the tests
of determinism call.
"""

import os

import peer_outcomes


def pytest_configure(config):
    for marker in ("gpu", "slow"):
        config.addinivalue_line("markers", f"{marker}: the peer's own mark")


def pytest_collection_modifyitems(items):
    iterations = int(os.environ.get("PEER_TESTS_ITERATIONS", "100"))
    for module in {item.module for item in items}:
        module.DEVICE = os.environ.get("PEER_TESTS_DEVICE", "cuda")
        own, module.DETERMINISM_ITERS = module.DETERMINISM_ITERS, iterations
        peer_outcomes.compare_on(module, "_assert_relative")
        peer_outcomes.notes.append(f"{iterations} calls, not {own}, in the tests of determinism")
