// The gather on a GPU: one launch for any number of blocks.
#include "native.hpp"

#include <cuda_runtime.h>

namespace trinity {
namespace {

constexpr int THREADS = 256;
constexpr int WORDS_EACH = 8; // words that one thread copies

template <typename Word>
__global__ void gather(char *target, const char *source, const int64_t *to, const int64_t *from, int64_t block_bytes,
                       int64_t offset, int64_t words, int64_t slices) {
    const int64_t block = blockIdx.x / slices, slice = blockIdx.x % slices;
    auto *into = reinterpret_cast<Word *>(target + to[block] * block_bytes + offset);
    const auto *out = reinterpret_cast<const Word *>(source + from[block] * block_bytes + offset);
    const int64_t start = slice * THREADS * WORDS_EACH + threadIdx.x;
#pragma unroll
    for (int i = 0; i < WORDS_EACH; i++) {
        const int64_t at = start + static_cast<int64_t>(i) * THREADS;
        if (at < words) into[at] = out[at];
    }
}

template <typename Word>
void launch(uintptr_t target, uintptr_t source, uintptr_t to, uintptr_t from, int64_t count, Within within,
            cudaStream_t stream) {
    const int64_t words = within.length / static_cast<int64_t>(sizeof(Word));
    const int64_t each = THREADS * WORDS_EACH, slices = (words + each - 1) / each;
    const int64_t most = (int64_t{1} << 31) / slices - 1; // a grid has so many blocks at most
    const auto *into = reinterpret_cast<const int64_t *>(to), *out = reinterpret_cast<const int64_t *>(from);
    for (int64_t done = 0; done < count; done += most) {
        const int64_t now = count - done < most ? count - done : most;
        gather<Word><<<static_cast<unsigned>(now * slices), THREADS, 0, stream>>>(
            reinterpret_cast<char *>(target), reinterpret_cast<const char *>(source), into + done, out + done,
            within.block_bytes, within.offset, words, slices);
    }
}

} // namespace

const char *cuda_copy_blocks(uintptr_t target, uintptr_t source, uintptr_t to, uintptr_t from, int64_t count,
                             Within within, uintptr_t stream) {
    if (count == 0 || within.length == 0) return nullptr;
    const auto queue = reinterpret_cast<cudaStream_t>(stream);
    const uintptr_t grain = target | source | static_cast<uintptr_t>(within.block_bytes) |
                            static_cast<uintptr_t>(within.offset) | static_cast<uintptr_t>(within.length);
    if (grain % 16 == 0) launch<uint4>(target, source, to, from, count, within, queue);
    else if (grain % 8 == 0) launch<uint2>(target, source, to, from, count, within, queue);
    else launch<unsigned char>(target, source, to, from, count, within, queue);
    const cudaError_t error = cudaGetLastError();
    return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

} // namespace trinity
