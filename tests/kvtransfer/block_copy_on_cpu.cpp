// kvtransfer/block_copy.cu as a shared library, for tests that have no GPU.

#include "cuda_on_cpu.h"

#include BLOCK_COPY_SOURCE

#define LAUNCHER(WIDTH, VECTOR)                                                                                       \
    extern "C" void launch_##WIDTH(unsigned int grid, unsigned int threads, const void* source, void* target,         \
                                   const int* source_ids, const int* target_ids, unsigned int vectors_per_block,      \
                                   unsigned int pieces_per_block)                                                     \
    {                                                                                                                 \
        launch(copy_blocks_##WIDTH, grid, threads, (const VECTOR*)source, (VECTOR*)target, source_ids, target_ids,    \
               vectors_per_block, pieces_per_block);                                                                  \
    }

LAUNCHER(16, uint4)
LAUNCHER(8, uint2)
LAUNCHER(4, unsigned int)
LAUNCHER(2, unsigned short)
LAUNCHER(1, unsigned char)
