"""How much is worked on at once. It cannot change a sum over microbatches."""

import os

import torch

# What a pass holds grows while it runs: workspaces and the copies between two layers.
_HEADROOM = 2
# More is slower on a CPU: what does not fit its caches is fetched, and cleared, from memory.
ON_THE_HOST = 2**27
# But not than to read and add to all weights once more. A microbatch may hold as much as so many
# copies of them.
_COPIES_OF_WEIGHTS = 4
# The part of a GPU's free memory that a batch may take.
_PART_OF_FREE = 0.5
# The part of free memory, on a GPU or on the host, that a table about the data may take.
PART_FOR_TABLES = 0.25


def microbatch_rows(bytes_per_example: int, device: torch.device, weights: int = 0) -> int:
    """Examples per microbatch: a power of two, at least one. `weights` is in bytes.

    They take 128 MiB on the host, more for large models, and half of what is free on a GPU, as it
    is when a model is first seen: later microbatches have the same size, so that they can be
    captured.
    """
    if device.type == "cuda":
        room = int(_PART_OF_FREE * _free(device))
    else:
        room = max(ON_THE_HOST, _COPIES_OF_WEIGHTS * weights)
    affordable = room // (_HEADROOM * max(1, bytes_per_example))
    return 1 << max(0, int(affordable).bit_length() - 1)


def has_room(size: int, device: torch.device) -> bool:
    """Whether so many bytes may be kept for good, beside what a microbatch takes."""
    return size <= PART_FOR_TABLES * _free(device)


def _free(device: torch.device) -> int:
    if device.type != "cuda":
        try:
            return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (ValueError, OSError):  # a system that does not tell
            return 4 * ON_THE_HOST
    free, whole = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    allowed = int(torch.cuda.get_per_process_memory_fraction(device) * whole)
    return min(free, allowed - reserved) + reserved - torch.cuda.memory_allocated(device)
