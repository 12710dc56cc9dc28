// Gather and scatter of many paged blocks in one call.
#include "instructions.hpp"
#include "native.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#if defined(__x86_64__) && defined(__GNUC__)
#define TRINITY_X86
#include <immintrin.h>
#endif

namespace trinity {
namespace {

constexpr size_t STREAM_PIECE = 4096;     // below this, aligning and fencing cost more than the cache is worth
constexpr size_t STREAM_TOTAL = 1 << 20;  // below this, what is copied stays in the cache for its reader
constexpr size_t AHEAD = 2048;           // bytes that are asked for before they are copied
constexpr size_t SHARE = 1 << 20;         // a thread takes so many bytes at a time; less is not shared

struct Piece {
    char *target;
    const char *source;
    size_t bytes;
};

using Copy = void (*)(char *, const char *, size_t);

void copy_plain(char *target, const char *source, size_t bytes) { std::memcpy(target, source, bytes); }

#ifdef TRINITY_X86
// Stores that pass by the cache: the target's lines are not read first, and nothing of use is evicted.
__attribute__((target("avx512f"))) void stream_avx512(char *target, const char *source, size_t bytes) {
    const size_t head = std::min(bytes, (64 - reinterpret_cast<uintptr_t>(target) % 64) % 64);
    std::memcpy(target, source, head);
    target += head, source += head, bytes -= head;
    for (; bytes >= 256; target += 256, source += 256, bytes -= 256) {
        _mm_prefetch(source + 2048, _MM_HINT_NTA);
        _mm_prefetch(source + 2112, _MM_HINT_NTA);
        _mm_prefetch(source + 2176, _MM_HINT_NTA);
        _mm_prefetch(source + 2240, _MM_HINT_NTA);
        const __m512i a = _mm512_loadu_si512(source), b = _mm512_loadu_si512(source + 64);
        const __m512i c = _mm512_loadu_si512(source + 128), d = _mm512_loadu_si512(source + 192);
        _mm512_stream_si512(reinterpret_cast<__m512i *>(target), a);
        _mm512_stream_si512(reinterpret_cast<__m512i *>(target + 64), b);
        _mm512_stream_si512(reinterpret_cast<__m512i *>(target + 128), c);
        _mm512_stream_si512(reinterpret_cast<__m512i *>(target + 192), d);
    }
    std::memcpy(target, source, bytes);
}

__attribute__((target("avx2"))) void stream_avx2(char *target, const char *source, size_t bytes) {
    const size_t head = std::min(bytes, (32 - reinterpret_cast<uintptr_t>(target) % 32) % 32);
    std::memcpy(target, source, head);
    target += head, source += head, bytes -= head;
    for (; bytes >= 128; target += 128, source += 128, bytes -= 128) {
        _mm_prefetch(source + 1024, _MM_HINT_NTA);
        _mm_prefetch(source + 1088, _MM_HINT_NTA);
        const auto *from = reinterpret_cast<const __m256i *>(source);
        auto *to = reinterpret_cast<__m256i *>(target);
        const __m256i a = _mm256_loadu_si256(from), b = _mm256_loadu_si256(from + 1);
        const __m256i c = _mm256_loadu_si256(from + 2), d = _mm256_loadu_si256(from + 3);
        _mm256_stream_si256(to, a);
        _mm256_stream_si256(to + 1, b);
        _mm256_stream_si256(to + 2, c);
        _mm256_stream_si256(to + 3, d);
    }
    std::memcpy(target, source, bytes);
}
#endif

Copy streaming() {
#ifdef TRINITY_X86
    if (has_avx512()) return stream_avx512;
    if (has_avx2()) return stream_avx2;
#endif
    return copy_plain;
}

// What a thread wrote past its cache must be seen by others before they are told of it.
void fence() {
#ifdef TRINITY_X86
    _mm_sfence();
#endif
}

void check_targets(const int64_t *to, size_t count, int64_t blocks) {
    std::vector<bool> named(static_cast<size_t>(blocks), false);
    for (size_t i = 0; i < count; i++) {
        if (named[to[i]]) throw std::invalid_argument("target block " + std::to_string(to[i]) + " is named twice");
        named[to[i]] = true;
    }
}

// The longest pieces that are consecutive on both sides.
std::vector<Piece> pieces_of(Pool target, Pool source, const int64_t *to, const int64_t *from, size_t count,
                             Within within) {
    const bool whole = within.length == within.block_bytes;
    std::vector<Piece> pieces;
    for (size_t i = 0; i < count;) {
        size_t next = i + 1;
        while (whole && next < count && to[next] == to[next - 1] + 1 && from[next] == from[next - 1] + 1) next++;
        pieces.push_back({reinterpret_cast<char *>(target.address) + to[i] * within.block_bytes + within.offset,
                          reinterpret_cast<const char *>(source.address) + from[i] * within.block_bytes + within.offset,
                          (next - i) * static_cast<size_t>(within.length)});
        i = next;
    }
    return pieces;
}

// Pieces cut so that threads can share them.
std::vector<Piece> shares_of(const std::vector<Piece> &pieces) {
    std::vector<Piece> shares;
    for (const Piece &piece : pieces)
        for (size_t at = 0; at < piece.bytes; at += SHARE)
            shares.push_back({piece.target + at, piece.source + at, std::min(SHARE, piece.bytes - at)});
    return shares;
}

// A piece begins where the processor does not expect it: its first lines are asked for while the one before is copied.
void fetch(const Piece &next) {
#ifdef __GNUC__
    for (size_t at = 0; at < std::min(next.bytes, AHEAD); at += 64) __builtin_prefetch(next.source + at, 0, 0);
#else
    (void)next;
#endif
}

struct Shared {
    const std::vector<Piece> *pieces;
    Copy copy;
    size_t batch; // neighbouring pieces that one thread takes at once
};

void copy_share(void *state, size_t index) {
    const auto *shared = static_cast<const Shared *>(state);
    const size_t end = std::min(shared->pieces->size(), (index + 1) * shared->batch);
    for (size_t i = index * shared->batch; i < end; i++) {
        const Piece &piece = (*shared->pieces)[i];
        if (i + 1 < end) fetch((*shared->pieces)[i + 1]);
        shared->copy(piece.target, piece.source, piece.bytes);
    }
    fence();
}

} // namespace

void check_within(Within within) {
    if (within.block_bytes <= 0 || within.offset < 0 || within.length < 0 ||
        within.offset > within.block_bytes - within.length)
        throw std::invalid_argument("a piece of " + std::to_string(within.length) + " bytes from byte " +
                                    std::to_string(within.offset) + " is not within blocks of " +
                                    std::to_string(within.block_bytes) + " bytes");
}

void check_numbers(const char *what, const int64_t *numbers, size_t count, int64_t blocks) {
    for (size_t i = 0; i < count; i++)
        if (numbers[i] < 0 || numbers[i] >= blocks)
            throw std::invalid_argument(std::string(what) + " block " + std::to_string(numbers[i]) + " of a pool of " +
                                        std::to_string(blocks));
}

void copy_blocks(Pool target, Pool source, const int64_t *to, const int64_t *from, size_t count, Within within,
                 int threads) {
    check_within(within);
    check_numbers("source", from, count, source.blocks);
    check_numbers("target", to, count, target.blocks);
    check_targets(to, count, target.blocks);
    const size_t total = count * static_cast<size_t>(within.length);
    if (total == 0) return;
    std::vector<Piece> pieces = pieces_of(target, source, to, from, count, within);
    const Copy stream = total >= STREAM_TOTAL && total / pieces.size() >= STREAM_PIECE ? streaming() : copy_plain;
    if (threads > 1 && total > SHARE) pieces = shares_of(pieces);
    const size_t average = std::max<size_t>(1, total / pieces.size());
    Shared shared{&pieces, stream, std::max<size_t>(1, SHARE / average)};
    const size_t shares = (pieces.size() + shared.batch - 1) / shared.batch;
    run_parallel(shares, total > SHARE ? threads : 1, copy_share, &shared);
}

} // namespace trinity
