// Runs kernels on a CPU, one thread after the other: the words of CUDA C that barrier-free kernels use.
//
// Included before the kernels' source. What one thread leaves to another is not seen here, and no order of threads is
// better than another, so it fits only kernels whose threads do not wait for each other.

#pragma once

#define __global__
#define __launch_bounds__(threads)

struct uint3 { unsigned int x, y, z; };

// Aligned as on the GPU: a sanitizer reports an address that a vector must not have.
struct alignas(8) uint2 { unsigned int x, y; };
struct alignas(16) uint4 { unsigned int x, y, z, w; };

static uint3 blockIdx, threadIdx, blockDim, gridDim;

// kernel<<<grid, threads>>>(arguments...)
template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), unsigned int grid, unsigned int threads, Arguments... arguments)
{
    gridDim = {grid, 1, 1};
    blockDim = {threads, 1, 1};
    for (unsigned int block = 0; block < grid; ++block)
        for (unsigned int thread = 0; thread < threads; ++thread) {
            blockIdx = {block, 0, 0};
            threadIdx = {thread, 0, 0};
            kernel(arguments...);
        }
}
