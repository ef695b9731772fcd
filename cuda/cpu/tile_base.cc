#define MOK_ISA base
#define MOK_LANES 4
#define MOK_ROWS 6
#include "tile_kernels.h"

namespace mok::cpu {
extern const TileOps kTileOps_base[2];
const TileOps kTileOps_base[2] = {base::make_ops<base::bf16>("base"), base::make_ops<float>("base")};
}  // namespace mok::cpu
