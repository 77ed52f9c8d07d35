// Copies blocks of one pool into blocks of another: block source_ids[i] becomes block target_ids[i].
//
// A thread block copies one piece of one block: THREADS * VECTORS_PER_THREAD vectors, neighbouring threads taking
// neighbouring vectors. Each thread loads all of its vectors before it stores the first, so that several reads are in
// flight; on a pool of another GPU their latency is what counts. Nobody waits for anybody (no barrier, no shared
// memory), so any order of threads is right, one after the other on a CPU too. There are no includes: NVRTC needs no
// headers for it.
//
// One kernel for each width that may divide the address and size of a block, in bytes: see block_copy.py, which knows
// the two numbers below and launches num_blocks * pieces_per_block thread blocks.

#define THREADS 256
#define VECTORS_PER_THREAD 4

#define COPY_BLOCKS(NAME, VECTOR)                                                                                     \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                             \
    NAME(const VECTOR* __restrict__ source, VECTOR* __restrict__ target, const int* __restrict__ source_ids,          \
         const int* __restrict__ target_ids, unsigned int vectors_per_block, unsigned int pieces_per_block)           \
    {                                                                                                                 \
        const unsigned int block = blockIdx.x / pieces_per_block;                                                     \
        const unsigned int piece = blockIdx.x % pieces_per_block;                                                     \
        /* In a pool of some GiB neither fits 32 bits, whatever the vector is. */                                     \
        const VECTOR* from = source + (unsigned long long)source_ids[block] * vectors_per_block;                      \
        VECTOR* to = target + (unsigned long long)target_ids[block] * vectors_per_block;                              \
        const unsigned int first = piece * (THREADS * VECTORS_PER_THREAD) + threadIdx.x;                              \
                                                                                                                      \
        VECTOR held[VECTORS_PER_THREAD];                                                                              \
        _Pragma("unroll")                                                                                             \
        for (unsigned int i = 0; i < VECTORS_PER_THREAD; ++i) {                                                       \
            const unsigned int index = first + i * THREADS;                                                           \
            /* Past the end the last vector is read instead: a load without a condition does not wait for one. */     \
            held[i] = from[index < vectors_per_block ? index : vectors_per_block - 1];                                \
        }                                                                                                             \
        _Pragma("unroll")                                                                                             \
        for (unsigned int i = 0; i < VECTORS_PER_THREAD; ++i) {                                                       \
            const unsigned int index = first + i * THREADS;                                                           \
            if (index < vectors_per_block) to[index] = held[i];                                                       \
        }                                                                                                             \
    }

COPY_BLOCKS(copy_blocks_16, uint4)
COPY_BLOCKS(copy_blocks_8, uint2)
COPY_BLOCKS(copy_blocks_4, unsigned int)
COPY_BLOCKS(copy_blocks_2, unsigned short)
COPY_BLOCKS(copy_blocks_1, unsigned char)
