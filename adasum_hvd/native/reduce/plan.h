// In which levels the ranks reduce: first inside a host, then between hosts, a level split into smaller ones
// where that is cheaper. All of them walk the one tree of tree.h; docs/cost_model.md has the costs.
#pragma once

#include <string>
#include <vector>

#include "reduce/tree.h"

namespace adasum_hvd {

struct GroupPlan {
  std::vector<int> group; // this rank's, in the order of the tree
  Tree tree;              // over the places in it
};

// The levels of `rank`, from the inside out; hosts[r] is any id of rank r's host. Flat, one level over all
// ranks, when the groups of the tree (tree.h: BuildTree) are not of one size.
//
// `radices` are the sizes of the levels' groups. Empty lets the costs decide; {0} asks for the flat form.
// Throws std::invalid_argument when the tree cannot be cut so.
//
// Depends on nothing but the arguments, and least of all on what is reduced: between levels values are
// rounded, so with other levels for other sizes the results would depend on how tensors are fused.
std::vector<GroupPlan> PlanLevels(const std::vector<int>& hosts, GroupOp group_op, int group_size, int rank,
                                  const std::vector<int>& radices);

// "4 x 2", for people.
std::string Describe(const std::vector<GroupPlan>& levels);

} // namespace adasum_hvd
