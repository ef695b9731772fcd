// The groups of this process, by name, and how those that span processes come together.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "group.h"

namespace mok::cpu {

// Where the processes of a job leave short texts for each other.
struct Board {
  std::function<void(const std::string& name, const std::string& text)> post;
  // Waits for the text; null if it does not come in time.
  std::function<std::unique_ptr<std::string>(const std::string& name, double seconds)> read;
};
// Groups that span processes belong to the job of their board: a new one starts without any.
void set_board(Board board);

struct GroupName {
  std::string name;  // of groups with other members, another one: each keeps an order of its own
  int32_t ranks;
  bool spans_processes;
};

// The rank's group; null if it spans processes and its founder, the process of rank 0, does not post it in time or is
// gone. A group of one needs no peers to agree with it, so any idle one serves; it goes back when the pointer dies.
std::shared_ptr<Group> get_group(const GroupName& name, int32_t rank, double patience_s);

// Over all groups of the process, for tests and diagnostics.
int64_t held_bytes();
void release_all();
void poison_all();

}  // namespace mok::cpu
