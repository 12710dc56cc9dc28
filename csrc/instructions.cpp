// What TRINITY_ISA allows is read once; a lower set than the processor's is for tests and for comparisons.
#include "instructions.hpp"

#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

namespace trinity {
namespace {

constexpr const char *NAMES[] = {"portable", "avx2", "avx512", "amx"};
enum : int { PORTABLE, AVX2, AVX512, AMX };

int read_limit() {
    const char *said = std::getenv("TRINITY_ISA");
    if (said == nullptr || *said == 0) return AMX;
    for (int number = PORTABLE; number <= AMX; number++)
        if (std::strcmp(said, NAMES[number]) == 0) return number;
    throw std::invalid_argument("TRINITY_ISA is '" + std::string(said) + "', none of amx, avx512, avx2 and portable");
}

bool allows(int wanted) {
    static const int limit = read_limit();
    return wanted <= limit;
}

#if defined(__x86_64__) && defined(__GNUC__)
bool supports_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
bool supports_avx512() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
#if defined(__clang__) || __GNUC__ >= 10 // older compilers have no such instructions, nor their name
bool supports_bf16() { return __builtin_cpu_supports("avx512bf16"); }
#else
bool supports_bf16() { return false; }
#endif
#else
bool supports_avx2() { return false; }
bool supports_avx512() { return false; }
bool supports_bf16() { return false; }
#endif

} // namespace

bool has_avx2() { return allows(AVX2) && supports_avx2(); }
bool has_avx512() { return allows(AVX512) && supports_avx512(); }
bool has_avx512_bf16() { return has_avx512() && supports_bf16(); }
bool may_use_amx() { return allows(AMX) && has_avx512_bf16(); }

const char *instructions() { return has_avx512() ? NAMES[AVX512] : has_avx2() ? NAMES[AVX2] : NAMES[PORTABLE]; }

} // namespace trinity
