"""Kernels in Triton for recurrent layers; `recurrent_cells.py` imports this where it is needed.

They are for contiguous tensors (directions, times, rows, ...) of float32.
"""
# Kernels are a language of their own: arguments have no types, and sizes are in capitals.
# mypy: ignore-errors
# ruff: noqa: N803

import triton
import triton.language as tl


@triton.jit
def _tanh(values):
    small = tl.exp(-2.0 * tl.abs(values))
    size = (1.0 - small) / (1.0 + small)
    return tl.where(values < 0, -size, size)


@triton.jit(do_not_specialize=["ROWS"])
def lstm_cell(
    gates,
    recurrent,
    cells,
    active,
    next_cells,
    squashed,
    states,
    ROWS,
    WIDTH,
    GATES_APART,
    STATES_APART,
    SQUASHED_APART,
    COUNT,
    BLOCK: tl.constexpr,
):
    """One time of an LSTM: gates before and after activation, cells, and states."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = entry < COUNT
    direction, row = entry // (ROWS * WIDTH), (entry // WIDTH) % ROWS
    column = entry % WIDTH
    gate = direction.to(tl.int64) * GATES_APART + row * (4 * WIDTH) + column
    other = direction * (ROWS * 4 * WIDTH) + row * (4 * WIDTH) + column
    state = direction.to(tl.int64) * STATES_APART + row * WIDTH + column
    flat = direction.to(tl.int64) * SQUASHED_APART + row * WIDTH + column
    enter = tl.load(gates + gate, mask=there) + tl.load(recurrent + other, mask=there)
    keep = tl.load(gates + gate + WIDTH, mask=there)
    keep += tl.load(recurrent + other + WIDTH, mask=there)
    fresh = tl.load(gates + gate + 2 * WIDTH, mask=there)
    fresh += tl.load(recurrent + other + 2 * WIDTH, mask=there)
    leave = tl.load(gates + gate + 3 * WIDTH, mask=there)
    leave += tl.load(recurrent + other + 3 * WIDTH, mask=there)
    enter, keep, leave = tl.sigmoid(enter), tl.sigmoid(keep), tl.sigmoid(leave)
    fresh = _tanh(fresh)
    cell = keep * tl.load(cells + state, mask=there) + enter * fresh
    small = _tanh(cell)
    tl.store(active + gate, enter, mask=there)
    tl.store(active + gate + WIDTH, keep, mask=there)
    tl.store(active + gate + 2 * WIDTH, fresh, mask=there)
    tl.store(active + gate + 3 * WIDTH, leave, mask=there)
    tl.store(next_cells + state, cell, mask=there)
    tl.store(squashed + flat, small, mask=there)
    tl.store(states + state, leave * small, mask=there)


@triton.jit(do_not_specialize=["ROWS"])
def lstm_cell_backward(
    outputs,
    recurrent,
    active,
    cells,
    squashed,
    slope,
    gates,
    ROWS,
    WIDTH,
    GATES_APART,
    STATES_APART,
    SQUASHED_APART,
    COUNT,
    LAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradients of the gates before activation at one time; `slope` is that of the cell."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = entry < COUNT
    direction, row = entry // (ROWS * WIDTH), (entry // WIDTH) % ROWS
    column = entry % WIDTH
    gate = direction.to(tl.int64) * GATES_APART + row * (4 * WIDTH) + column
    state = direction.to(tl.int64) * STATES_APART + row * WIDTH + column
    flat = direction.to(tl.int64) * SQUASHED_APART + row * WIDTH + column
    hidden = tl.load(outputs + flat, mask=there)
    if not LAST:
        hidden += tl.load(recurrent + entry, mask=there)
    enter = tl.load(active + gate, mask=there)
    keep = tl.load(active + gate + WIDTH, mask=there)
    fresh = tl.load(active + gate + 2 * WIDTH, mask=there)
    leave = tl.load(active + gate + 3 * WIDTH, mask=there)
    small = tl.load(squashed + flat, mask=there)
    cell = tl.load(slope + entry, mask=there) + hidden * leave * (1.0 - small * small)
    before = tl.load(cells + state, mask=there)
    tl.store(gates + gate, cell * fresh * enter * (1.0 - enter), mask=there)
    tl.store(gates + gate + WIDTH, cell * before * keep * (1.0 - keep), mask=there)
    tl.store(gates + gate + 2 * WIDTH, cell * enter * (1.0 - fresh * fresh), mask=there)
    tl.store(gates + gate + 3 * WIDTH, hidden * small * leave * (1.0 - leave), mask=there)
    tl.store(slope + entry, cell * keep, mask=there)
