# SPDX-License-Identifier: Apache-2.0
"""The parts of benchmarks/peers.py. Nothing is imported here: peers run in other environments."""
