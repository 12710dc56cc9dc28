// The loops of elementwise/rows.hpp in bf16, by hand, where the processor rounds to bf16 itself (AVX512_BF16). Elements
// are taken in pairs: those of even numbers in one vector, those of odd numbers in another, which is no shuffle. Rounding
// is theirs to the bit, but for numbers below 1e-38, which become zero.
#include "elementwise/elementwise.hpp"

#if defined(__AVX512BF16__) && defined(__AVX512DQ__)
#include "bf16.hpp"
#include "instructions.hpp"
#include <immintrin.h>

namespace trinity {
namespace {

constexpr int64_t STEP = 32; // elements
using Vector = __m512;
using Mask = __mmask32;

struct Pairs {
    Vector even, odd;
};

template <class Made> inline Pairs each(Pairs a, const Made &made) { return {made(a.even), made(a.odd)}; }
inline Pairs operator*(Pairs a, Pairs b) { return {_mm512_mul_ps(a.even, b.even), _mm512_mul_ps(a.odd, b.odd)}; }
inline Pairs operator+(Pairs a, Pairs b) { return {_mm512_add_ps(a.even, b.even), _mm512_add_ps(a.odd, b.odd)}; }
inline Pairs operator-(Pairs a, Pairs b) { return {_mm512_sub_ps(a.even, b.even), _mm512_sub_ps(a.odd, b.odd)}; }

inline Pairs wide(__m512i rows) {
    const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(rows, 16)), _mm512_castsi512_ps(_mm512_and_si512(rows, high))};
}

inline __m512i narrow(Pairs given) {
    alignas(64) static constexpr uint16_t ORDER[STEP] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                         8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512bh both = _mm512_cvtne2ps_pbh(given.odd, given.even);
    __m512i found;
    __builtin_memcpy(&found, &both, sizeof found);
    return _mm512_permutexvar_epi16(_mm512_load_si512(ORDER), found);
}

inline Pairs rounded(Pairs given) { return wide(narrow(given)); }

// Rows in whole steps, then what is left: a mask is a further operation.
constexpr Mask ALL = ~Mask(0);
inline Mask left(int64_t count) { return count >= STEP ? ALL : (Mask(1) << count) - 1; }
inline __m512i load(const Bf16 *from, Mask mask) {
    return mask == ALL ? _mm512_loadu_si512(from) : _mm512_maskz_loadu_epi16(mask, from);
}
inline void store(Bf16 *to, Mask mask, __m512i rows) {
    if (mask == ALL)
        _mm512_storeu_si512(to, rows);
    else
        _mm512_mask_storeu_epi16(to, mask, rows);
}

inline Vector dots(Vector sum, __m512i rows) {
    __m512bh pairs;
    __builtin_memcpy(&pairs, &rows, sizeof pairs);
    return _mm512_dpbf16_ps(sum, pairs, pairs);
}

const Bf16 *row_of(const Matrix &rows, int64_t row) {
    return reinterpret_cast<const Bf16 *>(rows.address) + row * rows.stride;
}
Bf16 *out_of(const Matrix &rows, int64_t row) { return reinterpret_cast<Bf16 *>(rows.address) + row * rows.stride; }

// The sum of squares of `in`, to which `added` is added first, into `sums`.
float squares(const Bf16 *in, const Bf16 *added, Bf16 *sums, int64_t width) {
    Vector sum[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    for (int64_t i = 0; i < width; i += STEP) {
        const Mask mask = left(width - i);
        __m512i rows = load(in + i, mask);
        if (added != nullptr) {
            rows = narrow(wide(rows) + wide(load(added + i, mask)));
            store(sums + i, mask, rows);
        }
        sum[i / STEP % 2] = dots(sum[i / STEP % 2], rows);
    }
    return _mm512_reduce_add_ps(_mm512_add_ps(sum[0], sum[1]));
}

void rms_norm(const RmsNorm &norm, int64_t first, int64_t end) {
    const Bf16 *weight = reinterpret_cast<const Bf16 *>(norm.weight);
    for (int64_t row = first; row < end; row++) {
        const bool adds = norm.added.address != 0;
        const Bf16 *in = row_of(norm.in, row), *added = adds ? row_of(norm.added, row) : nullptr;
        Bf16 *sums = adds ? out_of(norm.sums, row) : nullptr, *out = out_of(norm.out, row);
        const float mean = squares(in, added, sums, norm.width) / static_cast<float>(norm.width);
        if (weight == nullptr) continue;
        const Vector by = _mm512_set1_ps(1.0F / __builtin_sqrtf(mean + norm.eps));
        const Bf16 *from = adds ? sums : in;
        for (int64_t i = 0; i < norm.width; i += STEP) {
            const Mask mask = left(norm.width - i);
            const Pairs scaled = rounded(wide(load(from + i, mask)) * Pairs{by, by});
            store(out + i, mask, narrow(scaled * wide(load(weight + i, mask))));
        }
    }
}

// 1 / (1 + e^-x), within 3 units of the last place for |x| <= 87, beyond that as there. -x times log2(e) is a whole
// number and a rest, exactly, since x has 8 bits and the constant's first part 16.
inline Vector sigmoid(Vector x) {
    constexpr float BITS = 1.44268798828125F, FURTHER = 7.0526075433e-6F, SHIFT = 12582912.0F; // 1.5 * 2^23
    x = _mm512_max_ps(_mm512_min_ps(x, _mm512_set1_ps(87.0F)), _mm512_set1_ps(-87.0F));
    const Vector moved = _mm512_fnmadd_ps(x, _mm512_set1_ps(BITS), _mm512_set1_ps(SHIFT));
    const Vector whole = _mm512_sub_ps(moved, _mm512_set1_ps(SHIFT));
    Vector rest = _mm512_fnmsub_ps(x, _mm512_set1_ps(BITS), whole);
    rest = _mm512_fnmadd_ps(x, _mm512_set1_ps(FURTHER), rest);
    Vector power = _mm512_set1_ps(1.3398874e-3F);
    power = _mm512_fmadd_ps(power, rest, _mm512_set1_ps(9.6184373e-3F));
    power = _mm512_fmadd_ps(power, rest, _mm512_set1_ps(5.5503324e-2F));
    power = _mm512_fmadd_ps(power, rest, _mm512_set1_ps(2.4022648e-1F));
    power = _mm512_fmadd_ps(power, rest, _mm512_set1_ps(6.9314720e-1F));
    power = _mm512_fmadd_ps(power, rest, _mm512_set1_ps(1.0F));
    const __m512i scaled =
        _mm512_add_epi32(_mm512_castps_si512(power), _mm512_slli_epi32(_mm512_castps_si512(moved), 23));
    const Vector sum = _mm512_add_ps(_mm512_castsi512_ps(scaled), _mm512_set1_ps(1.0F));
    const Vector near = _mm512_rcp14_ps(sum);
    return _mm512_fmadd_ps(_mm512_fnmadd_ps(sum, near, _mm512_set1_ps(1.0F)), near, near);
}

void gated(const Gated &given, int64_t first, int64_t end) {
    const Vector slope = _mm512_set1_ps(given.slope);
    for (int64_t row = first; row < end; row++) {
        const Bf16 *gate = row_of(given.gate, row);
        Bf16 *out = out_of(given.out, row);
        const Bf16 *up = given.up.address != 0 ? row_of(given.up, row) : nullptr;
        for (int64_t i = 0; i < given.width; i += STEP) {
            const Mask mask = left(given.width - i);
            const Pairs x = wide(load(gate + i, mask));
            if (up == nullptr)
                store(out + i, mask, narrow(x * rounded(each(rounded(x * Pairs{slope, slope}), sigmoid))));
            else
                store(out + i, mask, narrow(rounded(x * each(x, sigmoid)) * wide(load(up + i, mask))));
        }
    }
}

// The elements [i, i + STEP) of both halves of each head of a row.
void turn(const Rotary &given, int64_t row, int64_t i) {
    const int64_t half = given.width / 2;
    const Mask mask = left(half - i);
    const Bf16 *cosine = row_of(given.cosine, row) + i, *sine = row_of(given.sine, row) + i;
    const Bf16 *in = row_of(given.in, row) + i;
    Bf16 *out = out_of(given.out, row) + i;
    const Pairs cosines[2] = {wide(load(cosine, mask)), wide(load(cosine + half, mask))};
    const Pairs sines[2] = {wide(load(sine, mask)), wide(load(sine + half, mask))};
    for (int64_t head = 0; head < given.heads; head++, in += given.in_head, out += given.out_head) {
        const Pairs low = wide(load(in, mask)), high = wide(load(in + half, mask));
        store(out, mask, narrow(rounded(low * cosines[0]) - rounded(high * sines[0])));
        store(out + half, mask, narrow(rounded(high * cosines[1]) + rounded(low * sines[1])));
    }
}

void rotary(const Rotary &given, int64_t first, int64_t end) {
    for (int64_t row = first; row < end; row++)
        for (int64_t i = 0; i < given.width / 2; i += STEP) turn(given, row, i);
}

constexpr Elementwise KERNELS{rms_norm, gated, rotary};

} // namespace

const Elementwise *elementwise_bf16() {
    return has_avx512_bf16() ? &KERNELS : nullptr;
}

} // namespace trinity
#else
namespace trinity {
const Elementwise *elementwise_bf16() { return nullptr; }
} // namespace trinity
#endif
