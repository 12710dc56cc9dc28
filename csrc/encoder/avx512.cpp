// The loops of encoder/rows.hpp compiled for AVX-512, used where the processor has it.
#include "encoder/encoder.hpp"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#include "encoder/rows.hpp"

namespace trinity {

const Encoder *encoder_avx512(bool bf16) {
    if (elementwise_avx512(bf16) == nullptr) return nullptr;
    return bf16 ? &ENCODER<Bf16> : &ENCODER<float>;
}

} // namespace trinity
#else
namespace trinity {
const Encoder *encoder_avx512(bool) { return nullptr; }
} // namespace trinity
#endif
