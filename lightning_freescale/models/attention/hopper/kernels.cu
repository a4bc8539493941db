// All kernels of one pair of head widths and one element type. The compiler's options define:
// DQK, DV: head widths; HALF: 1 for fp16, 0 for bf16; the sizes of tiles, see config.py.
#include "forward.cuh"
#include "backward.cuh"
#include "rows.cuh"
