#include "registry.h"

#include <map>
#include <mutex>
#include <stdexcept>
#include <vector>

namespace mok::cpu {
namespace {

struct Registry {
  std::mutex mutex;
  std::map<std::string, std::shared_ptr<Group>> local, spanning;
  std::vector<std::shared_ptr<Group>> singles;
  std::shared_ptr<const Board> board;
};

Registry& registry() {
  static Registry* const r = new Registry;  // never destroyed: calls may still run at exit
  return *r;
}

std::shared_ptr<Group> idle_single() {
  Registry& r = registry();
  for (auto& g : r.singles)
    if (g.use_count() == 1) return g;
  r.singles.push_back(std::make_shared<Group>(1));
  return r.singles.back();
}

std::shared_ptr<Group> local_group(const GroupName& name) {
  Registry& r = registry();
  std::lock_guard<std::mutex> lock(r.mutex);
  if (name.ranks == 1) return idle_single();
  auto& g = r.local[name.name];
  if (g == nullptr) g = std::make_shared<Group>(name.ranks);
  return g;
}

// The founder's part. Its own peers in this process may find the group before it is posted: they know its name too.
std::shared_ptr<Group> found(const GroupName& name) {
  Registry& r = registry();
  std::unique_lock<std::mutex> lock(r.mutex);
  if (const auto it = r.spanning.find(name.name); it != r.spanning.end()) return it->second;
  const std::shared_ptr<Group> group = Group::found(name.ranks, name.name);
  r.spanning[name.name] = group;
  const std::shared_ptr<const Board> board = r.board;
  lock.unlock();
  board->post(name.name, group->handle());
  return group;
}

std::shared_ptr<Group> join(const GroupName& name, double patience_s) {
  Registry& r = registry();
  std::unique_lock<std::mutex> lock(r.mutex);
  if (const auto it = r.spanning.find(name.name); it != r.spanning.end()) return it->second;
  const std::shared_ptr<const Board> board = r.board;
  lock.unlock();
  const auto handle = board->read(name.name, patience_s);
  if (handle == nullptr) return nullptr;
  lock.lock();
  // a peer of this process may have been faster
  if (const auto it = r.spanning.find(name.name); it != r.spanning.end()) return it->second;
  if (Group::is_own(*handle)) throw std::runtime_error("this process has left the job that the EP group belongs to");
  const std::shared_ptr<Group> group = Group::join(name.ranks, name.name, *handle);
  if (group != nullptr) r.spanning[name.name] = group;
  return group;
}

template <class Visit>
void for_each_group(Visit visit) {
  Registry& r = registry();
  std::lock_guard<std::mutex> lock(r.mutex);
  for (auto* groups : {&r.local, &r.spanning})
    for (auto& item : *groups) visit(*item.second);
  for (auto& g : r.singles) visit(*g);
}

}  // namespace

void set_board(Board board) {
  Registry& r = registry();
  std::lock_guard<std::mutex> lock(r.mutex);
  r.spanning.clear();
  r.board = std::make_shared<const Board>(std::move(board));
}

std::shared_ptr<Group> get_group(const GroupName& name, int32_t rank, double patience_s) {
  if (!name.spans_processes) return local_group(name);
  return rank == 0 ? found(name) : join(name, patience_s);
}

int64_t held_bytes() {
  int64_t bytes = 0;
  for_each_group([&](Group& g) { bytes += g.held_bytes(); });
  return bytes;
}

void release_all() {
  for_each_group([](Group& g) { g.release(); });
}

void poison_all() {
  for_each_group([](Group& g) { g.poison(); });
}

}  // namespace mok::cpu
