// All kernels of one pair of head widths and one element type. The compiler's options define the sizes; config.py says
// what they mean. DQK and DV are the head widths, HALF is 1 for fp16 and 0 for bf16.
#include "backward.cuh"
#include "forward.cuh"
#include "rows.cuh"
#include "silu.cuh"
