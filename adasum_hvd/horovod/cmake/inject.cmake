# Included by CMake right after Horovod's `project(horovod CXX)`, because adasum_hvd/horovod/build/command.py passes
# -DCMAKE_PROJECT_horovod_INCLUDE=<this file> (CMake's documented injection point). Horovod's targets do
# not exist yet, so the real work waits until the top-level CMakeLists.txt has been read to its end.
# EVAL, because a deferred call expands its arguments late, when CMAKE_CURRENT_LIST_DIR is another folder.
cmake_language(EVAL CODE
  "cmake_language(DEFER DIRECTORY [[${CMAKE_SOURCE_DIR}]] CALL include [[${CMAKE_CURRENT_LIST_DIR}/targets.cmake]])")
# Debug information is a third of the compilers' time, and 70 MB a library. `build --debug` brings it back.
string(REGEX REPLACE "-g( |$)" "\\1" CMAKE_CXX_FLAGS_RELWITHDEBINFO "${CMAKE_CXX_FLAGS_RELWITHDEBINFO}")
# From GCC 15 on: what Gloo's and Horovod's headers use and do not include no longer comes with other headers, and a
# template of flatbuffers' that nothing uses would be an error.
add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:SHELL:-include cstdint -include string -Wno-template-body>")
