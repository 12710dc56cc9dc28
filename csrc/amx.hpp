// Leave to use AMX tiles, of internal linkage: each file that includes it is compiled for AMX.
#pragma once

#include "instructions.hpp"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace trinity {
namespace {

// The processor has them in bf16, TRINITY_ISA allows them, and the system lets this process use them: it keeps tiles from
// switch to switch only then.
bool amx_granted() {
    if (!may_use_amx()) return false;
    unsigned a = 0, b = 0, c = 0, d = 0;
    constexpr unsigned bf16 = 1u << 22, tiles = 1u << 24;
    constexpr long ask = 0x1023, tile_data = 18; // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    const bool there = __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & bf16) && (d & tiles);
    return there && syscall(SYS_arch_prctl, ask, tile_data) == 0;
}

} // namespace
} // namespace trinity
