"""Kernels in Triton, which is not everywhere: `fused.py` imports this where it is needed.

They are for contiguous tensors. Sums are made in float32 and in one order, the same every time.
Compiling a kernel takes a third of a second, and a first step waits for it. So what a kernel does
not gain by is not specialised: numbers of examples, the sizes of windows, margins.
"""
# Kernels are a language of their own: arguments have no types, and sizes are in capitals.
# mypy: ignore-errors
# ruff: noqa: N803

import triton
import triton.language as tl


@triton.jit
def rounded(values):
    """To the 10 bits of TF32, to nearest; NaN stays what it is."""
    bits = (values.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
    return tl.where(values != values, values, bits.to(tl.float32, bitcast=True))


@triton.jit
def narrowed(values, KIND: tl.constexpr):
    """Rounded to bfloat16 or, where the kind is float32, to TF32."""
    if KIND == tl.bfloat16:  # noqa: SIM300
        return values.to(tl.bfloat16)
    else:  # noqa: RET505  only one branch is compiled
        return rounded(values)


@triton.jit(do_not_specialize=["ROWS", "WIDTH", "FIRST", "POSITIONS"])
def split_matrix(
    values,
    factors,
    out,
    ROWS,
    WIDTH,
    STRIDE,
    FIRST,
    POSITIONS,
    LENGTH,
    FACTORED: tl.constexpr,
    SCALED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    PARTS: tl.constexpr,
    SMALL: tl.constexpr,
    DOWN: tl.constexpr,
    ALONG: tl.constexpr,
):
    """A matrix, or its transpose, as rounded numbers and the rounded rest of them.

    Numbers are rounded to TF32, or to bfloat16 if that is the type of the result. A row of it holds
    `LENGTH` numbers, the last ones zero, as often as there are `PARTS`: as the rest where the bit
    of the part is set in `SMALL`, else as what was rounded. With factors, `POSITIONS` rows share
    one, counted from `FIRST`, and rows whose factor is zero are not read.
    """
    row = tl.program_id(0) * DOWN + tl.arange(0, DOWN)
    column = tl.program_id(1) * ALONG + tl.arange(0, ALONG)
    there = (row < ROWS)[:, None] & (column < WIDTH)[None, :]
    if FACTORED:
        factor = tl.load(factors + (FIRST + row) // POSITIONS, mask=row < ROWS, other=0.0)
        there = there & (factor != 0.0)[:, None]
    at = row.to(tl.int64)[:, None] * STRIDE + column[None, :]
    value = tl.load(values + at, mask=there, other=0.0).to(tl.float32)
    if SCALED:
        value = tl.where(there, value * factor[:, None], 0.0)
    large = narrowed(value, out.dtype.element_ty)
    small = narrowed(value - large.to(tl.float32), out.dtype.element_ty)
    if TRANSPOSED:
        inside = (column < WIDTH)[None, :] & (row < LENGTH)[:, None]
        place = column.to(tl.int64)[None, :] * (PARTS * LENGTH) + row[:, None]
    else:
        inside = (row < ROWS)[:, None] & (column < LENGTH)[None, :]
        place = row.to(tl.int64)[:, None] * (PARTS * LENGTH) + column[None, :]
    for part in tl.static_range(PARTS):
        if (SMALL >> part) & 1:
            tl.store(out + place + part * LENGTH, small, mask=inside)
        else:
            tl.store(out + place + part * LENGTH, large, mask=inside)


@triton.jit(do_not_specialize=["HIGH", "WIDE", "TOP", "LEFT", "PADDED_HIGH"])
def pad_and_round(
    inputs, out, HIGH, WIDE, TOP, LEFT, PADDED_HIGH, PADDED_WIDE, BLOCK: tl.constexpr
):
    """Maps with zeros around them, rounded to TF32 or to bfloat16, whichever the result holds.

    A program takes a part of one map.
    """
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    high, wide = place // PADDED_WIDE - TOP, place % PADDED_WIDE - LEFT
    inside = (high >= 0) & (high < HIGH) & (wide >= 0) & (wide < WIDE)
    values = tl.load(inputs + row * HIGH * WIDE + high * WIDE + wide, mask=inside, other=0.0)
    size = PADDED_HIGH * PADDED_WIDE
    narrow = narrowed(values.to(tl.float32), out.dtype.element_ty)
    tl.store(out + row * size + place, narrow, mask=place < size)


@triton.jit(
    do_not_specialize=[
        "HEIGHT",
        "TILES",
        "KERNEL_HIGH",
        "KERNEL_WIDE",
        "DILATED_DOWN",
        "DILATED_ALONG",
    ]
)
def convolution_rows(
    inputs,
    outputs,
    rows,
    squares,
    CHANNELS,
    MAP,
    PADDED_WIDE,
    HEIGHT,
    PLACES,
    WIDE,
    TILES,
    KERNEL_HIGH,
    KERNEL_WIDE,
    DOWN: tl.constexpr,
    ALONG: tl.constexpr,
    DILATED_DOWN,
    DILATED_ALONG,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    STEP: tl.constexpr,
):
    """Gradient of a kernel for every example, and the squared norm of every tile of it.

    A product of matrices: output channels by entries of the kernel, summed over places. Inputs are
    padded and rounded (`pad_and_round`), outputs are rounded here, to the same type. Gradients are
    stored in the type of `rows`, and norms are those of what is stored. Tiles of one example run
    beside each other, so that they find it in the cache.
    """
    program = tl.program_id(0).to(tl.int64)
    example, tile = program // TILES, (program % TILES).to(tl.int32)
    width = CHANNELS * KERNEL_HIGH * KERNEL_WIDE
    across = tl.cdiv(width, IN)
    out = (tile // across) * OUT + tl.arange(0, OUT)
    column = (tile % across) * IN + tl.arange(0, IN)
    entry = tl.where(column < width, column, 0)
    channel, rest = entry // (KERNEL_HIGH * KERNEL_WIDE), entry % (KERNEL_HIGH * KERNEL_WIDE)
    down, along = rest // KERNEL_WIDE, rest % KERNEL_WIDE
    start = channel * MAP + down * DILATED_DOWN * PADDED_WIDE + along * DILATED_ALONG
    inputs += example * CHANNELS * MAP
    outputs += example * HEIGHT * PLACES
    total = tl.zeros((OUT, IN), tl.float32)
    for first in range(0, PLACES, STEP):
        place = first + tl.arange(0, STEP)
        real = place < PLACES
        shift = (place // WIDE) * (DOWN * PADDED_WIDE) + (place % WIDE) * ALONG
        shift = tl.where(real, shift, 0)
        slope = tl.load(
            outputs + out[:, None] * PLACES + place[None, :],
            mask=(out < HEIGHT)[:, None] & real[None, :],
            other=0.0,
        )
        seen = tl.load(inputs + start[:, None] + shift[None, :])
        slope = narrowed(slope.to(tl.float32), inputs.dtype.element_ty)
        total = tl.dot(slope, tl.trans(seen), total, input_precision="tf32")
    there = (out < HEIGHT)[:, None] & (column < width)[None, :]
    where = example * HEIGHT * width + out[:, None] * width + column[None, :]
    stored = total.to(rows.dtype.element_ty)
    tl.store(rows + where, stored, mask=there)
    total = tl.where(there, stored.to(tl.float32), 0.0)
    tl.store(squares + program, tl.sum(total * total))


@triton.jit(
    do_not_specialize=[
        "MULTIPLE",
        "HIGH",
        "BROAD",
        "WIDE",
        "KERNEL_HIGH",
        "KERNEL_WIDE",
        "DOWN",
        "ALONG",
        "DILATED_DOWN",
        "DILATED_ALONG",
        "MARGIN_DOWN",
        "MARGIN_ALONG",
    ]
)
def depthwise_rows(
    inputs,
    outputs,
    rows,
    squares,
    MULTIPLE,
    HIGH,
    BROAD,
    PLACES,
    WIDE,
    KERNEL_HIGH,
    KERNEL_WIDE,
    DOWN,
    ALONG,
    DILATED_DOWN,
    DILATED_ALONG,
    MARGIN_DOWN,
    MARGIN_ALONG,
    ENTRIES: tl.constexpr,
    STEP: tl.constexpr,
):
    """Gradient of a kernel that sees one channel, for every example and output channel.

    Every entry of the kernel is the sum over places of an output gradient times the input that the
    entry has met there. `MULTIPLE` output channels share an input channel. Nothing is rounded.
    """
    program = tl.program_id(0).to(tl.int64)
    inputs += program // MULTIPLE * HIGH * BROAD
    outputs += program * PLACES
    entry = tl.arange(0, ENTRIES)
    count = KERNEL_HIGH * KERNEL_WIDE
    below = (entry // KERNEL_WIDE) * DILATED_DOWN - MARGIN_DOWN
    beside = (entry % KERNEL_WIDE) * DILATED_ALONG - MARGIN_ALONG
    total = tl.zeros((ENTRIES,), tl.float32)
    for first in range(0, PLACES, STEP):
        place = first + tl.arange(0, STEP)
        slope = tl.load(outputs + place, mask=place < PLACES, other=0.0).to(tl.float32)
        row = below[:, None] + ((place // WIDE) * DOWN)[None, :]
        column = beside[:, None] + ((place % WIDE) * ALONG)[None, :]
        inside = (row >= 0) & (row < HIGH) & (column >= 0) & (column < BROAD)
        inside = inside & (place < PLACES)[None, :] & (entry < count)[:, None]
        seen = tl.load(inputs + row * BROAD + column, mask=inside, other=0.0).to(tl.float32)
        total += tl.sum(seen * slope[None, :], 1)
    tl.store(rows + program * count + entry, total, mask=entry < count)
    tl.store(squares + program, tl.sum(total * total))


@triton.jit(do_not_specialize=["COUNT", "EACH"])
def weighted_rows(
    rows, factors, out, COUNT, WIDTH, EACH, TOGETHER: tl.constexpr, BLOCK: tl.constexpr
):
    """Sum of rows, each times its factor. Those with the factor zero are not read."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    part = tl.program_id(1)
    total = tl.zeros((TOGETHER, BLOCK), tl.float32)
    for first in range(part * EACH, part * EACH + EACH, TOGETHER):
        row = first + tl.arange(0, TOGETHER)
        factor = tl.load(factors + row, mask=row < COUNT, other=0.0)
        values = tl.load(
            rows + row.to(tl.int64)[:, None] * WIDTH + column[None, :],
            mask=(factor != 0.0)[:, None] & (column < WIDTH)[None, :],
            other=0.0,
        )
        total += factor[:, None] * values.to(tl.float32)
    tl.store(out + part * WIDTH + column, tl.sum(total, 0), mask=column < WIDTH)


@triton.jit(do_not_specialize=["ROWS", "EACH"])
def channel_sums(
    inputs,
    slopes,
    means,
    rates,
    scale,
    shift,
    ROWS,
    PLACES,
    EACH,
    TOGETHER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Per example and channel: sums of output gradients, and of those times normalised inputs.

    `EACH` channels share a mean and an inverse deviation.
    """
    row = tl.program_id(0) * TOGETHER + tl.arange(0, TOGETHER)
    there = row < ROWS
    mean = tl.load(means + row // EACH, mask=there, other=0.0)
    rate = tl.load(rates + row // EACH, mask=there, other=0.0)
    scaled = tl.zeros((TOGETHER, BLOCK), tl.float32)
    plain = tl.zeros((TOGETHER, BLOCK), tl.float32)
    for first in range(0, PLACES, BLOCK):
        place = first + tl.arange(0, BLOCK)
        inside = there[:, None] & (place < PLACES)[None, :]
        at = row.to(tl.int64)[:, None] * PLACES + place[None, :]
        slope = tl.load(slopes + at, mask=inside, other=0.0)
        value = tl.load(inputs + at, mask=inside, other=0.0)
        scaled += tl.where(inside, slope * ((value - mean[:, None]) * rate[:, None]), 0.0)
        plain += slope
    tl.store(scale + row, tl.sum(scaled, 1), mask=there)
    tl.store(shift + row, tl.sum(plain, 1), mask=there)


@triton.jit(do_not_specialize=["POSITIONS"])
def position_sums(
    inputs,
    slopes,
    means,
    rates,
    scale,
    shift,
    POSITIONS,
    WIDTH,
    TOGETHER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The same for a layer norm: per example and entry, summed over positions."""
    example = tl.program_id(0).to(tl.int64)
    entry = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    scaled = tl.zeros((TOGETHER, BLOCK), tl.float32)
    plain = tl.zeros((TOGETHER, BLOCK), tl.float32)
    for first in range(0, POSITIONS, TOGETHER):
        position = first + tl.arange(0, TOGETHER)
        there = position < POSITIONS
        mean = tl.load(means + example * POSITIONS + position, mask=there, other=0.0)
        rate = tl.load(rates + example * POSITIONS + position, mask=there, other=0.0)
        inside = there[:, None] & (entry < WIDTH)[None, :]
        at = (example * POSITIONS + position)[:, None] * WIDTH + entry[None, :]
        slope = tl.load(slopes + at, mask=inside, other=0.0)
        value = tl.load(inputs + at, mask=inside, other=0.0)
        scaled += tl.where(inside, slope * ((value - mean[:, None]) * rate[:, None]), 0.0)
        plain += slope
    tl.store(scale + example * WIDTH + entry, tl.sum(scaled, 0), mask=entry < WIDTH)
    tl.store(shift + example * WIDTH + entry, tl.sum(plain, 0), mask=entry < WIDTH)


@triton.jit
def _inner_products(
    values,
    row,
    column,
    POSITIONS,
    WIDTH,
    SIDE: tl.constexpr,
    STEP: tl.constexpr,
    CHUNK: tl.constexpr,
    HALVES: tl.constexpr,
):
    """Inner products between some rows of a matrix and others.

    A number of float32 is the sum of two of TF32 or, with `HALVES`, of two of bfloat16, to 16 bits.
    Tensor cores cut off what they add up, so that only chunks of it are left to them.
    """
    total = tl.zeros((SIDE, SIDE), tl.float32)
    for chunk in range(0, WIDTH, CHUNK):
        part = tl.zeros((SIDE, SIDE), tl.float32)
        for first in range(chunk, tl.minimum(chunk + CHUNK, WIDTH), STEP):
            entry = first + tl.arange(0, STEP)
            inside = (entry < WIDTH)[None, :]
            one = tl.load(
                values + row[:, None] * WIDTH + entry[None, :],
                mask=(row < POSITIONS)[:, None] & inside,
                other=0.0,
            )
            other = tl.load(
                values + column[:, None] * WIDTH + entry[None, :],
                mask=(column < POSITIONS)[:, None] & inside,
                other=0.0,
            )
            if HALVES:
                large, large_other = one.to(tl.bfloat16), other.to(tl.bfloat16)
                small = (one - large.to(tl.float32)).to(tl.bfloat16)
                small_other = (other - large_other.to(tl.float32)).to(tl.bfloat16)
                part = tl.dot(small, tl.trans(large_other), part)
                part = tl.dot(large, tl.trans(small_other), part)
                part = tl.dot(large, tl.trans(large_other), part)
            elif values.dtype.element_ty == tl.float32:
                part = tl.dot(one, tl.trans(other), part, input_precision="tf32x3")
            else:
                part = tl.dot(one, tl.trans(other), part)
        total += part
    return total


@triton.jit
def product_norms(
    inputs,
    outputs,
    input_norms,
    output_norms,
    squares,
    errors,
    POSITIONS,
    WIDTH,
    HEIGHT,
    SIDE: tl.constexpr,
    STEP: tl.constexpr,
    CHUNK: tl.constexpr,
    HALVES: tl.constexpr,
):
    """What `norms.InnerNorms` is made of, from the factors and without matrices in between.

    A program takes the pairs of positions of one tile. Matrices of inner products are symmetric:
    a tile beside the diagonal counts twice, and its mirror image is left out.
    """
    example = tl.program_id(0).to(tl.int64)
    down, along = tl.program_id(1), tl.program_id(2)
    if along >= down:
        row, column = down * SIDE + tl.arange(0, SIDE), along * SIDE + tl.arange(0, SIDE)
        real, also = row < POSITIONS, column < POSITIONS
        inner = _inner_products(
            inputs + example * POSITIONS * WIDTH,
            row,
            column,
            POSITIONS,
            WIDTH,
            SIDE,
            STEP,
            CHUNK,
            HALVES,
        )
        outer = _inner_products(
            outputs + example * POSITIONS * HEIGHT,
            row,
            column,
            POSITIONS,
            HEIGHT,
            SIDE,
            STEP,
            CHUNK,
            HALVES,
        )
        input_norms += example * POSITIONS
        output_norms += example * POSITIONS
        seen = tl.load(input_norms + row, mask=real, other=0.0)
        seen_also = tl.load(input_norms + column, mask=also, other=0.0)
        slope = tl.load(output_norms + row, mask=real, other=0.0)
        slope_also = tl.load(output_norms + column, mask=also, other=0.0)
        size = tl.abs(inner) * (slope[:, None] * slope_also[None, :])
        size += tl.abs(outer) * (seen[:, None] * seen_also[None, :])
        count = tl.where(along > down, 2.0, 1.0)
        part = (example * tl.num_programs(1) + down) * tl.num_programs(2) + along
        tl.store(squares + part, count * tl.sum(inner * outer))
        tl.store(errors + part, count * tl.sum(size))


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
