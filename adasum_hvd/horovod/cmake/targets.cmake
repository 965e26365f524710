# Runs after Horovod has defined all its targets; adds the AdaSum op and brings the build to C++17.
# With inject.cmake, the only file of this project that knows Horovod's build.
get_filename_component(ADASUM_NATIVE_DIR "${CMAKE_CURRENT_LIST_DIR}" DIRECTORY)

# torch >= 2.1 and TF >= 2.10 need C++17, torch >= 2.14 C++20, and what both have is compiled as torch's. TF's symbols
# have types of C++17, in whose place Abseil's headers put those of C++20.
set(ADASUM_CXX_STANDARD 17)
if(TARGET pytorch)
  get_directory_property(torch_version DIRECTORY "${CMAKE_SOURCE_DIR}/horovod/torch" DEFINITION Pytorch_VERSION)
  if(torch_version VERSION_GREATER_EQUAL 2.14)
    set(ADASUM_CXX_STANDARD 20)
  endif()
endif()
foreach(target IN ITEMS pytorch gloo compatible17_gloo)
  if(TARGET ${target})
    set_target_properties(${target} PROPERTIES CXX_STANDARD ${ADASUM_CXX_STANDARD} CXX_STANDARD_REQUIRED ON)
  endif()
endforeach()
if(TARGET tensorflow)
  set_target_properties(tensorflow PROPERTIES CXX_STANDARD 17 CXX_STANDARD_REQUIRED ON)
endif()

# TF 2.21 ships XLA headers that include highwayhash, but not highwayhash itself.
if(TARGET tensorflow)
  get_target_property(tensorflow_sources tensorflow SOURCES)
  get_directory_property(tensorflow_includes DIRECTORY "${CMAKE_SOURCE_DIR}/horovod/tensorflow" INCLUDE_DIRECTORIES)
  find_path(ADASUM_HIGHWAYHASH highwayhash/arch_specific.h PATHS ${tensorflow_includes} NO_DEFAULT_PATH NO_CACHE)
  if(NOT ADASUM_HIGHWAYHASH)
    list(FILTER tensorflow_sources EXCLUDE REGEX "xla_mpi_ops\\.cc$")
    set_target_properties(tensorflow PROPERTIES SOURCES "${tensorflow_sources}")
    message(STATUS "AdaSum: Horovod's XLA op is left out, TensorFlow's headers lack highwayhash")
  endif()
endif()

# Every file of these folders is compiled; what needs a backend or a device is named here. A file that is new or gone is
# seen by the next build. The core is compiled apart, below.
file(GLOB ADASUM_SOURCES CONFIGURE_DEPENDS RELATIVE "${ADASUM_NATIVE_DIR}" "${ADASUM_NATIVE_DIR}/op/*.cc"
     "${ADASUM_NATIVE_DIR}/network/*.cc" "${ADASUM_NATIVE_DIR}/failure/*.cc" "${ADASUM_NATIVE_DIR}/cuda/*.cc")
list(REMOVE_ITEM ADASUM_SOURCES op/tensorflow_stream.cc)
if(NOT HAVE_GLOO)
  list(REMOVE_ITEM ADASUM_SOURCES network/gloo.cc)
endif()
if(NOT HAVE_MPI)
  list(REMOVE_ITEM ADASUM_SOURCES network/mpi.cc)
endif()
if(NOT (HAVE_CUDA AND HAVE_NCCL))
  list(REMOVE_ITEM ADASUM_SOURCES op/adasum_device_op.cc)
  list(FILTER ADASUM_SOURCES EXCLUDE REGEX "^cuda/")
endif()
list(TRANSFORM ADASUM_SOURCES PREPEND "${ADASUM_NATIVE_DIR}/")
include("${ADASUM_NATIVE_DIR}/core.cmake")

# 1 for the newer ABI of libstdc++, with which both frameworks are built today; older torch has 0.
function(adasum_abi_of variable folder)
  get_directory_property(flags DIRECTORY "${folder}" DEFINITION CMAKE_CXX_FLAGS)
  set(${variable} 1 PARENT_SCOPE)
  if(flags MATCHES "_GLIBCXX_USE_CXX11_ABI=0")
    set(${variable} 0 PARENT_SCOPE)
  endif()
endfunction()

# Moves what no framework's header is needed for to libraries of objects: the core, Horovod's common sources and ours.
# Targets of one ABI and of the same definitions share them, so that each source is compiled once.
function(adasum_share target)
  get_target_property(folder ${target} SOURCE_DIR)
  adasum_abi_of(abi "${folder}")
  get_directory_property(definitions DIRECTORY "${folder}" COMPILE_DEFINITIONS)
  list(FILTER definitions EXCLUDE REGEX "^(PYTORCH_VERSION|TENSORFLOW_VERSION|TORCH_API_INCLUDE_EXTENSION_H)=")
  list(APPEND definitions _GLIBCXX_USE_CXX11_ABI=${abi})
  get_target_property(sources ${target} SOURCES)
  set(common "${sources}")
  list(FILTER common INCLUDE REGEX "/horovod/common/")
  list(FILTER sources EXCLUDE REGEX "/horovod/common/")
  string(MD5 key "${definitions};${common}")
  string(SUBSTRING "${key}" 0 8 key)
  if(NOT TARGET adasum_core_${key})
    adasum_add_core(adasum_core_${key})
    target_compile_definitions(adasum_core_${key} PRIVATE _GLIBCXX_USE_CXX11_ABI=${abi})
    # Without the frameworks' own folders, of which TensorFlow's replaces Horovod's Eigen: the commands stay the same
    # when the other framework is added to a build. No binding uses a member that is of Eigen.
    get_target_property(includes ${target} INCLUDE_DIRECTORIES)
    list(FILTER includes EXCLUDE REGEX "/(torch|tensorflow)/include")
    foreach(folder IN ITEMS eigen flatbuffers/include)
      list(REMOVE_ITEM includes "${CMAKE_SOURCE_DIR}/third_party/${folder}")
      list(APPEND includes "${CMAKE_SOURCE_DIR}/third_party/${folder}")
    endforeach()
    add_library(adasum_common_${key} OBJECT ${common} ${ADASUM_SOURCES})
    set_target_properties(adasum_common_${key} PROPERTIES CXX_STANDARD ${ADASUM_CXX_STANDARD} CXX_STANDARD_REQUIRED ON
      COMPILE_DEFINITIONS "${definitions}" INCLUDE_DIRECTORIES "${includes}")
    adasum_flags(adasum_common_${key})
  endif()
  set_property(TARGET ${target} PROPERTY SOURCES "${sources}")
  target_sources(${target} PRIVATE $<TARGET_OBJECTS:adasum_core_${key}> $<TARGET_OBJECTS:adasum_common_${key}>)
  # Horovod compiles Gloo once more for TensorFlow, in C++17, which now is everybody's standard.
  get_target_property(libraries ${target} LINK_LIBRARIES)
  if(abi EQUAL 1 AND "compatible17_gloo" IN_LIST libraries)
    list(TRANSFORM libraries REPLACE "^compatible17_gloo$" gloo)
    set_target_properties(${target} PROPERTIES LINK_LIBRARIES "${libraries}")
    set_target_properties(compatible17_gloo PROPERTIES EXCLUDE_FROM_ALL ON)
  endif()
endfunction()

# The flags of our sources, and of those of Horovod's that are changed, in a target.
function(adasum_flags target)
  # The same bits on every machine: no fused multiply-add that one instruction set has and another has not.
  set_source_files_properties(${ADASUM_SOURCES} TARGET_DIRECTORY ${target} PROPERTIES COMPILE_OPTIONS
    "-I${CMAKE_SOURCE_DIR};-I${ADASUM_NATIVE_DIR};-fvisibility=hidden;-O3;-ffp-contract=off;-fno-fast-math;-Wno-psabi")
  # The header explains each change to Horovod's calls; the macro selects the changes for one source.
  set(header "${ADASUM_NATIVE_DIR}/op/horovod_internals.h")
  foreach(pair IN ITEMS common/operations:OPERATIONS common/controller:CONTROLLER
          common/gloo/gloo_context:GLOO_CONTEXT torch/mpi_ops_v2:WAITING_LOOPS tensorflow/mpi_ops:WAITING_LOOPS)
    string(REGEX MATCH "^(.*):(.*)$" matched ${pair})
    set_source_files_properties("${CMAKE_SOURCE_DIR}/horovod/${CMAKE_MATCH_1}.cc" TARGET_DIRECTORY ${target}
      PROPERTIES COMPILE_OPTIONS
      "-I${CMAKE_SOURCE_DIR};-I${ADASUM_NATIVE_DIR};-DADASUM_IN_HOROVOD;-DADASUM_IN_${CMAKE_MATCH_2};-include;${header}"
      OBJECT_DEPENDS "${header}")
  endforeach()
endfunction()

set(ADASUM_KERNEL_LIBRARIES)
foreach(target IN ITEMS pytorch tensorflow)
  if(NOT TARGET ${target})
    continue()
  endif()
  adasum_share(${target})
  adasum_flags(${target})
  # What is left binds the library to a framework: templates of its headers, and no arithmetic. A precompiled header
  # takes as long to compile as it saves, and 760 MB.
  target_compile_options(${target} PRIVATE -O1)
  if(target STREQUAL tensorflow AND HAVE_CUDA)
    set(source "${ADASUM_NATIVE_DIR}/op/tensorflow_stream.cc")
    target_sources(${target} PRIVATE "${source}")
    set_source_files_properties("${source}" TARGET_DIRECTORY ${target} PROPERTIES COMPILE_OPTIONS "-fvisibility=hidden")
  endif()
  # site-packages/horovod/<framework> to the environment's lib: the MPI wheel of whichever environment this
  # is installed in comes before the one it was built with.
  set_property(TARGET ${target} APPEND PROPERTY BUILD_RPATH "$ORIGIN/../../../..")
  # The kernels go into Horovod's own library of CUDA kernels, of which a target links the one of its ABI: for the
  # devices that Horovod is built for.
  if(HAVE_CUDA AND HAVE_NCCL)
    get_target_property(libraries ${target} LINK_LIBRARIES)
    foreach(library IN ITEMS horovod_cuda_kernels compatible_horovod_cuda_kernels)
      if(library IN_LIST libraries)
        list(APPEND ADASUM_KERNEL_LIBRARIES ${library})
      endif()
    endforeach()
  endif()
  message(STATUS "AdaSum: op added to ${target}")
endforeach()

list(REMOVE_DUPLICATES ADASUM_KERNEL_LIBRARIES)
foreach(library IN LISTS ADASUM_KERNEL_LIBRARIES)
  file(GLOB sources CONFIGURE_DEPENDS "${ADASUM_NATIVE_DIR}/cuda/*.cu")
  target_sources(${library} PRIVATE ${sources})
  set_target_properties(${library} PROPERTIES CUDA_STANDARD 17)
  # Sums that are error-free are so only where no compiler joins a product and a sum.
  set_source_files_properties(${sources} TARGET_DIRECTORY ${library} PROPERTIES COMPILE_OPTIONS
    "-I${ADASUM_NATIVE_DIR};-O3;-fmad=false;-Xcompiler=-fvisibility=hidden")
  message(STATUS "AdaSum: kernels added to ${library}")
endforeach()
