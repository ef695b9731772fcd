#include "tile.h"

namespace mok::cpu {

extern const TileOps kTileOps_base[2];
#if defined(MOK_X86_TILES)
extern const TileOps kTileOps_avx2[2];
extern const TileOps kTileOps_avx512[2];
#endif

namespace {
const TileOps* best() {
#if defined(MOK_X86_TILES)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl"))
    return kTileOps_avx512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return kTileOps_avx2;
#endif
  return kTileOps_base;
}
}  // namespace

const TileOps& tile_ops(int32_t elem_bytes) {
  static const TileOps* const ops = best();
  return ops[elem_bytes == 2 ? 0 : 1];
}

}  // namespace mok::cpu
