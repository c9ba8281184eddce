// Which vector level runs: the best one that is built and that this CPU has, or the one TXL_CPU_LEVEL names.
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu.h"
#include "memory.h"

#if TXL_HAVE_AMX_BF16 && !defined(TXL_SANITIZED)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace txl {

#define TXL_DECLARE(level)           \
  namespace level {                  \
  extern const Kernels kernels_f32;  \
  extern const Kernels kernels_f64;  \
  extern const Kernels kernels_bf16; \
  }
TXL_DECLARE(baseline)
TXL_DECLARE(avx2)
TXL_DECLARE(avx512)
TXL_DECLARE(avx512_bf16)
TXL_DECLARE(amx_bf16)
#undef TXL_DECLARE

namespace {

struct Level {
  const char* name;
  bool runs_here;
  const Kernels *f32, *f64, *bf16;
};

#if TXL_HAVE_AMX_BF16
// Linux lets a process use the tiles' registers once it has asked for them, and only if it knows them itself.
bool has_tiles() {
#if defined(TXL_SANITIZED)
  return true;
#else
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;  // names that not every compiler knows
  constexpr int kRequestPermission = 0x1023, kTileData = 18;    // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & kAmxBf16) && (d & kAmxTile) &&
         syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#endif
}
#endif

// Built levels, best last.
const std::vector<Level>& levels() {
  static const std::vector<Level> built = {
      {"baseline", true, &baseline::kernels_f32, &baseline::kernels_f64, &baseline::kernels_bf16},
#if TXL_HAVE_AVX2
      {"avx2", __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"), &avx2::kernels_f32,
       &avx2::kernels_f64, &avx2::kernels_bf16},
#endif
#if TXL_HAVE_AVX512
      {"avx512",
       __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"),
       &avx512::kernels_f32, &avx512::kernels_f64, &avx512::kernels_bf16},
#endif
#if TXL_HAVE_AVX512 && TXL_HAVE_AVX512_BF16
      {"avx512_bf16", __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw"),
       &avx512::kernels_f32, &avx512::kernels_f64, &avx512_bf16::kernels_bf16},
#if TXL_HAVE_AMX_BF16
      {"amx_bf16", __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") && has_tiles(),
       &amx_bf16::kernels_f32, &avx512::kernels_f64, &amx_bf16::kernels_bf16},
#endif
#endif
  };
  return built;
}

// The level that TXL_CPU_LEVEL names; null where it is not set.
const Level* named_level() {
  const char* wanted = std::getenv("TXL_CPU_LEVEL");
  if (!wanted || !*wanted) return nullptr;
  for (const Level& level : levels())
    if (level.runs_here && wanted == std::string(level.name)) return &level;
  throw std::runtime_error("TXL_CPU_LEVEL is '" + std::string(wanted) +
                           "', but the levels built and supported by this CPU are " + cpu_levels() +
                           "; unset it to use the best of them");
}

const Level* best_level() {
  const Level* best = nullptr;
  for (const Level& level : levels())
    if (level.runs_here) best = &level;
  return best;
}

struct Choice {
  const Level* level;
  bool named;
};

// Made once; a wrong name raises at every call until it is mended.
const Choice& choice() {
  static const Choice made = [] {
    const Level* named = named_level();
    return Choice{named ? named : best_level(), named != nullptr};
  }();
  return made;
}

const Kernels& kernels_of(const Level& level, DType dtype) {
  switch (dtype) {
    case DType::f32:
      return *level.f32;
    case DType::f64:
      return *level.f64;
    case DType::bf16:
      return *level.bf16;
    default:
      throw std::runtime_error("the CPU kernels serve float32, float64 and bfloat16");
  }
}

const Kernels& chosen(DType dtype) { return kernels_of(*choice().level, dtype); }

const Level* level_for(DType dtype, const Problem& problem) {
  const Level* level = choice().level;
  while (!choice().named && !kernels_of(*level, dtype).suits(problem)) --level;
  return level;
}

}  // namespace

std::string cpu_level() {
  Memory::most_kept();  // before any call: a wrong setting is told then, as one of TXL_CPU_LEVEL is
  return choice().level->name;
}

std::string cpu_levels() {
  std::string names;
  for (const Level& level : levels())
    if (level.runs_here) names += (names.empty() ? "" : ",") + std::string(level.name);
  return names;
}

void cpu_forward(DType dtype, const Problem& problem, const Forward& tensors, const Pool& pool) {
  kernels_of(*level_for(dtype, problem), dtype).forward(problem, tensors, pool);
}

void cpu_backward(DType dtype, const Problem& problem, const Backward& tensors, const Pool& pool) {
  const Level* asked = level_for(dtype, problem);
  while (!kernels_of(*asked, dtype).backward(problem, tensors, pool)) --asked;
}

void cpu_linear(DType dtype, const Linear& tensors, const Pool& pool) { chosen(dtype).linear(tensors, pool); }

void cpu_layer(DType dtype, const Layer& tensors, const Pool& pool) { chosen(dtype).layer(tensors, pool); }

void cpu_dropout(DType dtype, const Elements& tensors, const Pool& pool) {
  chosen(dtype).dropout(tensors, pool);
}

}  // namespace txl
