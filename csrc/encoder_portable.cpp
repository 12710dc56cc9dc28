// The loops of encoder_rows.hpp for any processor.
#include "encoder_rows.hpp"

namespace trinity {

const Encoder &encoder_portable(bool bf16) { return bf16 ? ENCODER<Bf16> : ENCODER<float>; }

} // namespace trinity
