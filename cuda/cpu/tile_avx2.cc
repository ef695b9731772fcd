#define MOK_ISA avx2
#define MOK_LANES 8
#define MOK_ROWS 6
#include "tile_kernels.h"

namespace mok::cpu {
extern const TileOps kTileOps_avx2[2];
const TileOps kTileOps_avx2[2] = {avx2::make_ops<avx2::bf16>("avx2"), avx2::make_ops<float>("avx2")};
}  // namespace mok::cpu
