// Which vector level runs: the best one that is built and that this CPU has, or the one TXL_CPU_LEVEL names.
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu.h"

#if TXL_HAVE_AMX_BF16 && !defined(TXL_SOFTWARE_TILES)
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
#if defined(TXL_SOFTWARE_TILES)
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
       &avx512::kernels_f32, &avx512::kernels_f64, &amx_bf16::kernels_bf16},
#endif
#endif
  };
  return built;
}

std::string join(bool only_usable) {
  std::string names;
  for (const Level& level : levels())
    if (level.runs_here || !only_usable) names += (names.empty() ? "" : ",") + std::string(level.name);
  return names;
}

const Level& find_level() {
  const char* wanted = std::getenv("TXL_CPU_LEVEL");
  const Level* best = nullptr;
  for (const Level& level : levels()) {
    if (!level.runs_here) continue;
    if (!wanted || !*wanted || wanted == std::string(level.name)) best = &level;
  }
  if (!best)
    throw std::runtime_error("TXL_CPU_LEVEL is '" + std::string(wanted) +
                             "', but the levels built and supported by this CPU are " + join(true) +
                             "; unset it to use the best of them");
  return *best;
}

// The choice is made once; a wrong name raises at every call until it is mended.
const Level& level() {
  static const Level& chosen = find_level();
  return chosen;
}

const Kernels& of(const Level& level, DType dtype) {
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

// Asks the chosen level, and while one declines the next lower one: those with plain arithmetic never do.
template <typename F>
void ask(DType dtype, F run) {
  for (const Level* asked = &level(); !run(of(*asked, dtype)); --asked) {
  }
}

}  // namespace

std::string cpu_level() { return level().name; }
std::string cpu_levels() { return join(true); }

void cpu_forward(DType dtype, const Problem& problem, const Forward& tensors, const Pool& pool) {
  ask(dtype, [&](const Kernels& kernels) { return kernels.forward(problem, tensors, pool); });
}

void cpu_backward(DType dtype, const Problem& problem, const Backward& tensors, const Pool& pool) {
  ask(dtype, [&](const Kernels& kernels) { return kernels.backward(problem, tensors, pool); });
}

void cpu_linear(DType dtype, const Linear& tensors, const Pool& pool) {
  of(level(), dtype).linear(tensors, pool);
}

void cpu_layer(DType dtype, const Layer& tensors, const Pool& pool) {
  of(level(), dtype).layer(tensors, pool);
}

void cpu_dropout(DType dtype, const Elements& tensors, const Pool& pool) {
  of(level(), dtype).dropout(tensors, pool);
}

}  // namespace txl
