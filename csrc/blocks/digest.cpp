// One 64-bit digest for each block; not cryptographic: it finds accidents, not forgers.
//
// Over the 64-bit little-endian words w[i] of the piece, the last one filled up with zeros, modulo 2^64:
//     x = w[i] + (i + 1) * STEP;  x ^= x >> 32;  x *= MIX;  x ^= x >> 32;  sum += x
//     d = sum + bytes * STEP;     d ^= d >> 32;  d *= MIX;  d ^= d >> 32
// Each word goes through a bijection of its own, so one changed word always changes the sum; the word's place is in it,
// so swapped words do; the length is in the end, so zeros of different lengths differ. trinity.memory.digest_function
// computes the same in numpy and in torch.
#include "instructions.hpp"
#include "native.hpp"

#include <cstring>
#include <stdexcept>

namespace trinity {
namespace {

constexpr uint64_t STEP = 0x9E3779B97F4A7C15ULL;
constexpr uint64_t MIX = 0xD6E8FEB86659FD93ULL;

inline uint64_t mixed(uint64_t x) {
    x ^= x >> 32;
    x *= MIX;
    return x ^ (x >> 32);
}

// One loop, compiled for several widths of vector: there is nothing in it but 64-bit integers.
#define TRINITY_SUM_WORDS(name, attributes)                                                                            \
    attributes uint64_t name(const char *piece, size_t words) {                                                        \
        uint64_t sum = 0;                                                                                              \
        for (size_t i = 0; i < words; i++) {                                                                           \
            uint64_t word;                                                                                             \
            std::memcpy(&word, piece + 8 * i, 8);                                                                      \
            uint64_t x = word + (i + 1) * STEP;                                                                        \
            x ^= x >> 32;                                                                                              \
            x *= MIX;                                                                                                  \
            sum += x ^ (x >> 32);                                                                                      \
        }                                                                                                              \
        return sum;                                                                                                    \
    }

TRINITY_SUM_WORDS(sum_portable, )
#if defined(__x86_64__) && defined(__GNUC__)
#ifdef __clang__
#define TRINITY_AVX512 "avx512f,avx512dq"
#else
#define TRINITY_AVX512 "avx512f,avx512dq,prefer-vector-width=512"
#endif
TRINITY_SUM_WORDS(sum_avx512, __attribute__((target(TRINITY_AVX512))))
TRINITY_SUM_WORDS(sum_avx2, __attribute__((target("avx2"))))
#endif

using Sum = uint64_t (*)(const char *, size_t);

Sum best_sum() {
#if defined(__x86_64__) && defined(__GNUC__)
    if (has_avx512()) return sum_avx512;
    if (has_avx2()) return sum_avx2;
#endif
    return sum_portable;
}

uint64_t digest(const char *piece, size_t bytes, Sum sum_words) {
    const size_t words = bytes / 8;
    uint64_t sum = sum_words(piece, words);
    if (bytes % 8) {
        uint64_t last = 0;
        std::memcpy(&last, piece + 8 * words, bytes % 8);
        sum += mixed(last + (words + 1) * STEP);
    }
    return mixed(sum + bytes * STEP);
}

} // namespace

void digest_blocks(Pool source, const int64_t *from, size_t count, Within within, int64_t *out) {
    check_within(within);
    check_numbers("source", from, count, source.blocks);
    const Sum sum_words = best_sum();
    for (size_t i = 0; i < count; i++) {
        const char *piece =
            reinterpret_cast<const char *>(source.address) + from[i] * within.block_bytes + within.offset;
        out[i] = static_cast<int64_t>(digest(piece, static_cast<size_t>(within.length), sum_words));
    }
}

} // namespace trinity
