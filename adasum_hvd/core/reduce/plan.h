// The levels of a reduction: first inside a host, then between hosts; a level is split into smaller ones if
// that is cheaper. All plans walk the one tree of tree.h; docs/cost_model.md has the costs.
#pragma once

#include <string>
#include <vector>

#include "reduce/tree.h"

namespace adasum_hvd {

struct GroupPlan {
  std::vector<int> group; // the ranks of this rank's group, in the order of the tree
  Tree tree;              // over the positions in the group
};

// Returns the levels of `rank`, inside a host first; hosts[r] is any id of rank r's host. One flat level over
// all ranks if the groups of the tree (tree.h: BuildTree) have different sizes.
//
// `radices` are the sizes of the levels' groups. Empty: the costs decide; {0}: the flat form. Throws
// std::invalid_argument if the tree does not have such levels.
//
// The levels must not depend on the tensors: values are rounded between levels, so levels that depend on
// sizes would make the results depend on fusion.
std::vector<GroupPlan> PlanLevels(const std::vector<int>& hosts, GroupOp group_op, int group_size, int rank,
                                  const std::vector<int>& radices);

// The sizes of the levels, as "4 x 2".
std::string Describe(const std::vector<GroupPlan>& levels);

} // namespace adasum_hvd
